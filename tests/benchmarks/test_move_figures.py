"""Tests of the figures that benchmarks/move.py computes from events and parameters."""

from __future__ import annotations

import numpy as np
import pytest
from measured_gpt import Attempt, find_first_real
from move import emulated_figures, plain_figures, same_figures
from moving import remaining_rate

from holdfast.protocol.events import StepCommitted
from made_events import made


def steps(*times: float) -> list[StepCommitted]:
    """Return steps of 32 samples committed at these times."""
    found: list[StepCommitted] = []
    for number, time in enumerate(times):
        step = made("step_committed", time, step=number, samples=32, step_s=time - times[max(number - 1, 0)])
        assert isinstance(step, StepCommitted)
        found.append(step)
    return found


def test_the_rate_after_a_kill_includes_the_interrupted_step() -> None:
    undisturbed = [float(second) for second in range(40)]
    assert remaining_rate(steps(*undisturbed), 10.5, 20.0) == pytest.approx(1.0)
    # The step at 11 s is 2 s late: 19 steps in the 21 s up to the first one at least 20 s after the kill.
    late = [*undisturbed[:11], *(second + 2.0 for second in undisturbed[11:])]
    assert remaining_rate(steps(*late), 10.5, 20.0) == pytest.approx(19 / 21)


def test_a_rate_is_not_computed_before_its_period_is_over() -> None:
    with pytest.raises(StopIteration):
        remaining_rate(steps(*map(float, range(12))), 10.5, 20.0)


def test_the_first_real_step_has_micro_batches_and_is_not_a_shadow_step() -> None:
    def attempt(end: float, micro_batches: int, *, shadow: bool = False) -> Attempt:
        return Attempt(step=1, shadow=shadow, micro_batches=micro_batches, end=end, own_s=end, processor_s=0.0)

    before, shadow, empty, real = attempt(1.0, 2), attempt(3.0, 2, shadow=True), attempt(4.0, 0), attempt(5.0, 2)
    assert find_first_real(iter([before, shadow, empty, real, attempt(6.0, 2)]), 2.0) == real
    assert find_first_real(iter([before, shadow, empty]), 2.0) is None


def test_costs_of_plain_torch_are_multiples_of_the_median_move() -> None:
    costs = {"save-and-restart": [5.0, 6.0], "warmed zygotes": [0.2]}
    whole, zygotes = plain_figures(costs, [0.1, 0.3, 0.2])
    assert whole.values == pytest.approx((25.0, 30.0))
    assert whole.is_reached is True
    assert zygotes.values == pytest.approx((1.0,))
    assert zygotes.is_reached is False
    assert plain_figures(costs, [-0.01])[1].values == pytest.approx((200.0,))
    # Without measured moves there is nothing to compare.
    assert all(figure.is_reached is None for figure in plain_figures(costs, []))


def test_parameters_are_compared_by_bits_or_with_clipping_by_values() -> None:
    calm = np.array([0.5, -1.0, 0.0])
    (same,) = same_figures(calm, calm.copy(), 19, clipping=False)
    assert same.values == (0.0,)
    assert same.is_reached is True
    # -0.0 and 0.0 differ in their bits.
    (other,) = same_figures(calm, np.array([0.5, np.nextafter(-1.0, 0), -0.0]), 19, clipping=False)
    assert other.values == (2.0,)
    assert other.is_reached is False
    assert same_figures(calm, calm + 5e-13, 19, clipping=True)[0].is_reached is True
    assert same_figures(calm, calm + 5e-12, 19, clipping=True)[0].is_reached is False


def test_only_a_replacement_by_a_standby_must_keep_the_rate() -> None:
    figures = emulated_figures({"replaced": [0.98], "shrunk": [0.7]})
    assert [figure.is_reached for figure in figures] == [True, None]


def test_an_interrupted_attempt_has_the_same_time_per_micro_batch() -> None:
    whole = Attempt(step=1, shadow=False, micro_batches=2, end=0.0, own_s=0.2, processor_s=0.1)
    cut = Attempt(step=1, shadow=False, micro_batches=1, end=0.0, own_s=0.1, processor_s=0.05)
    assert whole.each_s == cut.each_s
    assert whole.each_processor_s == cut.each_processor_s
