"""Placement uses every slot, keeps the guarantee, and aligns groups."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from planning_cases import PROPERTY, assert_complete, problems

from holdfast.errors import BadInputError
from holdfast.planning import PlacementProblem, fewest_hosts, from_node_lists, node_lists, strategies, strategy_named
from holdfast.planning.placement.guarantee import enforce_guarantee


def problem_of(replicas, slots, f=2) -> PlacementProblem:
    return PlacementProblem(replicas=np.array(replicas), slots=np.array(slots), fault_threshold=f)


@pytest.mark.parametrize("name", sorted(strategies()))
@PROPERTY
@given(problem=problems())
def test_every_replica_is_placed_every_slot_used_and_f_nodes_host_every_expert(name, problem):
    counts = strategy_named(name).place(problem)
    assert_complete(problem, counts)
    assert name == "compact" or fewest_hosts(counts) >= problem.fault_threshold


@PROPERTY
@given(problem=problems(uneven=True, most_nodes=6))
def test_guarantee_mends_even_the_worst_start(problem):
    packed = strategy_named("compact").place(problem)
    mended = enforce_guarantee(packed, problem.slots, problem.fault_threshold)
    assert_complete(problem, mended)
    assert fewest_hosts(mended) >= problem.fault_threshold


@PROPERTY
@given(problem=problems(uneven=False, most_layers=1))
def test_compact_uses_the_fewest_nodes_in_a_row(problem):
    hosts = (strategy_named("compact").place(problem) > 0).sum(axis=2)
    fewest = -(-problem.replicas // problem.slots[0])
    assert (hosts <= fewest + 1).all()


def test_mro_groups_hold_whole_expert_groups():
    # c divides E, so groups are full: experts {0,1} on 2 nodes, {2,3} on the other 4 (Lazarus, 4.1).
    counts = strategy_named("mro").place(problem_of([[2, 2, 4, 4]], [2] * 6))
    hosts = counts[0] > 0
    np.testing.assert_array_equal(hosts[0], hosts[1])
    np.testing.assert_array_equal(hosts[2], hosts[3])
    assert not (hosts[0] & hosts[2]).any()


def test_mro_groups_share_their_core_in_all_layers():
    replicas = [[2, 2, 6, 6], [3, 3, 5, 5], [6, 6, 2, 2]]
    hosts = strategy_named("mro").place(problem_of(replicas, [2] * 8)) > 0
    rare, common = [[0, 1], [0, 1], [2, 3]], [[2, 3], [2, 3], [0, 1]]
    for members, size in ((rare, 2), (common, 5)):
        core = np.logical_and.reduce([hosts[layer, experts].all(axis=0) for layer, experts in enumerate(members)])
        assert core.sum() == size


def test_smallest_case_where_the_paper_fails_keeps_its_guarantee():
    for replicas, slots, f in (([[2, 2, 2]], [2] * 3, 2), ([[3, 3, 3, 3]], [3] * 4, 3)):
        assert fewest_hosts(strategy_named("mro").place(problem_of(replicas, slots, f))) >= f


def test_node_lists_round_trip():
    counts = strategy_named("mro").place(problem_of([[2, 3, 4, 3]], [4, 2, 3, 3]))[0]
    lists = node_lists(counts)
    assert [len(held) for held in lists] == [4, 2, 3, 3]
    np.testing.assert_array_equal(from_node_lists(lists, 4), counts)


def test_unknown_strategy_names_the_known_ones():
    with pytest.raises(BadInputError, match="choose one of best, mro"):
        strategy_named("magic")
