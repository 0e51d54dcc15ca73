"""Warm standbys against Erlang's formula as printed, and against a small simulation."""

from __future__ import annotations

from dataclasses import replace
from math import factorial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import BadInputError
from holdfast.planner.reliability.monte_carlo.estimate import estimate
from holdfast.planning.standbys import StandbyCase, erlang_b, plan_standbys

CASE = StandbyCase(
    nodes=500, mtbf_node_hours=5000.0, mttr_hours=24.0, down_seconds_with=30.0, down_seconds_without=600.0
)


@given(servers=st.integers(0, 30), load=st.floats(1e-3, 50))
def test_erlang_b_equals_its_sum(servers: int, load: float) -> None:
    terms = [load**n / factorial(n) for n in range(servers + 1)]
    assert erlang_b(np.array([servers]), np.array([load])) == pytest.approx(terms[-1] / sum(terms), rel=1e-9)


def test_coverage_agrees_with_a_simulation() -> None:
    standbys, hours, rng = 2, 20_000.0, np.random.default_rng(3)
    expected = float(plan_standbys(CASE).p_none_ready[standbys])
    gap = CASE.mtbf_node_hours / (CASE.nodes - standbys)
    missed = []
    for _ in range(40):
        free_at, none, total = np.zeros(standbys), 0, 0
        for at in np.cumsum(rng.exponential(gap, int(hours / gap))):
            total += 1
            first = int(np.argmin(free_at))
            if free_at[first] <= at:
                free_at[first] = at + rng.exponential(CASE.mttr_hours)
            else:
                none += 1
        missed.append(none / total)
    assert estimate(np.array(missed)).contains(expected)


def test_the_best_is_better_than_its_neighbours_and_than_none() -> None:
    plan = plan_standbys(CASE)
    best = plan.best
    assert 0 < best < plan.most_that_pay
    assert plan.goodput_nodes[best] > max(plan.goodput_nodes[[0, best - 1]])
    assert plan.goodput_nodes[best] >= plan.goodput_nodes[best + 1]


def test_none_pay_if_they_save_no_time() -> None:
    plan = plan_standbys(replace(CASE, down_seconds_with=600.0))
    assert plan.best == plan.most_that_pay == 0


def test_no_down_time_means_no_loss() -> None:
    plan = plan_standbys(replace(CASE, down_seconds_with=0.0, down_seconds_without=0.0))
    assert plan.goodput_nodes[0] == 500


@pytest.mark.parametrize(
    ("key", "value"), [("nodes", 0), ("mttr_hours", 0.0), ("down_seconds_with", -1.0), ("down_seconds_with", 700.0)]
)
def test_invalid_standby_cases_are_refused(key: str, value: float) -> None:
    with pytest.raises(BadInputError, match=key):
        replace(CASE, **{key: value})
