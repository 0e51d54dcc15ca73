"""Misused steps that would count samples twice or let replicas diverge silently."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

from holdfast.errors import BadInputError, StepUseError
from holdfast.runtime.session.job import Job
from holdfast.runtime.session.step import Step

X = torch.randn(20, 4, generator=torch.Generator().manual_seed(0))
DATA = TensorDataset(X, X.sum(1, keepdim=True))


class Loop:
    """A script with its own part in each step."""

    def __init__(self, model: torch.nn.Linear | None = None) -> None:
        self.model = model or torch.nn.Linear(4, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.job = Job(None)
        self.job.protect(self.model, self.optimizer, DATA, global_batch=4, micro_batch=2)

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return mse_loss(self.model(x), y)

    def compute(self, step: Step, own: Callable[[torch.Tensor], object] = lambda loss: None) -> None:
        """Compute the micro-batches; `own` gets each loss before its backward pass."""
        for x, y in step.micro_batches():
            loss = self.loss(x, y)
            own(loss)
            step.backward(loss)

    def run(self, own: Callable[[Step], object], steps: int = 2) -> list[int]:
        numbers = []
        for step in self.job.steps(steps):
            own(step)
            numbers.append(step.number)
        return numbers


def test_micro_batches_can_be_iterated_only_once() -> None:
    loop = Loop()

    def twice(step: Step) -> None:
        loop.compute(step)
        loop.compute(step)

    with pytest.raises(StepUseError, match=r"step 1: .* iterated once"):
        loop.run(twice)


def test_a_direct_loss_backward_is_refused() -> None:
    loop = Loop()
    with pytest.raises(StepUseError, match=r"remove loss\.backward\(\)"):
        loop.run(lambda step: loop.compute(step, lambda loss: loss.backward(retain_graph=True)))


@pytest.mark.parametrize("how", ["backward", "clipped", "zeroed"])
def test_gradients_changed_before_apply_are_refused(how: str) -> None:
    loop = Loop()

    def change(step: Step) -> None:
        loop.compute(step)
        if how == "backward":
            loop.loss(*DATA[:]).backward()
        elif how == "clipped":
            torch.nn.utils.clip_grad_norm_(loop.model.parameters(), 1e-6)
        else:
            loop.optimizer.zero_grad(set_to_none=False)
        step.apply()

    with pytest.raises(StepUseError, match="made or changed outside of"):
        loop.run(change)


def test_the_script_may_change_gradients_between_steps() -> None:
    loop = Loop()

    def evaluate(step: Step) -> None:
        loop.optimizer.zero_grad(set_to_none=False)
        loop.compute(step, lambda loss: loop.optimizer.zero_grad())
        assert step.apply()
        loop.loss(*DATA[:]).backward()

    assert loop.run(evaluate, steps=3) == [1, 2, 3]


def test_resetting_gradients_between_micro_batches_needs_no_memory() -> None:
    """Autograd adds in place; a second set of gradients would be a worker's memory peak when it resumes from sums."""
    loop = Loop()
    weight, made = loop.model.weight, list[torch.Tensor | None]()
    hook = weight.register_post_accumulate_grad_hook(lambda parameter: made.append(parameter.grad))
    loop.run(lambda step: (loop.compute(step, lambda loss: loop.optimizer.zero_grad()), step.apply()), steps=1)
    hook.remove()
    assert len(made) == 2
    assert made[0] is made[1]


def test_a_loop_without_apply_is_refused() -> None:
    """Otherwise the loop would get the same step forever."""
    loop = Loop()
    with pytest.raises(StepUseError, match=r"step 1: the loop continued without step\.apply"):
        loop.run(loop.compute)


def test_a_parameter_that_replaces_a_model_parameter_is_refused() -> None:
    model = torch.nn.Linear(4, 1)
    loop = Loop(model)

    def train(step: Step) -> None:
        model.weight = torch.nn.Parameter(model.weight.detach().clone())
        loop.optimizer.add_param_group({"params": [model.weight]})
        loop.compute(step)
        step.apply()

    with pytest.raises(StepUseError, match=r"shape \(1, 4\) that the model given to job\.protect\(\) does not have"):
        loop.run(train)


def test_second_backwards_and_backwards_outside_the_loop_are_distinguished() -> None:
    loop = Loop()

    def twice(step: Step) -> None:
        for x, y in step.micro_batches():
            step.backward(loop.loss(x, y))
            step.backward(loop.loss(x, y))

    def after(step: Step) -> None:
        loop.compute(step)
        step.backward(loop.loss(*DATA[:2]))

    with pytest.raises(StepUseError, match=r"step 1: a second step\.backward\(\) for one micro-batch: add its losses"):
        loop.run(twice)
    loop = Loop()
    with pytest.raises(StepUseError, match=r"backward\(\) belongs inside `for batch in step\.micro_batches"):
        loop.run(after)


def test_a_micro_batch_without_backward_is_refused_with_a_hint_to_skip() -> None:
    loop = Loop()
    with pytest.raises(StepUseError, match=r"step 1: a micro-batch had no step\.backward.*step\.skip\(reason\)"):
        loop.run(lambda step: list(step.micro_batches()))


def test_a_complex_parameter_is_refused() -> None:
    model = torch.nn.Linear(4, 1)
    model.phase = torch.nn.Parameter(torch.ones(2, dtype=torch.complex64))
    with pytest.raises(BadInputError, match=r"shape \(2,\) is torch\.complex64"):
        Loop(model)


def test_logged_values_become_step_metrics_once_the_step_is_applied() -> None:
    loop = Loop()
    seen: list[dict[str, float]] = []

    def one(step: Step) -> None:
        numbers = iter((1.0, 4.0))
        loop.compute(step, lambda loss: step.log({"number": next(numbers), "loss": loss}))
        step.log({"step": step.number}, reduce="max")
        assert step.metrics == {}
        assert step.apply()
        seen.append(dict(step.metrics))
        assert step.metrics["loss"] == pytest.approx(step.loss)
        with pytest.raises(StepUseError, match=r"log\(\) belongs before apply\(\)"):
            step.log({"late": 1.0})

    loop.run(one)
    assert [(metrics["number"], metrics["step"]) for metrics in seen] == [(2.5, 1.0), (2.5, 2.0)]
    assert list(seen[0]) == ["loss", "number", "step"]
