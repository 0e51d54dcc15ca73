"""Nodes with different failure rates: the odds of losses, and the experts that each node holds."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planning_cases import PROPERTY

from holdfast.errors import BadInputError
from holdfast.planning import Plan, default_weights, make_plan, recovery_curve, strategy_named
from holdfast.planning.survival.odds import as_rates
from holdfast.planning.survival.recovery_probability import fatal_share
from holdfast.planning.survival.search import NodeLosses


def enumerated(hosts: np.ndarray, rates: np.ndarray) -> np.ndarray:
    """Return the share of fatal losses by their number, by enumeration."""
    nodes = rates.size
    shares = []
    for lost in range(nodes + 1):
        fatal = total = 0.0
        for gone in combinations(range(nodes), lost):
            odds = float(np.prod(rates[list(gone)]))
            alive = np.setdiff1d(np.arange(nodes), gone)
            total += odds
            fatal += odds * (not hosts[:, alive].any(axis=1).all())
        shares.append(fatal / total)
    return np.array(shares)


@settings(PROPERTY, max_examples=40)
@given(nodes=st.integers(1, 7), experts=st.integers(1, 5), density=st.floats(0.2, 0.9), seed=st.integers(0, 99))
def test_the_odds_are_those_of_all_losses(nodes, experts, density, seed):
    rng = np.random.default_rng(seed)
    hosts, rates = rng.random((experts, nodes)) < density, rng.uniform(0.1, 10, nodes)
    wanted = enumerated(hosts, rates)
    np.testing.assert_allclose(recovery_curve(hosts.astype(int), rates=rates).probability, 1 - wanted, atol=1e-12)
    np.testing.assert_allclose(fatal_share(hosts, rates).most, wanted, atol=1e-12)
    np.testing.assert_allclose(NodeLosses(nodes, rates).share_of(hosts), wanted, atol=1e-12)


def test_disjoint_sets_have_odds_of_their_own_nodes():
    hosts = np.zeros((3, 30), dtype=bool)
    hosts[0, 3:5], hosts[1, 10:13], hosts[2, 20:24] = True, True, True
    rates = np.ones(30)
    rates[[3, 4]] = 20.0
    alike, risky = recovery_curve(hosts.astype(int)), recovery_curve(hosts.astype(int), rates=rates)
    assert risky.exact
    assert risky.probability[2] < alike.probability[2]
    np.testing.assert_allclose(recovery_curve(hosts.astype(int), rates=np.full(30, 7.0)).probability, alike.probability)


def plan_for(nodes: int, rates: np.ndarray | None, held: np.ndarray | None = None, experts: int = 32) -> Plan:
    loads = np.random.default_rng(1).pareto(1.2, (3, experts)) * 1000 + 1
    found = make_plan(
        loads,
        np.full(nodes, 2 * experts // nodes),
        fault_threshold=2,
        strategy=strategy_named("best"),
        held=held,
        failure_rates=rates,
    )
    assert isinstance(found, Plan)
    return found


@pytest.mark.parametrize("nodes", [8, 16])
def test_the_risky_one_of_a_pair_has_a_safe_one_beside_it(nodes):
    rates = np.where(np.arange(nodes) < nodes // 2, 10.0, 1.0)
    counts = plan_for(nodes, rates).counts
    risky = (counts[:, :, : nodes // 2] > 0).sum(axis=2)
    assert (risky == 1).all()
    weights = default_weights(nodes)
    alike = plan_for(nodes, None).counts
    fatal, before = (fatal_share(placed > 0, rates).most @ weights for placed in (counts, alike))
    assert fatal < 0.5 * before


@pytest.mark.parametrize("nodes", [8, 16])
def test_experts_leave_a_node_that_becomes_risky_and_nothing_else_moves(nodes):
    # 48 experts have 2 replicas; the hot one takes the remaining slots.
    loads = np.full((2, 3 * nodes), 1.0)
    loads[:, 0] = 500.0
    slots, best = np.full(nodes, 8), strategy_named("best")
    rates = np.ones(nodes)
    rates[-1] = 1.5

    def planned(held: np.ndarray | None) -> Plan:
        found = make_plan(loads, slots, fault_threshold=2, strategy=best, held=held, failure_rates=rates)
        assert isinstance(found, Plan)
        return found

    before = planned(None)
    again = planned(before.counts)
    assert again.migration is not None
    assert again.migration.expert_moves == 0, "as long as nothing changes nothing moves"
    rarest = before.replicas.argmin(axis=1)
    home = int(np.flatnonzero(before.counts[0, rarest[0]])[0])
    rates[home] = 100.0
    after = planned(before.counts)
    assert after.migration is not None
    assert 0 < after.migration.expert_moves <= 2 * 2 * 8
    weights = default_weights(nodes)
    stayed, left = (fatal_share(placed > 0, rates).most @ weights for placed in (before.counts, after.counts))
    assert left < 0.7 * stayed


def test_equal_rates_are_none():
    assert as_rates(np.full(4, 3.0), 4) is None
    np.testing.assert_array_equal(plan_for(8, np.full(8, 2.0)).counts, plan_for(8, None).counts)


@pytest.mark.parametrize(
    ("rates", "words"),
    [
        (np.ones(3), "failure rates have shape (3,): give one for each of the 4 nodes"),
        (np.array([1, 0, 1, 1.0]), "failure rate of node 1 is 0: rates are numbers above 0"),
        (np.array([1, np.nan, 1, 1.0]), "node 1 is nan"),
        (np.array([1, np.inf, 1, 1.0]), "node 1 is inf"),
        (np.array([1, 1e-12, 1, 1.0]), "failure rates go from 1e-12 to 1"),
    ],
)
def test_bad_rates_are_one_sentence(rates, words):
    with pytest.raises(BadInputError) as error:
        as_rates(rates, 4)
    assert words in str(error.value)
