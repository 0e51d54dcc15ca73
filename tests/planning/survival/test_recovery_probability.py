"""Recovery probability against enumeration in plain Python, closed forms, and the papers' values."""

from __future__ import annotations

from itertools import combinations
from math import comb

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from planning_cases import PROPERTY, problems

from holdfast.planning import PlacementProblem, RecoveryCurve, rack_curve, recovery_curve, strategy_named
from holdfast.planning.survival.hitting import smallest_sets
from holdfast.planning.survival.recovery_probability import _sample_curve, fatal_share


def enumerate_curve(counts: np.ndarray) -> list[float]:
    """Return the recovery curve by enumeration of all losses."""
    hosts = (counts > 0).reshape(-1, counts.shape[-1])
    nodes = hosts.shape[1]
    curve = []
    for lost in range(nodes + 1):
        alive = [
            hosts[:, [node for node in range(nodes) if node not in gone]] for gone in combinations(range(nodes), lost)
        ]
        curve.append(sum(bool(rest.any(axis=1).all()) for rest in alive) / comb(nodes, lost))
    return curve


@PROPERTY
@given(st.integers(1, 3), st.integers(1, 5), st.integers(1, 7), st.integers(0, 10**6), st.floats(0.1, 0.9))
def test_curve_equals_enumeration(layers, experts, nodes, seed, density):
    counts = (np.random.default_rng(seed).random((layers, experts, nodes)) < density).astype(int)
    curve = recovery_curve(counts)
    assert curve.exact
    np.testing.assert_allclose(curve.probability, enumerate_curve(counts), atol=1e-12)


@PROPERTY
@given(problem=problems(most_nodes=7))
def test_curve_never_rises_and_the_guarantee_is_certain(problem):
    curve = recovery_curve(strategy_named("mro").place(problem)).probability
    assert (np.diff(curve) <= 1e-12).all()
    np.testing.assert_array_equal(curve[: problem.fault_threshold], 1.0)
    assert curve[-1] == 0.0


@pytest.mark.parametrize("name", ["mro", "best"])
def test_values_of_lazarus_figures_4_and_5(name):
    # ERRATA, Lazarus 6: with three of five nodes lost, the best plans recover in 7 and in 6 of 10 cases.
    for replicas, slots, recovered in (([2, 4, 6, 8], 4, 0.7), ([2, 2, 3, 3], 2, 0.6)):
        problem = PlacementProblem(replicas=np.array([replicas]), slots=np.full(5, slots), fault_threshold=2)
        assert recovery_curve(strategy_named(name).place(problem)).probability[3] == pytest.approx(recovered)


def test_disjoint_groups_multiply_on_any_number_of_nodes():
    # 60 groups of two nodes each: C(60, k) 2^k of C(120, k) losses spare all groups.
    counts = np.repeat(np.eye(60, dtype=int), 2, axis=1)
    curve = recovery_curve(counts)
    assert curve.exact
    expected = [comb(60, lost) * 2**lost / comb(120, lost) for lost in range(121)]
    np.testing.assert_allclose(curve.probability, expected, rtol=1e-12)


def ring_curve(nodes: int) -> np.ndarray:
    """Return the curve for expert e on nodes e and e + 1 of a ring, which survives while no two neighbours are lost."""
    alive = [nodes / (nodes - lost) * comb(nodes - lost, lost) if 2 * lost <= nodes else 0 for lost in range(nodes)]
    return np.array([number / comb(nodes, lost) for lost, number in enumerate(alive)] + [0.0])


@pytest.mark.parametrize("nodes", [24, 400])
def test_a_ring_is_exact_in_any_order_of_its_nodes(nodes):
    ring = np.eye(nodes, dtype=int) + np.roll(np.eye(nodes, dtype=int), 1, axis=1)
    for order in (np.arange(nodes), np.random.default_rng(0).permutation(nodes)):
        curve = recovery_curve(ring[:, order])
        assert curve.exact
        np.testing.assert_allclose(curve.probability, ring_curve(nodes), rtol=1e-10)


@pytest.fixture(scope="module")
def entangled() -> np.ndarray:
    return np.random.default_rng(0).random((90, 30)) < 0.35


@pytest.fixture(scope="module")
def curve(entangled: np.ndarray) -> RecoveryCurve:
    return recovery_curve(entangled.astype(int), samples=4000)


def test_entangled_hosts_are_exact_for_few_losses_and_sampled_beyond(entangled, curve):
    assert not curve.exact
    known = np.flatnonzero(curve.low != curve.high)[0]
    assert known > 3
    other = _sample_curve(smallest_sets(entangled), curve.probability[:known], 4000, np.random.default_rng(1))
    assert ((curve.low <= other.high) & (other.low <= curve.high)).all()
    assert (np.diff(curve.probability) <= 1e-9).all()


def test_bounds_of_fatal_losses_hold_the_sampled_curve(entangled, curve):
    bounds = fatal_share(entangled)
    assert (bounds.least <= bounds.most).all()
    assert (bounds.least <= 1 - curve.low + 1e-9).all()
    assert (bounds.most >= 1 - curve.high - 1e-9).all()


def test_rare_losses_are_distinguished_although_recovery_rounds_to_one():
    # With two sets of eight of 1,000 nodes, or one, recovery of 8 lost nodes is 1 - 8e-20 or 1 - 4e-20: 1.0 in floats.
    hosts = np.zeros((2, 1000), dtype=bool)
    hosts[0, :8] = hosts[1, 8:16] = True
    one, two = fatal_share(hosts[:1]), fatal_share(hosts)
    assert one.most[8] == pytest.approx(1 / comb(1000, 8), rel=1e-10, abs=0)
    assert two.most[8] == pytest.approx(2 / comb(1000, 8), rel=1e-10, abs=0)


def test_sampling_agrees_with_enumeration():
    replicas = np.array([[2, 3, 3, 4, 4, 8]])
    problem = PlacementProblem(replicas=replicas, slots=np.full(8, 3), fault_threshold=2)
    counts = strategy_named("spread").place(problem)
    exact = recovery_curve(counts)
    sampled = _sample_curve(smallest_sets(counts > 0), np.ones(1), 20_000, np.random.default_rng(1))
    inside = (sampled.low <= exact.probability + 1e-12) & (exact.probability <= sampled.high + 1e-12)
    assert inside.mean() >= 0.9


def test_layers_must_all_survive():
    # Each layer alone survives one loss of two. The whole model survives only the loss of none or of a spare.
    first, second = np.array([[1, 1, 0, 0]]), np.array([[0, 0, 1, 1]])
    alone = recovery_curve(first).probability[2]
    joint = recovery_curve(np.stack([first, second])).probability[2]
    assert alone == pytest.approx(5 / 6)
    assert joint == pytest.approx(4 / 6)


def test_an_expert_without_a_host_is_never_recovered():
    assert not recovery_curve(np.array([[1, 1], [0, 0]])).probability.any()


def test_smallest_sets():
    hosts = np.array([[1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [0, 1, 1, 0, 0], [0, 0, 0, 1, 0], [1, 1, 0, 0, 0]], dtype=bool)
    sets = smallest_sets(hosts)
    assert sorted(map(tuple, sets.astype(int).tolist())) == [(0, 0, 0, 1, 0), (0, 1, 1, 0, 0), (1, 1, 0, 0, 0)]


def test_lost_racks():
    counts = np.array([[1, 0, 1, 0], [0, 1, 0, 1]])
    assert rack_curve(counts, np.array([0, 0, 1, 1])).probability.tolist() == [1.0, 1.0, 0.0]
    assert rack_curve(counts, np.array([0, 1, 0, 1])).probability.tolist() == [1.0, 0.0, 0.0]
