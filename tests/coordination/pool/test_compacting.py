"""Tests of compaction: plans are feasible, worth their cost, and close to the best plan."""

from __future__ import annotations

from heapq import heappop, heappush
from itertools import count
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.coordination.pool.node_selection.compacting import (
    RACK_WORTH_S,
    ZONE_IN_RACKS,
    Compaction,
    Occupancy,
    compact,
)
from holdfast.protocol.pool.record import PoolNode


def occupied(
    racks: str, owners: str, *, move_s: float = 1.0, zones: str = "", refused: dict[str, frozenset[str]] | None = None
) -> Occupancy:
    """Return nodes n0, n1, ... in one-letter racks, owned by one-letter jobs; `.` is free, `#` unavailable."""
    nodes = {
        f"n{place}": PoolNode(name=f"n{place}", session="a", rack=rack, zone=zones[place] if zones else "")
        for place, rack in enumerate(racks)
    }
    return Occupancy(
        nodes=nodes,
        owners={f"n{place}": job for place, job in enumerate(owners) if job not in ".#"},
        free=frozenset(f"n{place}" for place, job in enumerate(owners) if job == "."),
        refused=refused or {},
        move_s=dict.fromkeys(set(owners) - {".", "#"}, move_s),
    )


def worth(at: Occupancy, owners: dict[str, str]) -> float:
    """Return the cost of all jobs' racks and zones, computed independently of the code under test."""
    racks = {(job, at.rack_of(node)) for node, job in owners.items()}
    zones = {(job, at.nodes[node].zone) for node, job in owners.items()}
    return RACK_WORTH_S * (len(racks) + ZONE_IN_RACKS * len(zones))


def best_by_force(at: Occupancy) -> float:
    """Return the largest net gain of any sequence of moves, found by Dijkstra's algorithm over all of them."""
    start = dict(at.owners)
    everything = at.free | at.owners.keys()
    seen: set[frozenset[tuple[str, str]]] = set()
    tie = count()
    waiting: list[tuple[float, int, dict[str, str]]] = [(0.0, next(tie), start)]
    best = 0.0
    while waiting:
        cost, _, owners = heappop(waiting)
        key = frozenset(owners.items())
        if key in seen:
            continue
        seen.add(key)
        best = max(best, worth(at, start) - worth(at, owners) - cost)
        for node, job in owners.items():
            for to in everything - owners.keys():
                if at.can_use(job, to):
                    moved = {one: owner for one, owner in owners.items() if one != node}
                    heappush(waiting, (cost + at.move_s[job], next(tie), {**moved, to: job}))
    return best


def check(at: Occupancy, found: Compaction) -> float:
    """Check that the planned moves are feasible in order; return their net gain."""
    owners = dict(at.owners)
    for move in found.moves:
        assert at.can_use(move.job, move.to_node)
        assert move.to_node in at.free | at.owners.keys()
        assert owners.pop(move.from_node) == move.job
        assert move.to_node not in owners
        owners[move.to_node] = move.job
    gain = worth(at, dict(at.owners)) - worth(at, owners)
    cost = sum(at.move_s[move.job] for move in found.moves)
    assert (found.gain_s, found.cost_s) == (pytest.approx(gain), pytest.approx(cost))
    for job in set(at.owners.values()):
        before = {at.rack_of(node) for node, owner in at.owners.items() if owner == job}
        then = {at.rack_of(node) for node, owner in owners.items() if owner == job}
        assert found.racks.get(job, (len(before), len(then))) == (len(before), len(then))
    return gain - cost


def test_a_job_in_two_racks_moves_into_one_with_free_nodes() -> None:
    found = compact(occupied("aabb", "xx.x"), RACK_WORTH_S)
    assert found.moves == ()
    found = compact(occupied("aaabb", "xx.x."), RACK_WORTH_S)
    assert [(move.from_node, move.to_node) for move in found.moves] == [("n3", "n2")]
    assert found.racks == {"x": (2, 1)}


def test_moves_that_only_pay_together_are_planned_together() -> None:
    found = compact(occupied("aaaabb", "xx..xx"), RACK_WORTH_S)
    assert len(found.moves) == 2
    assert found.racks == {"x": (2, 1)}


def test_a_move_that_costs_more_than_it_gains_is_not_planned() -> None:
    assert compact(occupied("aaabb", "xx.x.", move_s=59.0), RACK_WORTH_S).moves
    assert not compact(occupied("aaabb", "xx.x.", move_s=60.0), RACK_WORTH_S).moves


def test_two_jobs_spread_over_two_racks_swap_through_a_free_node() -> None:
    at = occupied("aabbc", "xyxy.")
    found = compact(at, RACK_WORTH_S)
    assert found.racks == {"x": (2, 1), "y": (2, 1)}
    assert len(found.moves) == 3
    assert not compact(occupied("aabbc", "xyxy#"), RACK_WORTH_S).moves, "without a free node no job can start to move"


def test_a_zone_counts_more_than_its_racks() -> None:
    found = compact(occupied("abcdef", "x.x..x", zones="112223"), RACK_WORTH_S)
    assert found.zones == {"x": (3, 1)}
    assert found.racks == {"x": (3, 3)}


def test_nodes_without_a_rack_count_as_separate_racks() -> None:
    at = Occupancy(
        nodes={name: PoolNode(name=name, session="a") for name in ("n0", "n1", "n2")},
        owners={"n0": "x", "n1": "x"},
        free=frozenset({"n2"}),
        refused={},
        move_s={"x": 1.0},
    )
    assert not compact(at, RACK_WORTH_S).moves


def test_a_node_refused_by_the_job_is_not_used() -> None:
    assert not compact(occupied("aaabb", "xx.x.", refused={"x": frozenset({"n2"})}), RACK_WORTH_S).moves


_FLOORS = st.lists(
    st.tuples(st.sampled_from("abc"), st.sampled_from("xy.."), st.sampled_from("112")), min_size=2, max_size=6
)


@given(_FLOORS, st.sampled_from((0.5, 20.0, 70.0)))
def test_planned_moves_are_feasible_and_pay(floor: list[tuple[str, str, str]], move_s: float) -> None:
    racks, owners, zones = ("".join(letters) for letters in zip(*floor, strict=True))
    at = occupied(racks, owners, zones=zones, move_s=move_s)
    net = check(at, compact(at, RACK_WORTH_S))
    assert 0 <= net <= best_by_force(at) + 1e-9


def test_plans_are_nearly_always_optimal() -> None:
    rng, same, all_there_is, gained = Random(7), 0, 0.0, 0.0
    cases = 300
    for _ in range(cases):
        nodes = rng.randint(4, 6)
        at = occupied(
            "".join(rng.choice("abc") for _ in range(nodes)),
            "".join(rng.choice("xxyy..") for _ in range(nodes)),
            move_s=rng.choice((0.5, 5.0, 25.0)),
        )
        net, best = check(at, compact(at, RACK_WORTH_S)), best_by_force(at)
        same += net >= best - 1e-9
        all_there_is, gained = all_there_is + best, gained + net
    assert same >= 0.95 * cases
    assert gained >= 0.95 * all_there_is
