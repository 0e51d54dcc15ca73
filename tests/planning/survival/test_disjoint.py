"""Disjoint host sets have the same shares as the sweep over their nodes, and `survives_no_less` is right."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planning_cases import PROPERTY

from holdfast.planning.survival.disjoint import (
    disjoint_sizes,
    losses_of_disjoint,
    some_disjoint_sizes,
    survives_no_less,
)
from holdfast.planning.survival.hitting import smallest_sets
from holdfast.planning.survival.sweep import sweep

SIZES = st.lists(st.integers(1, 4), min_size=1, max_size=4)


def sets_of(sizes: list[int], nodes: int) -> np.ndarray:
    ends = np.cumsum(sizes)
    place = np.arange(nodes)
    return np.array([(place >= end - size) & (place < end) for size, end in zip(sizes, ends, strict=True)])


@settings(PROPERTY, max_examples=60)
@given(sizes=SIZES, further=st.integers(0, 5), share=st.floats(0, 1))
def test_the_shares_equal_those_of_a_sweep(sizes, further, share):
    nodes = sum(sizes) + further
    most_lost = max(round(share * nodes), 1)
    found, swept = losses_of_disjoint(np.array(sizes), nodes, most_lost), sweep(sets_of(sizes, nodes), most_lost, 10**9)
    assert swept is not None
    np.testing.assert_allclose(found.fatal, swept.fatal, rtol=1e-10)
    np.testing.assert_allclose(found.survived, swept.survived, rtol=1e-10)


@settings(PROPERTY, max_examples=60)
@given(few=SIZES, many=SIZES)
def test_survives_no_less_implies_no_higher_share_of_fatal_losses(few, many):
    nodes = sum(few) + sum(many)
    if survives_no_less(np.array(few), np.array(many)):
        one, other = (losses_of_disjoint(np.array(sizes), nodes, nodes).fatal for sizes in (few, many))
        assert (one <= other + 1e-12).all()
    assert survives_no_less(np.array(few), np.array(few))


def test_survives_no_less_compares_numbers_and_sizes():
    assert survives_no_less(np.array([2, 4]), np.array([3, 2, 2]))
    assert not survives_no_less(np.array([2, 2, 4]), np.array([3, 2]))
    assert not survives_no_less(np.array([1, 9]), np.array([2, 2]))


def test_overlapping_sets_have_no_disjoint_sizes():
    sets = np.array([[1, 1, 0, 0, 0], [0, 1, 1, 0, 0], [0, 0, 0, 1, 1]], dtype=bool)
    assert disjoint_sizes(sets) is None
    assert disjoint_sizes(sets[[0, 2]]).tolist() == [2, 2]
    assert some_disjoint_sizes(sets).tolist() == [2, 2]


@pytest.mark.parametrize("nodes", [3, 16, 17, 64, 65, 130])
def test_the_smallest_sets_are_those_that_contain_no_other(nodes):
    rng = np.random.default_rng(nodes)
    for density in (0.1, 0.5, 0.9):
        hosts = rng.random((25, nodes)) < density
        rows = np.unique(hosts, axis=0)
        others = [np.delete(rows, place, axis=0) for place in range(len(rows))]
        wanted = {tuple(row) for row, rest in zip(rows, others, strict=True) if not (rest <= row).all(axis=1).any()}
        found = smallest_sets(hosts)
        assert len(found) == len(wanted)
        assert {tuple(row) for row in found} == wanted
