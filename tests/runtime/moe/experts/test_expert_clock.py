"""The experts' time per token, measured by a manual clock."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from holdfast.runtime.moe.experts.expert_clock import ExpertClock
from holdfast.runtime.moe.layer.moe_layer import MoE


class Hand:
    """A clock that a computation advances."""

    def __init__(self) -> None:
        self.at = 0.0

    def working(self, seconds_per_token: float, before: float = 0.0) -> Callable[[torch.Tensor], torch.Tensor]:
        def work(tokens: torch.Tensor) -> torch.Tensor:
            self.at += before + seconds_per_token * tokens.shape[0]
            return tokens * 2

        return work


def test_the_backward_pass_counts_as_twice_the_forward_pass() -> None:
    hand = Hand()
    clock = ExpertClock(lambda: hand.at)
    assert clock.token_s == 0
    out = clock.run(hand.working(0.25), torch.ones(4, 2))
    assert out.tolist() == [[2.0, 2.0]] * 4
    assert clock.token_s == pytest.approx(0.75)
    clock.run(hand.working(1.0, before=5.0), torch.ones(0, 2))
    assert clock.token_s == pytest.approx(0.75), "a step without tokens must not change the measurement"


def test_old_measurements_fade() -> None:
    hand = Hand()
    clock = ExpertClock(lambda: hand.at)
    for _ in range(1000):
        clock.run(hand.working(1.0), torch.ones(3, 2))
    for _ in range(1000):
        clock.run(hand.working(0.1), torch.ones(3, 2))
    assert clock.token_s == pytest.approx(0.3, rel=0.01)


def test_a_layer_is_measured_around_its_experts() -> None:
    layer = MoE(8, 8, 4, 2, seed=1)
    ticks = iter(range(100))
    layer.clock = ExpertClock(lambda: float(next(ticks)))
    layer(torch.randn(5, 8))
    assert layer.clock.token_s == pytest.approx(3 / 10)  # One tick for 5 tokens in 2 experts each.
