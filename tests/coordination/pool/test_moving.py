"""Tests of compaction moves: one at a time, the new node joins first, and no job falls below its minimum."""

from __future__ import annotations

from played_pool import PlayedPool

from holdfast.coordination.pool.inputs import MoveJobs
from holdfast.coordination.pool.node_selection.compacting import Relocation, compact
from holdfast.coordination.pool.node_selection.moving import build_occupancy


def scattered(**settings: int) -> PlayedPool:
    """Return a pool with a job on n1 and n2 in two racks, and n3 free in the rack of n1."""
    pool = PlayedPool(**settings)  # pyright: ignore[reportArgumentType]
    for node, rack in (("n1", "a"), ("n2", "b")):
        pool.come(node, rack=rack)
    pool.submit("one", least=2, most=2)
    pool.stands("one")
    pool.come("n3", rack="a")
    return pool


def test_a_compaction_releases_the_old_node_once_the_new_one_trains() -> None:
    pool = scattered()
    found = compact(build_occupancy(pool.pool.state), 60.0)
    assert found.moves == (Relocation("one", "n2", "n3"),)
    assert (found.racks, found.cost_s) == ({"one": (2, 1)}, 1.0), "the cost is a guess before the first move"
    pool.feed(MoveJobs(found.moves))
    assert pool.record.grants["n3"].job == "one"
    assert not pool.record.grants["n2"].recalled, "the new node does not train yet"
    assert pool.pool.moves.pending_count == 1
    pool.stands("one")
    assert pool.leaving("one") == {"n2"}
    pool.stands("one")
    assert pool.nodes_of("one") == {"n1", "n3"}
    assert pool.pool.moves.pending_count == 0
    assert "n2" not in pool.record.grants


def test_a_move_waits_for_the_previous_move() -> None:
    pool = PlayedPool(nodes=2)
    pool.submit("one", least=2, most=2)
    pool.stands("one")
    pool.come("n3")
    pool.come("n4")
    pool.feed(MoveJobs((Relocation("one", "n1", "n3"), Relocation("one", "n2", "n4"))))
    assert "n4" not in pool.record.grants
    for _ in range(2):
        pool.stands("one")
    assert pool.record.grants["n4"].job == "one"
    for _ in range(2):
        pool.stands("one")
    assert pool.nodes_of("one") == {"n3", "n4"}


def test_a_move_to_a_standby_makes_the_old_node_a_standby() -> None:
    pool = PlayedPool(nodes=3, reserve=1)
    pool.submit("one", least=2, most=2)
    pool.stands("one")
    (standby,) = pool.standbys_of("one")
    old = sorted(pool.nodes_of("one"))[0]
    pool.feed(MoveJobs((Relocation("one", old, standby),)))
    assert not pool.record.grants[standby].standby
    assert pool.record.grants[old].replaced
    pool.stands("one")
    pool.stands("one")
    assert standby in pool.nodes_of("one")
    assert pool.standbys_of("one") == {old}


def test_a_move_that_is_no_longer_possible_is_skipped() -> None:
    pool = scattered()
    pool.go("n3")
    pool.feed(MoveJobs((Relocation("one", "n2", "n3"), Relocation("gone", "n9", "n3"))))
    assert pool.pool.moves.pending_count == 0
    assert pool.nodes_of("one") == {"n1", "n2"}


def test_a_restarted_server_finishes_a_pending_move() -> None:
    pool = scattered()
    pool.feed(MoveJobs((Relocation("one", "n2", "n3"),)))
    pool.restart()
    for node in ("n1", "n2", "n3"):
        pool.come(node)
    pool.stands("one")
    pool.stands("one")
    assert pool.nodes_of("one") == {"n1", "n3"}
