"""Tests of other systems' responses to a slow rank: real runs, and results composed without a run."""

from __future__ import annotations

import pytest
from straggler_ways import NAMES, NEVER, REAL, STEPS, Plan, plan, plans_to_run
from stragglers import Parts, figures, share_of_time, table


@pytest.mark.parametrize(
    ("name", "moment", "wanted"),
    [
        ("nothing", 20, Plan(20)),
        ("defer-50", 20, Plan(20, stop_at=50, saves=True)),
        ("defer-50", 50, Plan(50)),  # the next checkpoint is at step 100
        ("defer-100", 20, Plan(20)),
        ("restart-50", 70, Plan(70, every=50, stop_at=71)),
        ("restart-50", 20, Plan(20, stop_at=21)),  # without a checkpoint, restart from the beginning
        ("restart-100", 70, Plan(70, stop_at=71)),
        ("save-and-restart", 70, Plan(70, stop_at=72, saves=True)),
        ("per-iteration", 70, Plan(70, every=1, stop_at=71)),
    ],
)
def test_a_strategy_has_this_plan(name: str, moment: int, wanted: Plan) -> None:
    assert plan(name, moment) == wanted


def test_each_strategy_runs_once_and_equal_plans_share_a_run() -> None:
    found = plans_to_run(None)
    assert len(found) == len(REAL)
    assert {name for names in found.values() for name in names} == set(NAMES)
    assert found[Plan(70)] == ["nothing", "defer-50", "defer-100"]
    assert found[Plan(20, stop_at=21)] == ["restart-50", "restart-100"]


@pytest.mark.parametrize("moment", range(0, 96, 5))
def test_all_strategies_run_at_a_requested_step(moment: int) -> None:
    found = plans_to_run([moment])
    assert sorted(name for names in found.values() for name in names) == sorted(NAMES)
    assert {one.moment for one in found} == {moment}
    for one in found:
        assert one.stop_at is None or moment < one.stop_at < STEPS
        assert one.every == NEVER or one.every <= max(moment, 1)


def test_the_cost_of_a_strategy_that_does_not_run_is_composed_of_measurements() -> None:
    parts = Parts(step=1.0, slower=0.2, restart=5.0, save_and_restart=6.0, save_each=0.1)
    assert parts.lost_share("nothing", 70) == pytest.approx(share_of_time(30 * 0.2, 1.0))
    assert parts.lost_share("defer-50", 20) == pytest.approx(share_of_time(30 * 0.2 + 5.0, 1.0))
    assert parts.lost_share("defer-100", 20) == parts.lost_share("nothing", 20)
    assert parts.lost_share("restart-50", 70) == pytest.approx(share_of_time(20 + 5.0, 1.0))
    assert parts.lost_share("restart-100", 70) == pytest.approx(share_of_time(70 + 5.0, 1.0))
    assert parts.lost_share("save-and-restart", 70) == pytest.approx(share_of_time(6.0, 1.0))
    assert parts.lost_share("per-iteration", 70) == pytest.approx(share_of_time(100 * 0.1 + 5.0, 1.0))


def test_the_table_puts_composed_values_in_brackets() -> None:
    parts = Parts(step=1.0, slower=0.2, restart=5.0, save_and_restart=6.0, save_each=0.1)
    head, first, second = table({0: 0.012, 10: 0.02}, parts, {("nothing", 10): 0.15})
    assert head.split() == ["step", "move", *NAMES]
    assert first.split()[:3] == ["0", "1.2%", "(16.7%)"]
    assert second.split()[:3] == ["10", "2.0%", "15.0%"]
    assert all(cell.startswith("(") for cell in second.split()[3:])


def test_one_step_with_too_large_a_loss_fails_the_figure() -> None:
    ours, other = figures({0: 0.01, 10: 0.04, 20: 0.01}, {("nothing", 10): 0.15})
    assert ours.is_reached is False
    assert figures({0: 0.01, 10: 0.02}, {})[0].is_reached is True
    assert other.is_reached is None
    # The loss of a move over a hundred real steps is also checked.
    assert [figure.is_reached for figure in figures({0: 0.01}, {("move", 70): 0.031})] == [True, False]
