"""The columns of node groups go to the nodes of the corresponding previous groups."""

from __future__ import annotations

import numpy as np

from holdfast.planning.placement.keeping.columns import columns_by_copies, columns_by_groups

#: Three groups of 1, 2 and 3 nodes, with two experts each.
PATTERN = np.repeat(np.array([[1, 0, 0, 0, 0, 0], [0, 1, 1, 0, 0, 0], [0, 0, 0, 1, 1, 1]], dtype=bool), 2, axis=0)
REPLICAS = np.array([[1, 1, 2, 2, 3, 3]])


def held_by(order: list[int]) -> np.ndarray:
    return PATTERN[:, order][None]


def test_groups_are_found_wherever_their_nodes_are():
    order = [5, 0, 2, 4, 1, 3]
    found = columns_by_groups(PATTERN, REPLICAS, held_by(order))
    assert found is not None
    np.testing.assert_array_equal(found, PATTERN[:, order])


def test_a_growing_group_keeps_its_nodes_and_a_joining_node_gets_the_rest():
    held = held_by([5, 0, 2, 4, 1, 3])
    held[:, :, 0] = False
    found = columns_by_groups(PATTERN, REPLICAS, held)
    assert found is not None
    assert (found >= held[0]).all()
    np.testing.assert_array_equal(np.sort(found.sum(axis=1)), np.sort(PATTERN.sum(axis=1)))


def test_sets_that_overlap_have_no_groups():
    ring = np.array([[1, 1, 0, 0, 0, 0], [0, 1, 1, 0, 0, 0]] * 3, dtype=bool)
    assert columns_by_groups(ring, REPLICAS, held_by([0, 1, 2, 3, 4, 5])) is None
    assert columns_by_groups(PATTERN, REPLICAS, ring[None]) is None


def test_the_largest_number_of_kept_copies_decides_for_any_rows():
    rows = np.array([[4, 5, 2, 3, 0, 1]])
    held = PATTERN[rows[0]][:, [3, 1, 0, 2, 4, 5]][None]
    found = columns_by_copies(PATTERN, rows, held)
    np.testing.assert_array_equal(found[rows[0]], held[0])
