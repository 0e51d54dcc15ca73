"""Allocation: Eq. (1) of Lazarus in exact integers."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planning_cases import PROPERTY

from holdfast.errors import BadInputError
from holdfast.planning import Allocation, Guarantee, Shortage, allocate, as_slots


def plan(loads, slots, f) -> Allocation:
    allocation = allocate(loads, np.array(slots), fault_threshold=f)
    assert isinstance(allocation, Allocation)
    return allocation


def equation_1(tokens: list[int], total: int, minimum: int) -> list[int]:
    """Compute Eq. (1) as printed, in fractions."""
    order = sorted(range(len(tokens)), key=lambda expert: tokens[expert])
    replicas = [0] * len(tokens)
    for place, expert in enumerate(order):
        rest = sum(tokens[other] for other in order[place:])
        left = total - sum(replicas)
        replicas[expert] = max(int(Fraction(tokens[expert], rest) * left), minimum)
    return replicas


@PROPERTY
@given(st.data())
def test_matches_the_equation_in_fractions(data):
    experts, nodes = data.draw(st.integers(1, 10)), data.draw(st.integers(1, 8))
    slots = data.draw(st.integers(-(-experts // nodes), 20))
    tokens = data.draw(st.lists(st.integers(0, 10**9), min_size=experts, max_size=experts).filter(any))
    allocation = plan([tokens], [slots] * nodes, data.draw(st.integers(1, 5)))
    replicas = allocation.replicas[0].tolist()
    given_f = allocation.fault_threshold.given
    assert replicas == equation_1(tokens, nodes * slots, given_f)
    assert sum(replicas) == nodes * slots
    assert min(replicas) >= given_f >= 1
    by_load = [replicas[expert] for expert in np.argsort(tokens, kind="stable")]
    assert by_load == sorted(by_load)


def test_equal_loads_get_equal_replicas_where_floats_would_not():
    # In floats, 1/3 of 15 slots is 4.999... for some orders (ERRATA, Lazarus 4).
    for experts in range(1, 50):
        assert set(plan([[7] * experts], [experts] * 5, 1).replicas[0]) == {5}


def test_weighted_loads_keep_order_and_ties():
    loads = np.array([[0.1 + 0.2, 0.3, 5.5, 1e-9]])
    replicas = plan(loads * 1e-3, [4] * 4, 1).replicas[0]
    assert replicas[0] == replicas[1] <= replicas[2]
    assert replicas[3] == 1


def test_a_layer_without_load_gets_equal_replicas_and_is_reported():
    allocation = plan([[0, 0, 0], [1, 2, 3]], [3] * 4, 2)
    assert allocation.replicas[0].tolist() == [4, 4, 4]
    assert allocation.uniform_layers == (0,)


@pytest.mark.parametrize(
    ("slots", "asked", "fits"),
    [([2, 2, 2], 2, 2), ([2, 2, 2], 3, 2), ([6] * 4, 9, 4), ([1, 8], 2, 1), ([8, 3], 2, 2), ([5], 3, 1)],
)
def test_the_threshold_is_lowered_if_nodes_or_slots_are_too_few(slots, asked, fits):
    assert plan([[1, 1, 1]], slots, asked).fault_threshold == Guarantee(asked=asked, given=fits)


def test_too_many_experts_is_a_value_with_its_remedy():
    shortage = allocate([[1] * 16], np.array([6, 6]), fault_threshold=2)
    assert isinstance(shortage, Shortage)
    assert str(shortage) == "16 experts need 16 slots, but 2 nodes have 12: raise slots to 8 a node, or nodes to 3"


@pytest.mark.parametrize(
    ("loads", "words"),
    [
        ([[1, -2]], "layer 0, expert 1 is -2: negative"),
        ([[1, 2], [float("nan"), 2]], "layer 1, expert 0 is nan: not a finite"),
        ([[1, float("inf")]], "inf: not a finite"),
        (np.zeros((2, 2, 2)), "shape (2, 2, 2)"),
        ([[1, 2], [3]], "not a table of numbers"),
        ([], "shape"),
        ([["a"]], "not a table of numbers"),
    ],
)
def test_invalid_loads_are_refused_by_name(loads, words):
    with pytest.raises(BadInputError) as error:
        allocate(loads, np.array([4, 4]), fault_threshold=1)
    assert words in str(error.value)


def test_bad_thresholds_and_slots_are_named():
    with pytest.raises(BadInputError, match="fault threshold is 0"):
        allocate([[1]], np.array([4]), fault_threshold=0)
    with pytest.raises(BadInputError, match="3 numbers for 2 nodes"):
        as_slots([1, 2, 3], 2)
    with pytest.raises(BadInputError, match="at least 1 slot"):
        as_slots([1, 0], 2)
    with pytest.raises(BadInputError, match="nodes is 0"):
        as_slots(6, 0)


@settings(PROPERTY, max_examples=60)
@given(st.integers(1, 12), st.integers(1, 8), st.integers(1, 6), st.integers(1, 3), st.integers(0, 999))
def test_the_least_busy_replicas_are_those_given_one_by_one(experts, nodes, slots, f, seed):
    rng = np.random.default_rng(seed)
    found = allocate(
        rng.integers(0, rng.choice([3, 50, 10**6]), (2, experts)),
        np.full(nodes, slots),
        fault_threshold=f,
        least_busy=True,
    )
    if isinstance(found, Shortage):
        assert experts > nodes * slots
        return
    given = found.fault_threshold.given
    one_by_one = np.full((2, experts), given)
    for layer, tokens in enumerate(found.tokens):
        for _ in range(nodes * slots - given * experts):
            one_by_one[layer, (tokens / one_by_one[layer]).argmax()] += 1
    assert (found.replicas.sum(axis=1) == nodes * slots).all()
    assert found.replicas.min() >= given
    np.testing.assert_allclose((found.tokens / found.replicas).max(axis=1), (found.tokens / one_by_one).max(axis=1))
