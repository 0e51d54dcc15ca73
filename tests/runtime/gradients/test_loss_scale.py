"""The loss scale in a world of one: torch's own dynamics, exact arithmetic, and persistent state."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.amp.grad_scaler import GradScaler
from torch.utils.data import TensorDataset

from holdfast.errors import BadInputError
from holdfast.protocol.commit import Commit
from holdfast.runtime.gradients.loss_scale import LossScale
from holdfast.runtime.session.job import Job

X = torch.randn(20, 4, generator=torch.Generator().manual_seed(0))
DATA = TensorDataset(X, X.sum(1, keepdim=True))
CPU = torch.device("cpu")


@given(
    skipped=st.lists(st.booleans(), max_size=30),
    scale=st.sampled_from([2.0**16, 3e38, 1.1, 2.0**-140]),
    growth=st.sampled_from([2.0, 1.3]),
    interval=st.integers(1, 4),
)
def test_the_scale_changes_like_a_torch_grad_scaler(
    skipped: list[bool], scale: float, growth: float, interval: int
) -> None:
    def fresh() -> GradScaler:
        return GradScaler("cpu", init_scale=scale, growth_factor=growth, backoff_factor=0.7, growth_interval=interval)

    theirs, mine = fresh(), fresh()
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer, ours = torch.optim.SGD([parameter], lr=0.1), LossScale(mine, [parameter], CPU)
    for skip in skipped:
        theirs.scale(torch.zeros(()))
        parameter.grad = torch.full((1,), math.inf if skip else 0.0)
        theirs.step(optimizer)
        theirs.update()
        ours.update(skipped=skip)
        assert mine.state_dict() == theirs.state_dict()
        assert ours.value == theirs.get_scale()


@pytest.mark.parametrize(
    ("scale", "nonfinite", "loss", "explained"),
    [
        (2.0, 3, 1.0, True),
        (1.0, 3, 1.0, False),
        (2.0, 0, 1.0, False),
        (2.0, 3, math.nan, False),
        (2.0, 3, math.inf, False),
        (None, 3, 1.0, False),
    ],
)
def test_an_overflow_requires_a_finite_loss_and_a_reducible_scale(
    scale: float | None, nonfinite: int, loss: float, explained: bool
) -> None:
    scaler = GradScaler("cpu", init_scale=scale) if scale is not None else None
    v = Commit(grad_square=1.0, loss_sum=loss, samples=1, nonfinite=nonfinite)
    assert LossScale(scaler, [], CPU).has_overflowed(v) == explained


class Trained:
    """A small job with a loss scale, and its record; gradients pass through float16."""

    def __init__(self, directory: Path | str = "") -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scaler = GradScaler("cpu", init_scale=2.0**20, growth_interval=3)
        self.job = Job(None, checkpoint_dir=str(directory), checkpoint_every=2)
        self.losses: dict[int, float] = {}
        self.skipped: list[int] = []
        self.scales: dict[int, float] = {}

    def run(self, steps: int, *, half: bool = True, **options: Any) -> Trained:
        batches = {"global_batch": 8, "micro_batch": 2}
        arguments: dict[str, Any] = {"scaler": self.scaler, "max_grad_norm": 0.5, **batches, **options}
        self.job.protect(self.model, self.optimizer, DATA, **arguments)
        for step in self.job.steps(steps):
            for x, y in step.micro_batches():
                outputs = self.model(x)
                if half:
                    outputs.register_hook(lambda gradient: gradient.half().float())
                step.backward(torch.nn.functional.mse_loss(outputs, y))
            before = [parameter.clone() for parameter in self.model.parameters()]
            assert step.apply()
            after = list(self.model.parameters())
            assert step.skipped == all(old.equal(new) for old, new in zip(before, after, strict=True))
            self.losses[step.number] = step.loss
            self.scales[step.number] = self.scaler.get_scale()
            self.skipped += [step.number] if step.skipped else []
        return self


def test_a_power_of_two_scale_does_not_change_results() -> None:
    plain, scaled = Trained().run(6, half=False, scaler=None), Trained().run(6, half=False)
    assert scaled.skipped == []
    assert plain.losses == scaled.losses
    for mine, theirs in zip(plain.model.parameters(), scaled.model.parameters(), strict=True):
        assert mine.equal(theirs)


def test_a_disabled_scaler_has_no_effect() -> None:
    plain = Trained().run(3, half=False, scaler=None)
    assert Trained().run(3, half=False, scaler=GradScaler("cpu", enabled=False)).losses == plain.losses


def test_a_job_with_a_scaler_trains_like_plain_pytorch() -> None:
    """Plain PyTorch divides each micro-batch's loss by their number before scaling, so the same steps overflow."""
    ours = Trained().run(12)
    assert ours.skipped
    assert len(ours.skipped) < 12
    theirs = Trained()
    assert ours.job._session is not None
    order = ours.job._session.workload.loader.order
    for number in range(1, 13):
        theirs.optimizer.zero_grad()
        for part in range(4):
            places = order.indices(number, part)
            outputs = theirs.model(X[places])
            outputs.register_hook(lambda gradient: gradient.half().float())
            theirs.scaler.scale(torch.nn.functional.mse_loss(outputs, DATA.tensors[1][places]) / 4).backward()
        theirs.scaler.unscale_(theirs.optimizer)
        torch.nn.utils.clip_grad_norm_(theirs.model.parameters(), 0.5)
        theirs.scaler.step(theirs.optimizer)
        theirs.scaler.update()
        assert theirs.scaler.get_scale() == ours.scales[number]
    for mine, other in zip(ours.model.parameters(), theirs.model.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-6)


def test_a_checkpoint_restores_the_loss_scale(tmp_path: Path) -> None:
    whole = Trained().run(9)
    Trained(tmp_path).run(5)
    second = Trained(tmp_path).run(9)
    assert min(second.losses) == 6  # The end of a loop is always saved.
    for of in ("losses", "scales"):
        assert getattr(second, of) == {step: getattr(whole, of)[step] for step in second.losses}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"scaler": 65536.0}, "scaler is a float"),
        ({"scaler": None, "extra": {"mine": GradScaler("cpu")}}, r"extra\['mine'\] is a GradScaler: pass it as scaler"),
    ],
)
def test_bad_input_is_reported_in_one_line(options: dict[str, Any], words: str) -> None:
    with pytest.raises(BadInputError, match=words) as caught:
        Trained().run(1, **options)
    assert "\n" not in str(caught.value)


def test_float16_parameters_are_refused() -> None:
    trained = Trained()
    trained.model.half()
    with pytest.raises(BadInputError, match="parameters in float32"):
        trained.run(1)


def test_running_statistics_are_updated_in_a_step_that_overflows() -> None:
    """In plain PyTorch as well, the forward pass is already done when the step overflows."""
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
    before = [parameter.clone() for parameter in model.parameters()]
    job = Job(None)
    scaler = GradScaler("cpu", init_scale=2.0**120)
    job.protect(model, torch.optim.SGD(model.parameters(), lr=0.1), DATA, global_batch=4, micro_batch=2, scaler=scaler)
    for step in job.steps(1):
        for x, y in step.micro_batches():
            step.backward(torch.nn.functional.mse_loss(model(x), y) * 1e30)
        assert step.apply()
        assert step.skipped
    assert all(torch.equal(now, then) for now, then in zip(model.parameters(), before, strict=True))
    counted = dict(model.named_buffers())["0.num_batches_tracked"]
    assert counted == 2
