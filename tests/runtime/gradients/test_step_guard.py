"""Lines left over from a plain loop are refused, with their line in the script."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import ConstantLR, CosineAnnealingLR, LinearLR, ReduceLROnPlateau, SequentialLR
from torch.utils.data import TensorDataset

from holdfast.errors import BadInputError, StepUseError
from holdfast.runtime.session.job import Job

X = torch.ones(8, 2)


class Script:
    def __init__(self) -> None:
        self.model = torch.nn.Linear(2, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def protect(self, **options: Any) -> Job:
        job = Job(None)
        job.protect(self.model, self.optimizer, TensorDataset(X), global_batch=4, micro_batch=2, **options)
        return job

    def train(self, job: Job, before: Callable[[], object], after: Callable[[], object], steps: int = 3) -> None:
        for step in job.steps(steps):
            for (x,) in step.micro_batches():
                step.backward(self.model(x).mean())
            before()
            step.apply()
            after()


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_direct_optimizer_step_is_refused_with_its_line(when: str) -> None:
    script = Script()
    job = script.protect()
    step, nothing = script.optimizer.step, lambda: None
    with pytest.raises(StepUseError, match=r"test_step_guard\.py:\d+: SGD\.step\(\) was called outside of step\.apply"):
        script.train(job, step if when == "before" else nothing, step if when == "after" else nothing)


def test_an_optimizer_step_in_after_apply_is_refused() -> None:
    script = Script()
    job = script.protect(after_apply=lambda step: script.optimizer.step())
    with pytest.raises(StepUseError, match="remove the line"):
        script.train(job, lambda: None, lambda: None)


def test_an_optimizer_subclass_may_call_the_step_of_its_base_class() -> None:
    class Counting(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    script = Script()
    script.optimizer = Counting(script.model.parameters(), lr=0.1)
    script.train(script.protect(), lambda: None, lambda: None)


@pytest.mark.parametrize(
    "make",
    [
        lambda one: CosineAnnealingLR(one, 300),
        ReduceLROnPlateau,
        lambda one: SequentialLR(one, [ConstantLR(one), LinearLR(one)], [2]),
    ],
)
def test_a_scheduler_missing_from_extra_is_refused_with_its_line(make: Any) -> None:
    script = Script()
    sched = make(script.optimizer)
    with pytest.raises(BadInputError, match=r"LR\w* \w+ drives .* not in extra") as refused:
        script.protect()
    if False:
        sched.step()  # the line that is named
    assert "test_step_guard.py:" in str(refused.value)


def test_the_refusal_names_the_variable_and_the_line() -> None:
    script = Script()
    my_schedule = CosineAnnealingLR(script.optimizer, 300)
    with pytest.raises(BadInputError, match=r'extra=\{"scheduler": my_schedule\}') as refused:
        script.protect()
    line = str(refused.value).split(": the ", 1)[0].rsplit(":", 1)[1]
    assert "my_schedule.step()  # this line" in Path(__file__).read_text().splitlines()[int(line) - 1]
    if line == "0":
        my_schedule.step()  # this line


def test_a_scheduler_created_after_protect_is_refused_at_the_next_step() -> None:
    script = Script()
    job = script.protect()
    made: list[object] = []
    with pytest.raises(BadInputError, match=r"ConstantLR .*is not in extra"):
        script.train(job, lambda: None, lambda: made or made.append(ConstantLR(script.optimizer)))


class Container:
    """A script's own container of schedulers."""

    def __init__(self, *schedulers: Any) -> None:
        self.schedulers = list(schedulers)

    def state_dict(self) -> dict[str, Any]:
        return {str(number): one.state_dict() for number, one in enumerate(self.schedulers)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for number, one in enumerate(self.schedulers):
            one.load_state_dict(state[str(number)])


def test_schedulers_in_extra_or_nested_in_it_are_accepted(caplog: pytest.LogCaptureFixture) -> None:
    script = Script()
    parts = [ConstantLR(script.optimizer), LinearLR(script.optimizer)]
    script.protect(extra={"schedule": SequentialLR(script.optimizer, parts, [2])})
    script = Script()
    contained = Container(ConstantLR(script.optimizer))
    with caplog.at_level(logging.WARNING):
        script.train(script.protect(extra={"mine": contained}), lambda: None, lambda: None)


def test_a_deleted_scheduler_is_ignored() -> None:
    script = Script()
    CosineAnnealingLR(script.optimizer, 300)
    script.train(script.protect(), lambda: None, lambda: None)
