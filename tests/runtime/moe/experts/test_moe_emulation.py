"""The emulated accelerator: a lower bound for the time of expert computation, and no other effect."""

from __future__ import annotations

import pytest
import torch

from holdfast.errors import BadInputError
from holdfast.runtime.moe.experts.emulation import Emulation
from holdfast.runtime.moe.layer.moe_layer import MoE


class Time:
    """A clock that real work advances by `work` each time it is read."""

    def __init__(self, work: float) -> None:
        self.at = 0.0
        self.work = work
        self.slept: list[float] = []

    def now(self) -> float:
        self.at += self.work
        return self.at

    def sleep(self, seconds: float) -> None:
        self.slept.append(round(seconds, 9))
        self.at += seconds


def layer_with(time: Time, seconds: float) -> MoE:
    layer = MoE(8, 8, 4, 2, seed=1)
    layer.emulation = Emulation(seconds_per_token=seconds, now=time.now, sleep=time.sleep)
    return layer


def test_backward_takes_twice_the_emulated_time_of_forward() -> None:
    time = Time(0.0)
    layer_with(time, 0.5)(torch.randn(3, 8)).sum().backward()
    assert time.slept == [3.0, 6.0]  # Each of the 3 tokens goes to 2 experts.


def test_the_emulated_time_includes_the_real_computation() -> None:
    time = Time(1.0)
    layer_with(time, 0.5)(torch.randn(3, 8)).sum().backward()
    assert time.slept == [2.0, 5.0]
    slow = Time(100.0)
    layer_with(slow, 0.5)(torch.randn(3, 8)).sum().backward()
    assert slow.slept == []


def test_emulation_changes_only_the_time() -> None:
    plain, emulated = MoE(8, 8, 4, 2, seed=1), layer_with(Time(0.0), 0.1)
    emulated.router.load_state_dict(plain.router.state_dict())
    tokens = torch.randn(5, 8)
    outs = []
    for layer in (plain, emulated):
        out = layer(tokens)
        out.square().sum().backward()
        outs.append((out, layer.experts.w1.grad, layer.experts.w2.grad, layer.router.weight.grad))
    assert all(torch.equal(a, b) for a, b in zip(*outs, strict=True))


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf")])
def test_an_invalid_emulated_time_is_refused(seconds: float) -> None:
    with pytest.raises(BadInputError, match="emulated time per token"):
        Emulation(seconds_per_token=seconds)
