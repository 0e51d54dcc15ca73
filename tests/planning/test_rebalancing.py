"""Rebalancing: weighted loads, gain against cost, and reasons."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from planning_cases import PROPERTY

from holdfast.errors import BadInputError
from holdfast.planning import (
    CostModel,
    LoadAverage,
    Plan,
    decide_rebalance,
    make_plan,
    migration_seconds,
    plan_migration,
    strategy_named,
)

MODEL = CostModel(token_s=1e-5, expert_bytes=10**7, bandwidth=1e9, pause_s=0.05)


def plan(loads, held=None) -> Plan:
    made = make_plan(loads, np.full(4, 3), fault_threshold=2, strategy=strategy_named("best"), held=held)
    assert isinstance(made, Plan)
    return made


@PROPERTY
@given(st.lists(st.integers(1, 20), min_size=1, max_size=8), st.floats(1, 100))
def test_a_steady_load_averages_to_itself_however_it_is_reported(chunks, half_life):
    average = LoadAverage.empty(1, 2)
    for steps in chunks:
        average = average.add(np.array([[3, 5]]) * steps, steps=steps, half_life=half_life)
    np.testing.assert_allclose(average.per_step(), [[3, 5]])


def test_a_half_life_ago_counts_half():
    average = LoadAverage.empty(1, 2).add(np.array([[100, 0]]), steps=10, half_life=10)
    average = average.add(np.array([[0, 100]]), steps=10, half_life=10)
    np.testing.assert_allclose(average.tokens, [[50, 100]])
    assert LoadAverage.empty(2, 2).per_step().tolist() == [[0, 0], [0, 0]]


def test_bad_reports_are_named():
    average = LoadAverage.empty(1, 2)
    with pytest.raises(BadInputError, match=r"shape \(1, 3\)"):
        average.add(np.ones((1, 3)), steps=1, half_life=1)
    with pytest.raises(BadInputError, match="0 steps"):
        average.add(np.ones((1, 2)), steps=0, half_life=1)


def test_a_shifted_load_is_worth_moving_for_long_enough():
    held = plan([[900, 30, 30, 40]]).counts
    loads = np.array([[30.0, 900.0, 30.0, 40.0]]) * 10
    planned = plan(loads, held)
    assert planned.migration is not None

    def decide(steps, model=MODEL):
        return decide_rebalance(loads, held, planned.migration, threshold=2, steps=steps, model=model)

    long, short = decide(1000), decide(1)
    assert long.adopt
    assert not short.adopt
    assert long.gain_s == pytest.approx(1000 * short.gain_s)
    assert long.cost_s == short.cost_s > MODEL.pause_s
    assert "saved over 1000 steps" in long.reason
    hidden = decide(1000, replace(MODEL, hidden_s=60.0))
    assert hidden.cost_s == MODEL.pause_s, "what travels beside a step costs nothing more"


def test_an_unchanged_load_is_not():
    held = plan([[900, 30, 30, 40]]).counts
    migration = plan_migration(held, held)
    decision = decide_rebalance(np.ones((1, 4)), held, migration, threshold=2, steps=10**6, model=MODEL)
    assert not decision.adopt
    assert decision.cost_s == 0
    assert decision.gain_s == pytest.approx(0, abs=1e-9)


def test_a_lost_guarantee_is_restored_at_any_price():
    held = plan([[900, 30, 30, 40]]).counts[:, :, 1:]
    migration = plan_migration(
        np.concatenate([held, np.zeros((1, 4, 1), dtype=int)], axis=2), plan([[900, 30, 30, 40]]).counts
    )
    costly = CostModel(token_s=1e-9, expert_bytes=10**12, bandwidth=1, pause_s=1)
    current = np.concatenate([held, np.zeros((1, 4, 1), dtype=int)], axis=2)
    decision = decide_rebalance(np.ones((1, 4)), current, migration, threshold=2, steps=1, model=costly)
    assert decision.adopt
    assert "instead of 2" in decision.reason


def test_a_lost_expert_is_refused_and_named():
    held = np.array([[[1, 1], [0, 0]]])
    migration = plan_migration(held, np.array([[[1, 1], [1, 1]]]))
    decision = decide_rebalance(np.ones((1, 2)), held, migration, threshold=1, steps=1, model=MODEL)
    assert not decision.adopt
    assert "expert 1 of layer 0" in decision.reason


def test_migration_time_is_that_of_the_busiest_link():
    held = np.array([[[1, 0, 0], [0, 1, 0], [1, 1, 0]]])
    wanted = np.ones((1, 3, 3), dtype=int)
    # Node 2 receives three experts, which is more than any node sends.
    assert migration_seconds(plan_migration(held, wanted), MODEL) == pytest.approx(0.05 + 3 * 1e7 / 1e9)
