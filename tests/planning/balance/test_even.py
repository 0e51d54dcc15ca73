"""Evening out the nodes' work does not change which losses are survived."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from holdfast.planning import make_plan, recovery_curve, strategy_named
from holdfast.planning.balance.even import balance_sets, compute_idleness


@st.composite
def patterns(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return host sets that several experts share, with or without spare slots."""
    nodes = draw(st.integers(2, 7))
    sets = draw(st.lists(st.lists(st.booleans(), min_size=nodes, max_size=nodes).filter(any), min_size=1, max_size=4))
    rows = draw(st.lists(st.sampled_from(sets), min_size=1, max_size=9))
    pattern = np.array(rows, dtype=np.bool_)
    idle = np.array(draw(st.lists(st.floats(-3, 1), min_size=len(rows), max_size=len(rows))))
    return pattern, idle, pattern.sum(axis=0) + draw(st.integers(0, 3))


@given(patterns())
def test_balancing_does_not_lower_the_recovery_probability(case: tuple[np.ndarray, np.ndarray, np.ndarray]) -> None:
    pattern, idle, slots = case
    evened = balance_sets(pattern, idle, slots)
    assert (evened.sum(axis=0) <= slots).all()
    assert (evened.sum(axis=1) == pattern.sum(axis=1)).all()
    known = {row.tobytes() for row in pattern}
    assert {row.tobytes() for row in evened} <= known
    before, after = (recovery_curve(rows.astype(np.int64)).probability for rows in (pattern, evened))
    assert (after >= before - 1e-12).all()
    assert np.ptp(idle @ evened) <= np.ptp(idle @ pattern) + 1e-9


def test_idleness_is_the_difference_from_the_average_tokens_per_replica() -> None:
    loads, replicas = np.array([[10.0, 30.0, 40.0], [10.0, 30.0, 40.0]]), np.array([[2, 2, 4], [4, 2, 2]])
    # Tokens per replica by rank are 5, 15, 10 and, with ties by number, 15, 20, 2.5. The average is 10 in both layers.
    by_rank = np.array([[0, 1, 2], [1, 2, 0]])
    np.testing.assert_allclose(compute_idleness(loads, replicas, by_rank), [1 - 10 / 10, 1 - 17.5 / 10, 1 - 6.25 / 10])


def test_cold_experts_are_shared_among_the_nodes() -> None:
    """One expert has three quarters of all tokens; f gives the others more slots than their tokens need."""
    loads = [[60_000, *[20_000 // 7] * 7]]
    slots = np.full(4, 6)
    plans = {
        name: make_plan(loads, slots, fault_threshold=2, strategy=strategy_named(name)) for name in ("best", "mro")
    }
    work = {name: (np.array(loads)[0] / plan.replicas[0]) @ plan.counts[0] for name, plan in plans.items()}
    curves = [recovery_curve(plan.counts).probability for plan in plans.values()]
    np.testing.assert_array_equal(curves[0], curves[1])
    assert work["mro"].max() / work["mro"].mean() > 1.5
    assert work["best"].max() / work["best"].mean() < 1.12
