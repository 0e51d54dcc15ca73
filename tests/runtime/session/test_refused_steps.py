"""A job of one with wrong sums: the step is repeated; if it fails again, the job saves and ends."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

from holdfast.errors import JobFailedError
from holdfast.protocol.checkpoints.directory import find_usable_checkpoints
from holdfast.runtime.moe.layer.moe_layer import MoE
from holdfast.runtime.session.job import Job
from holdfast.runtime.session.session import Session
from holdfast.storage import LocalStorage

X = torch.randn(20, 4, generator=torch.Generator().manual_seed(0))
DATA = TensorDataset(X, X.sum(1, keepdim=True))


class Loop:
    """A script with sums that are corrupted in some attempts."""

    def __init__(self, directory: Path | str = "", *, experts: bool = False) -> None:
        torch.manual_seed(0)
        middle = MoE(8, 8, 4, top_k=2) if experts else torch.nn.Linear(8, 8)
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 8), middle, torch.nn.Linear(8, 1))
        self.job = Job(None, checkpoint_dir=str(directory) or None, checkpoint_every=100)
        self.applied: dict[int, float] = {}
        self.undone: list[int] = []
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.job.protect(self.model, optimizer, DATA, global_batch=6, micro_batch=2, max_grad_norm=1.0)

    @property
    def session(self) -> Session:
        assert self.job._session is not None
        return self.job._session

    def run(self, steps: int, spoilt: dict[int, int]) -> None:
        """Train; for each step in `spoilt`, corrupt the sums of this many attempts."""
        for step in self.job.steps(steps):
            for x, y in step.micro_batches():
                step.backward(mse_loss(self.model(x), y))
            if spoilt.get(step.number):
                spoilt[step.number] -= 1
                self.session.workload.sums.hashes += 1
            if step.apply():
                self.applied[step.number] = step.loss
            else:
                self.undone.append(step.number)


@pytest.mark.parametrize("experts", [False, True], ids=["dense", "experts"])
def test_a_refused_step_is_repeated_with_the_same_resulting_state(experts: bool) -> None:
    undisturbed, loop = Loop(experts=experts), Loop(experts=experts)
    undisturbed.run(5, {})
    loop.run(5, {2: 1, 3: 1, 5: 1})
    assert loop.undone == [2, 3, 5]
    assert loop.applied == undisturbed.applied
    assert all(map(torch.equal, loop.model.state_dict().values(), undisturbed.model.state_dict().values()))


def test_a_step_refused_twice_ends_the_job_with_the_previous_step_saved(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    with pytest.raises(JobFailedError, match=r"step 3 is not made of each of its 3 micro-batches once: .*, twice"):
        loop.run(5, {3: 2})
    loop.session.close()
    assert list(loop.applied) == [1, 2]
    assert [known.step for known in find_usable_checkpoints(LocalStorage(tmp_path), print)] == [2]
    resumed = Loop(tmp_path)
    resumed.run(5, {})
    assert list(resumed.applied) == [3, 4, 5]
