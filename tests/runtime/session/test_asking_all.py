"""job.stop and job.checkpoint in a world of one, as seen by a script."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.utils.data import TensorDataset

from holdfast.errors import BadInputError
from holdfast.protocol.checkpoints import directory as checkpoint_dir
from holdfast.runtime.session.job import Job
from holdfast.storage import LocalStorage

DEADLINE_S = 60.0
X = torch.randn(20, 4, generator=torch.Generator().manual_seed(0))


def protected(folder: Path | str = "") -> tuple[Job, torch.nn.Module]:
    job, model = Job(None, checkpoint_dir=str(folder), checkpoint_every=1000), torch.nn.Linear(4, 1)
    data = TensorDataset(X, X.sum(1, keepdim=True))
    job.protect(model, torch.optim.SGD(model.parameters(), lr=0.01), data, global_batch=4, micro_batch=2)
    return job, model


def steps_of(
    job: Job, model: torch.nn.Module, *, before: Callable[[int], None] | None = None, after: Callable[[int], None]
) -> list[int]:
    """Train for up to ten steps; return the applied ones."""
    done: list[int] = []
    for step in job.steps(10):
        if before is not None:
            before(step.number)
        for x, y in step.micro_batches():
            step.backward(torch.nn.functional.mse_loss(model(x), y))
        assert step.apply()
        done.append(step.number)
        after(step.number)
    return done


def test_a_stop_ends_the_job_with_the_next_committed_step_saved(tmp_path: Path) -> None:
    job, model = protected(tmp_path)
    done = steps_of(job, model, after=lambda number: job.stop("good enough") if number == 3 else None)
    assert done == [1, 2, 3, 4]
    assert [name.step for name in checkpoint_dir.find_checkpoints(LocalStorage(tmp_path))] == [4]


def test_a_stop_before_apply_makes_the_current_step_the_last() -> None:
    job, model = protected()
    done = steps_of(
        job, model, before=lambda number: job.stop("good enough") if number == 3 else None, after=lambda _: None
    )
    assert done == [1, 2, 3]


def test_a_requested_checkpoint_has_the_next_committed_step(tmp_path: Path) -> None:
    job, model = protected(tmp_path)

    def saved() -> list[int]:
        return [name.step for name in checkpoint_dir.find_checkpoints(LocalStorage(tmp_path))]

    def ask(number: int) -> None:
        if number in (3, 4):
            job.checkpoint()
        deadline = time.monotonic() + DEADLINE_S
        while number in (4, 5) and number not in saved():  # Each checkpoint is written before the next one is due.
            assert time.monotonic() < deadline
            time.sleep(0.01)

    steps_of(job, model, after=ask)
    assert saved() == [5, 10]  # The job keeps two checkpoints.


def test_invalid_stop_and_checkpoint_requests_are_refused() -> None:
    alone = Job(None)
    with pytest.raises(BadInputError, match=r"call job\.protect\(\.\.\.\) before job\.stop"):
        alone.stop("enough")
    with pytest.raises(BadInputError, match=r"call job\.protect\(\.\.\.\) before job\.checkpoint"):
        alone.checkpoint()
    job, model = protected()
    with pytest.raises(BadInputError, match="there is no checkpoint directory; give --checkpoint-dir"):
        job.checkpoint()
    job.stop("the test is over")
    assert steps_of(job, model, after=lambda _: None) == [1]
