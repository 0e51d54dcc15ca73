"""Scripts that freeze, unfreeze and add parameter groups in mid-training, with the results of plain PyTorch."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

from holdfast.errors import StepUseError
from holdfast.runtime.checkpoints.changed_settings import changed_settings
from holdfast.runtime.session.job import Job
from holdfast.runtime.session.step import Step
from holdfast.runtime.state.optimizers import Optimizers
from holdfast.runtime.state.state import TrainingState

X = torch.randn(32, 4, generator=torch.Generator().manual_seed(0)).double()
Y = X.sum(1, keepdim=True).sin()
CHANGE_AT = 3


class Script:
    """A model of two layers; the optimizer has the second one, or both."""

    def __init__(self, *, both: bool = True, frozen: bool = False) -> None:
        torch.manual_seed(0)
        self.first = torch.nn.Linear(4, 4).double().requires_grad_(not frozen)
        self.last = torch.nn.Linear(4, 1).double()
        self.model = torch.nn.Sequential(self.first, torch.nn.Tanh(), self.last)
        trained = self.model.parameters() if both else self.last.parameters()
        self.optimizer = torch.optim.AdamW(trained, lr=0.02)

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return mse_loss(self.model(x), y)

    def freeze(self) -> None:
        self.first.requires_grad_(False)

    def unfreeze(self) -> None:
        self.first.requires_grad_(True)

    def add(self) -> None:
        self.first.requires_grad_(True)
        self.optimizer.add_param_group({"params": list(self.first.parameters()), "lr": 0.005})

    def train(
        self,
        steps: int,
        change: Callable[[], None],
        *,
        directory: Path | None = None,
        in_loop: bool = False,
        job: Job | None = None,
    ) -> Job:
        job = job or Job(None, checkpoint_dir=directory and str(directory), checkpoint_every=2)

        def after(step: Step) -> None:
            if step.number == CHANGE_AT and not in_loop:
                change()

        job.protect(self.model, self.optimizer, TensorDataset(X, Y), global_batch=8, micro_batch=4, after_apply=after)
        for step in job.steps(steps):
            if in_loop and step.number == CHANGE_AT + 1:
                change()
            for x, y in step.micro_batches():
                step.backward(self.loss(x, y))
            assert step.apply()
        return job

    def train_plainly(self, steps: int, change: Callable[[], None]) -> None:
        """Train as a plain loop does, on holdfast's samples."""
        job = Job(None)
        job.protect(self.model, self.optimizer, TensorDataset(X, Y), global_batch=8, micro_batch=4)
        session = job._session
        assert session is not None
        optimizer = type(self.optimizer)(self.optimizer.param_groups, lr=0.02)
        self.optimizer = optimizer
        for number in range(1, steps + 1):
            optimizer.zero_grad()
            for micro_batch in range(2):
                x, y = session.workload.loader.load(number, micro_batch)
                (self.loss(x, y) / 2).backward()
            optimizer.step()
            if number == CHANGE_AT:
                change()
        job._session = None


def values(script: Script) -> list[float]:
    return torch.cat([p.detach().flatten() for p in script.model.parameters()]).tolist()


CASES = {
    "freeze": (lambda: Script(), Script.freeze),
    "unfreeze": (lambda: Script(frozen=True), Script.unfreeze),
    "add": (lambda: Script(both=False, frozen=True), Script.add),
}


@pytest.mark.parametrize("in_loop", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_parameters_frozen_or_added_later_train_like_plain_pytorch(case: str, in_loop: bool) -> None:
    make, change = CASES[case]
    ours, plain = make(), make()
    first = values(ours)
    ours.train(8, lambda: change(ours), in_loop=in_loop)
    plain.train_plainly(8, lambda: change(plain))
    assert values(ours) == pytest.approx(values(plain), rel=1e-12)
    assert values(ours) != first


@pytest.mark.parametrize("case", CASES)
def test_a_resumed_job_trains_the_same_parameters(case: str, tmp_path: Path) -> None:
    make, change = CASES[case]
    whole, begun, resumed = make(), make(), make()
    whole.train(9, lambda: change(whole))
    begun.train(6, lambda: change(begun), directory=tmp_path)
    resumed.train(9, lambda: None, directory=tmp_path)  # Step 3 is over, so only the checkpoint contains the change.
    assert values(resumed) == values(whole)
    assert [p.requires_grad for p in resumed.model.parameters()] == [p.requires_grad for p in whole.model.parameters()]
    assert len(resumed.optimizer.param_groups) == len(whole.optimizer.param_groups)


def adopt(target: TrainingState, source: TrainingState) -> None:
    view = source.capture()
    tensors = target.prepare(view.manifest)
    for here, there in zip(tensors, view.tensors, strict=True):
        here.detach().copy_(there.detach())
    target.adopt(view.manifest, tensors)


def test_an_older_state_removes_a_parameter_group_added_later() -> None:
    """The optimizer's state of its parameters goes too: its memory is reused for the received state."""
    before, after = Script(both=False, frozen=True), Script(both=False, frozen=True)
    older, newer = (script.train(1, lambda: None)._session for script in (before, after))
    assert older is not None
    assert newer is not None
    after.add()
    after.optimizer.param_groups[0]["own"] = True
    for parameter in after.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    with newer.workload.update._guard.allow_steps():
        after.optimizer.step()
    adopt(newer.workload.state, older.workload.state)
    assert len(after.optimizer.param_groups) == 1
    assert "own" not in after.optimizer.param_groups[0]
    assert not any(p.requires_grad for p in after.first.parameters())
    assert set(after.optimizer.state) == set(after.last.parameters())


def test_a_received_state_adds_a_group_of_named_parameters() -> None:
    scripts = [Script(both=False, frozen=True) for _ in range(2)]
    states: list[TrainingState] = []
    for script in scripts:
        script.optimizer = torch.optim.AdamW(script.last.named_parameters(), lr=0.02)
        states.append(TrainingState(script.model, script.optimizer))
    scripts[0].first.requires_grad_(True)
    scripts[0].optimizer.add_param_group({"params": list(scripts[0].first.named_parameters()), "lr": 0.005})
    adopt(states[1], states[0])
    assert scripts[1].optimizer.param_groups[1]["lr"] == 0.005
    assert scripts[1].first.weight.requires_grad


def test_only_groups_present_on_both_sides_are_compared() -> None:
    """Each optimizer is compared with itself: a group that the first one lacks does not shift the second one's."""
    script = Script(both=False)
    first = torch.optim.SGD([script.first.weight], lr=0.1)
    optimizers = Optimizers({"first": first, "last": script.optimizer})
    before = optimizers.settings()
    first.add_param_group({"params": [script.first.bias], "lr": 0.3})
    assert list(changed_settings(before, optimizers.settings())) == []
    assert list(changed_settings(optimizers.settings(), before)) == []


def test_the_manifest_lists_frozen_parameters() -> None:
    """The state's hash covers the manifest, so replicas that train different parameters never compare equal."""
    script = Script()
    session = script.train(1, lambda: None)._session
    assert session is not None
    trained = session.workload.state.capture().manifest
    script.freeze()
    frozen = session.workload.state.capture().manifest
    assert (trained.frozen, frozen.frozen) == ((), (0, 1))


def test_changes_of_an_unfinished_step_are_not_saved(tmp_path: Path) -> None:
    """The resumed loop runs this step again, and would otherwise change the learning rate twice."""
    script, job = Script(), Job(None, checkpoint_dir=str(tmp_path), checkpoint_every=100)
    job.protect(script.model, script.optimizer, TensorDataset(X, Y), global_batch=8, micro_batch=4)
    for step in job.steps(8):
        if step.number == CHANGE_AT:
            script.optimizer.param_groups[0]["lr"] *= 0.5
            break
        for x, y in step.micro_batches():
            step.backward(script.loss(x, y))
        assert step.apply()
    job.await_saved()
    resumed = Script()
    resumed.train(CHANGE_AT, lambda: None, directory=tmp_path)
    whole = Script()
    whole.train(CHANGE_AT, lambda: None)
    assert resumed.optimizer.param_groups[0]["lr"] == 0.02
    assert values(resumed) == values(whole)


@pytest.mark.parametrize("case", ["freeze", "unfreeze"])
def test_changes_between_micro_batches_of_a_step_are_refused(case: str) -> None:
    make, change = CASES[case]
    script = make()
    job = Job(None)
    job.protect(script.model, script.optimizer, TensorDataset(X, Y), global_batch=8, micro_batch=4)
    step = next(job.steps(1))

    def compute() -> None:
        for x, y in step.micro_batches():
            step.backward(script.loss(x, y))
            change(script)

    with pytest.raises(StepUseError, match="after a micro-batch of this step had its backward"):
        compute()


def test_a_group_with_a_parameter_outside_the_model_is_refused() -> None:
    script = Script()
    new = torch.nn.Linear(4, 4).double()
    with pytest.raises(StepUseError, match=r"shape \(4, 4\) that the model given to job\.protect\(\) does not have"):
        script.train(6, lambda: script.optimizer.add_param_group({"params": list(new.parameters())}))


def test_a_parameter_added_to_a_second_optimizer_is_refused() -> None:
    script = Script(both=False)
    other = torch.optim.SGD(script.first.parameters(), lr=0.1)
    job = Job(None)
    optimizers = {"first": other, "last": script.optimizer}
    job.protect(script.model, optimizers, TensorDataset(X, Y), global_batch=8, micro_batch=4)
    script.optimizer.add_param_group({"params": list(script.first.parameters())})

    def train() -> None:
        for step in job.steps(2):
            for x, y in step.micro_batches():
                step.backward(script.loss(x, y))
            step.apply()

    with pytest.raises(StepUseError, match="is in optimizer 'first' too"):
        train()


def test_settings_changed_by_a_checkpoint_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    script = Script()
    script.train(2, lambda: None, directory=tmp_path)
    resumed = Script(frozen=True)
    resumed.optimizer = torch.optim.AdamW(resumed.model.parameters(), lr=0.03, weight_decay=0.5, betas=(0.5, 0.9))
    with caplog.at_level(logging.WARNING):
        resumed.train(3, lambda: None, directory=tmp_path)
    logged = [record.getMessage() for record in caplog.records if "checkpoint" in record.getMessage()]
    assert "the checkpoint's learning rate 0.02 is used, not the script's 0.03" in logged
    assert any(
        "the checkpoint's weight_decay 0.01 is used, not the script's 0.5: to change it" in one for one in logged
    )
    assert any("betas (0.9, 0.999) is used, not the script's (0.5, 0.9)" in one for one in logged)
    assert any("trains 0.weight, 0.bias, unlike the script" in one for one in logged)


def test_a_checkpoint_without_frozen_parameters_listed_freezes_nothing() -> None:
    """Checkpoints of earlier versions have no such field."""
    script = Script(frozen=True)
    session = script.train(1, lambda: None)._session
    assert session is not None
    state = session.workload.state
    state._restore_frozen(None)
    assert not any(p.requires_grad for p in script.first.parameters())
