"""Snapshots in node memory, in simulated jobs: dead workers, flipped bits and full memory."""

from __future__ import annotations

import pytest

from holdfast.errors import EXIT_DONE, EXIT_FAILED
from holdfast.protocol import events as ev
from tests.simulation.cluster import Outcome, SimCluster
from tests.simulation.families.memory_plans import memory_plan
from tests.simulation.faults.plans import Fault, FaultKind, FaultPlan
from tests.simulation.schedules.enumeration import FIRST_MEMORY_SEED, Schedule
from tests.simulation.schedules.fuzzing import Tally
from tests.simulation.world import START

#: Some steps are committed before this time.
STRUCK_S = 1.5


def run(seed: int, *faults: Fault, **fields: int) -> list[ev.AnyEvent]:
    """Run a job with three nodes and without checkpoints to its end, and return its events."""
    cluster = SimCluster(FaultPlan(seed=seed, faults=faults, **{"steps": 20, "snapshot_every": 2, **fields}))
    outcome = cluster.run()
    assert outcome.exit_code == EXIT_DONE, f"{seed}: {outcome.why}"
    return list(cluster.world.journal.events)


def at(kind: FaultKind, after_s: float = 0.0, target: int = 0) -> Fault:
    return Fault(kind=kind, time=STRUCK_S + after_s, target=target)


@pytest.mark.parametrize("seed", range(12))
def test_if_all_workers_die_the_newest_snapshot_is_restored(seed: int) -> None:
    events = run(seed, at(FaultKind.KILL_WORKERS))
    (place,) = [number for number, event in enumerate(events) if isinstance(event, ev.RolledBack)]
    back, before = events[place], events[:place]
    assert isinstance(back, ev.RolledBack)
    committed = max(event.step for event in before if isinstance(event, ev.StepCommitted))
    assert committed - back.to_step <= 3, "the job lost more than two steps and one unfinished snapshot"
    assert back.to_step in {event.step for event in before if isinstance(event, ev.SnapshotSaved)}
    recovered = next(event for event in events[place:] if isinstance(event, ev.Recovered))
    assert (recovered.action, recovered.state_source) == ("rollback", "snapshot")


@pytest.mark.parametrize("seed", range(6))
def test_copies_on_other_nodes_are_restored_if_a_node_dies_too(seed: int) -> None:
    """The memory is full for a while, so the copies of the newest snapshot are old and complete at the failure."""
    full = tuple(Fault(kind=FaultKind.FULL_MEMORY, time=STRUCK_S, target=node, duration=0.5) for node in range(3))
    events = run(seed, *full, at(FaultKind.KILL_WORKERS, 0.4), at(FaultKind.KILL_NODE, 0.401, seed), steps=30)
    assert [event.to_step for event in events if isinstance(event, ev.RolledBack)]
    assert any(isinstance(event, ev.SnapshotFailed) for event in events), "the full memory was not reported"


@pytest.mark.parametrize("seed", range(6))
def test_a_damaged_part_is_replaced_by_its_copy(seed: int) -> None:
    events = run(seed, at(FaultKind.FLIP, target=seed), at(FaultKind.KILL_WORKERS, 0.001))
    assert any(isinstance(event, ev.RolledBack) for event in events)


def test_without_copies_damaged_parts_fail_the_job() -> None:
    faults = (*(at(FaultKind.FLIP, target=node) for node in range(3)), at(FaultKind.KILL_WORKERS, 0.001))
    cluster = SimCluster(FaultPlan(seed=3, steps=20, faults=faults, snapshot_every=2, copies=1))
    outcome = cluster.run()
    assert outcome.exit_code == EXIT_FAILED
    assert "no live copy" in outcome.why
    rejected = [event for event in cluster.world.journal.events if isinstance(event, ev.SnapshotRejected)]
    assert {event.node for event in rejected}, "the rejected copies were not reported"


def test_random_schedules_with_snapshots() -> None:
    tally = Tally()
    for number in range(60):
        tally.run(Schedule(number=FIRST_MEMORY_SEED + number))
    assert not tally.failed, tally.examples
    assert tally.ended["memory", EXIT_DONE] > 50
    kinds = {fault.kind for number in range(60) for fault in memory_plan(FIRST_MEMORY_SEED + number).faults}
    assert {FaultKind.KILL_WORKERS, FaultKind.FLIP, FaultKind.FULL_MEMORY} <= kinds


def changing(seed: int, *faults: Fault, slots: int) -> tuple[Outcome, list[ev.AnyEvent]]:
    """Run a job with four experts that changes its layout when one of three nodes dies; no step is undone."""
    lost = at(FaultKind.KILL_NODE, target=seed)
    fields = {"nodes": 3, "start_nodes": 3, "workers_per_node": 2, "experts": 4, "slots": slots, "steps": 40}
    plan = FaultPlan(seed=seed, faults=(lost, *faults), layouts=((1, 2), (3, 1)), **{**fields, "rebalance_every": 2})
    cluster = SimCluster(plan)
    outcome = cluster.run()
    events = list(cluster.world.journal.events)
    assert not any(isinstance(event, ev.RolledBack) for event in events)
    return outcome, events


@pytest.mark.parametrize("seed", range(4))
def test_experts_move_to_another_layout_although_no_node_has_room_for_all(seed: int) -> None:
    outcome, events = changing(seed, slots=3)
    assert outcome.exit_code == EXIT_DONE, outcome.why
    changed = [event for event in events if isinstance(event, ev.LayoutChanged)]
    assert [(event.from_layout, event.to_layout) for event in changed] == [("one place", "shard 2")]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("boundary", ["putting", "attach"])
def test_a_node_lost_during_a_layout_change_loses_no_expert(seed: int, boundary: str) -> None:
    outcome, _ = changing(seed, Fault(kind=FaultKind.KILL_NODE, boundary=boundary, target=seed), slots=4)
    assert outcome.exit_code == EXIT_DONE, outcome.why


@pytest.mark.parametrize("seed", range(2))
def test_the_loss_of_the_only_stashed_copy_of_an_expert_fails_the_job(seed: int) -> None:
    """Another node dies after the state is stashed; the job must not continue with missing experts."""
    _, events = changing(seed, slots=3)
    put = next(e.time for e in events if isinstance(e, ev.GenerationStarted) and e.reason == "layout")
    for after_s in (0.2, 0.3):
        outcome, _ = changing(seed, Fault(kind=FaultKind.KILL_NODE, time=put - START + after_s, target=1), slots=3)
        assert outcome.exit_code == EXIT_FAILED
        assert "no live copy" in outcome.why
