"""The time until the next failure, failure rates, and the cost of roll-backs."""

from __future__ import annotations

from itertools import combinations
from math import comb, exp

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import BadInputError
from holdfast.planning.arrays import FloatArray
from holdfast.planning.waf.durations import observed_rate, running_s
from holdfast.planning.waf.survival import copies_everywhere, lost_share, lost_with_all, lost_with_experts

DAY = 86400.0


def test_a_rate_moves_from_the_known_to_the_observed_one() -> None:
    known = 1 / (100 * DAY)
    assert observed_rate(0, 0, known_rate=known, known_s=50 * DAY) == pytest.approx(known)
    seen = observed_rate(1000, 10_000 * DAY, known_rate=known, known_s=50 * DAY)
    assert seen == pytest.approx(0.1 / DAY, rel=0.01)


@given(st.integers(0, 50), st.floats(0, 1e9), st.floats(1e-9, 1e-3), st.floats(1, 1e9))
def test_a_rate_lies_between_the_known_and_the_observed_one(
    failures: int, node_s: float, known: float, known_s: float
) -> None:
    rate = observed_rate(failures, node_s, known_rate=known, known_s=known_s)
    seen = failures / node_s if node_s else (np.inf if failures else known)
    assert min(known, seen) * (1 - 1e-9) <= rate <= max(known, seen) * (1 + 1e-9) + failures / known_s


def test_a_rate_without_any_time_is_refused() -> None:
    with pytest.raises(BadInputError, match="node_s and known_s are both 0"):
        observed_rate(0, 0, known_rate=1.0, known_s=0)
    with pytest.raises(BadInputError, match="failures is -1"):
        observed_rate(-1, 5, known_rate=1.0, known_s=1)


def test_more_nodes_run_for_a_shorter_time() -> None:
    assert running_s(10, 1 / DAY, 1e9) == pytest.approx(DAY / 10)
    assert running_s(1000, 1 / DAY, 1e9) < running_s(10, 1 / DAY, 1e9)
    assert running_s(0, 1 / DAY, 7.0) == running_s(10, 0.0, 7.0) == 7.0


def test_the_lost_share_sums_over_all_failures_during_the_exposed_time() -> None:
    rate, exposed, cost = 1e-4, 30.0, 600.0
    curve = {1: [1.0, 0.0], 2: [1.0, 0.5, 0.0], 3: [1.0, 0.8, 0.4, 0.0]}

    def survives(nodes: int) -> FloatArray:
        return np.array(curve[nodes])

    together = 1 - exp(-rate * exposed)
    share = lost_share(3, rate, exposed, cost, survives)
    for nodes in (1, 2, 3):
        expected = sum(
            comb(nodes - 1, more) * together**more * (1 - together) ** (nodes - 1 - more) * (1 - curve[nodes][more + 1])
            for more in range(nodes)
        )
        assert share[nodes] == pytest.approx(nodes * rate * expected * cost)
    assert share[0] == 0.0


def test_a_dense_job_on_many_nodes_loses_almost_nothing() -> None:
    share = lost_share(8, 1e-5, 10.0, 3600.0, copies_everywhere)
    assert share[1] == pytest.approx(1e-5 * 3600)
    assert share[2] < share[1] / 1000
    assert share[8] < 1e-20


@given(st.integers(1, 12), st.floats(1e-9, 1e-3), st.floats(0.1, 1e4), st.floats(1, 1e6))
def test_the_closed_form_for_full_copies_equals_the_sum(n: int, rate: float, exposed: float, cost: float) -> None:
    assert lost_with_all(n, rate, exposed, cost) == pytest.approx(lost_share(n, rate, exposed, cost, copies_everywhere))


@pytest.mark.parametrize(("nodes", "experts", "slots"), [(4, 8, 4), (6, 8, 4), (6, 6, 2), (3, 6, 2), (8, 8, 2)])
def test_the_bound_for_expert_groups_is_at_least_the_exact_loss(nodes: int, experts: int, slots: int) -> None:
    """Compare with brute force over all sets of nodes that fail together, for groups of equal size."""
    rate, exposed, cost = 1e-4, 100.0, 600.0
    groups, copies = experts // slots, nodes * slots // experts
    hosts = [set(range(group * copies, (group + 1) * copies)) for group in range(groups)]

    def survives(held: int) -> FloatArray:
        curve = np.zeros(held + 1)
        for lost in range(held + 1):
            sets = list(combinations(range(held), lost))
            curve[lost] = np.mean([not any(group <= set(gone) for group in hosts) for gone in sets])
        return curve

    exact = lost_share(nodes, rate, exposed, cost, lambda held: survives(held) if held == nodes else np.ones(held + 1))
    told = lost_with_experts(nodes, rate, exposed, cost, experts=experts, slots=slots)
    assert exact[nodes] <= told[nodes] * (1 + 1e-6) <= exact[nodes] * 1.05


def test_more_copies_of_experts_lose_less() -> None:
    share = lost_with_experts(12, 1e-5, 60.0, 3600.0, experts=8, slots=4)
    assert share[1] == 1.0
    assert share[2] > 100 * share[4] > 100 * 100 * share[6] > 0
