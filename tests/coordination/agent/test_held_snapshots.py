from __future__ import annotations

from holdfast.coordination.agent.held_snapshots import HeldSnapshots
from holdfast.coordination.agent.instructions import DropParts, FetchParts
from holdfast.protocol.messages.agent import DropSnapshots, KeepSnapshots, NodeSnapshots, WantedPart
from holdfast.protocol.state import Keeper, SnapshotPart


def part(step: int, number: int = 0, generation: int = 1) -> SnapshotPart:
    return SnapshotPart(term=1, generation=generation, step=step, part=number, parts=3, seal=b"s" * 16)


def held(*found: SnapshotPart) -> HeldSnapshots:
    snapshots = HeldSnapshots()
    snapshots.reset(NodeSnapshots(host="h", port=5, parts=found))
    return snapshots


def parts(snapshots: HeldSnapshots) -> set[SnapshotPart]:
    assert snapshots.held_parts is not None
    return set(snapshots.held_parts.parts)


def test_a_node_without_snapshots_reports_no_parts() -> None:
    snapshots = HeldSnapshots()
    snapshots.reset(None)
    assert snapshots.held_parts is None


def test_the_two_newest_own_snapshots_are_kept() -> None:
    snapshots = held()
    assert snapshots.add_own(part(10)) == snapshots.add_own(part(20)) == []
    assert snapshots.add_own(part(20, 1)) == []
    assert snapshots.add_own(part(30)) == [DropParts((part(10),))]
    assert parts(snapshots) == {part(20), part(20, 1), part(30)}


def test_an_older_copy_is_kept_until_two_newer_copies_arrive() -> None:
    snapshots = held()
    snapshots.add_copy(part(10, 2))
    for step in (10, 20, 30):
        snapshots.add_own(part(step))
    assert part(10, 2) in parts(snapshots)
    snapshots.add_copy(part(20, 2))
    assert snapshots.add_copy(part(30, 2)) == [DropParts((part(10, 2),))]


def test_snapshots_of_a_later_generation_count_as_newer_after_a_rollback() -> None:
    snapshots = held(part(40), part(50))
    assert snapshots.add_own(part(45, generation=2)) == [DropParts((part(40),))]
    assert snapshots.add_own(part(55, generation=2)) == [DropParts((part(50),))]


def test_only_missing_parts_are_fetched_and_dropped_parts_are_forgotten() -> None:
    snapshots = held(part(10))
    keeper = Keeper(node="a", host="h", port=1)
    wanted = tuple(WantedPart(snapshot=part(10, number), keeper=keeper) for number in (0, 1))
    assert snapshots.on_order(KeepSnapshots(term=1, wanted=wanted)) == FetchParts((wanted[1],))
    dropped = DropSnapshots(term=1, parts=(part(10),), why="of another run")
    assert snapshots.on_order(dropped) == DropParts((part(10),), "of another run")
    assert parts(snapshots) == set()
