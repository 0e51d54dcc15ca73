"""Faults without dead processes: each kind has its effect, and the job continues."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any, TypeVar

import pytest

from holdfast.errors import EXIT_DONE
from holdfast.planner.fleet.timeline import Timeline
from holdfast.protocol import events as ev
from holdfast.protocol.messages import any_side as msg
from tests.simulation.cluster import SimCluster, run_plan
from tests.simulation.collectives import Group, SimOperation
from tests.simulation.families.level_plans import layout_plan
from tests.simulation.faults.plans import Fault, FaultKind, FaultPlan
from tests.simulation.faults.troubles import DataPlane, Partition
from tests.simulation.process import Process
from tests.simulation.world import START

A, B, C = "n0", "n1", "n2"
SomeEvent = TypeVar("SomeEvent", bound=ev.AnyEvent)


def run(*faults: Fault, seed: int = 1, **job: Any) -> SimCluster:
    cluster = SimCluster(FaultPlan(seed=seed, faults=faults, start_spread=0.0, **job), keep_trace=True)
    assert cluster.run().exit_code == EXIT_DONE
    return cluster


def events(cluster: SimCluster, kind: type[SomeEvent]) -> list[SomeEvent]:
    return [event for event in cluster.world.journal.events if isinstance(event, kind)]


def struck_at(cluster: SimCluster) -> float:
    """Return the time of the first fault on the cluster's clock."""
    assert cluster.world.story is not None
    return next(line[0] for line in cluster.world.story if line[1] == "FAULT") + START


def faults_told(cluster: SimCluster) -> list[msg.Complaint]:
    assert cluster.world.story is not None
    return [line[2] for line in cluster.world.story if isinstance(line[2], msg.Complaint)]


@pytest.mark.parametrize(("other", "apart"), [(None, {(A, B), (A, C)}), (frozenset({B}), {(A, B)})])
def test_a_partition_separates_a_side_from_all_others_or_from_one(
    other: frozenset[str] | None, apart: set[Any]
) -> None:
    plane, timeline, healed = DataPlane(), Timeline(), []
    plane.part(timeline, Partition(frozenset({A}), other), heals_after_s=1.0)
    pairs = [(A, B), (A, C), (B, C)]
    assert {pair for pair in pairs if plane.parted(pair)} == apart
    assert {pair for pair in pairs if not plane.reaches(pair[1], {pair[0]})} == apart
    plane.when_healed(lambda: healed.append(timeline.now))
    while timeline.step():
        pass
    assert healed == [1.0]
    assert not any(plane.parted(pair) for pair in pairs)


class Member(Process):
    def __init__(self, node: str) -> None:
        super().__init__()
        self.id, self.values = f"{node}/0/a", list[Any]()

    def operation_done(self, operation: SimOperation, value: Any) -> None:
        self.values.append(value)

    def operation_failed(self, operation: SimOperation) -> None:
        raise AssertionError("an operation failed although no member died")


def test_a_collective_waits_until_all_members_reach_each_other() -> None:
    plane, timeline, members = DataPlane(), Timeline(), [Member(node) for node in (A, B, C)]
    plan = msg.GenerationPlan(
        term=1, generation=1, members=tuple(msg.Member(worker=m.id, host="h", state_port=1) for m in members)
    )
    group = Group(plan, timeline, Random(1), (0.001, 0.01), plane)
    plane.part(timeline, Partition(frozenset({A}), frozenset({B})), heals_after_s=5.0)
    for place, member in enumerate(members):
        group.issue(member, "reduce", 1, place, sum)
    timeline.at(4.9, lambda: None)
    while timeline.now < 4.9:
        timeline.step()
        assert all(member.values == [] for member in members)
    while timeline.step():
        pass
    assert all(member.values == [3] for member in members)


def test_a_long_partition_makes_collectives_time_out() -> None:
    cluster = run(Fault(kind=FaultKind.PARTITION, boundary="reducing", step=2, duration=4.0))
    first = faults_told(cluster)[0]
    assert first.timed_out
    assert "too long" in first.detail
    assert "hang" in [failure.kind for failure in events(cluster, ev.FailureDetected)]


def test_a_short_partition_only_delays() -> None:
    cluster = run(Fault(kind=FaultKind.PARTITION, boundary="reducing", step=2, duration=0.5))
    assert faults_told(cluster) == []
    assert events(cluster, ev.FailureDetected) == []


def test_a_worker_with_a_delayed_listener_reports_late() -> None:
    cluster = run(
        Fault(kind=FaultKind.LAG_LISTENER, time=0.6, target=0, duration=1.5),
        Fault(kind=FaultKind.KILL_NODE, time=0.6, target=1),
        steps=20,
    )
    recovered = events(cluster, ev.Recovered)
    assert recovered[0].time >= struck_at(cluster) + 1.5
    assert [event.node for event in events(cluster, ev.NodeLeft) if event.reason == "failed"] == ["n1"]


@pytest.mark.parametrize("kind", [FaultKind.LAG_UP, FaultKind.LAG_DOWN])
def test_a_delay_in_one_direction(kind: FaultKind) -> None:
    """A node with late outgoing messages is lost like a silent node; late incoming messages only delay."""
    cluster = run(Fault(kind=kind, time=0.6, target=1, duration=2.5), steps=40)
    lost = [event for event in events(cluster, ev.FailureDetected) if event.kind == "lease_expired"]
    assert bool(lost) == (kind is FaultKind.LAG_UP)


@pytest.mark.parametrize(("target", "node"), [(0, "n0"), (1, "n1")])
def test_a_hung_thread_is_detected_after_its_limit(target: int, node: str) -> None:
    """Its agent ends the process, or the coordinator is informed and restarts the node."""
    cluster = run(Fault(kind=FaultKind.HANG, boundary="reducing", step=2, target=target, duration=0.7))
    (failure,) = [event for event in events(cluster, ev.FailureDetected) if event.kind == "hang"]
    assert failure.time >= struck_at(cluster) + 0.7 - 1e-4  # Times in the story have four digits.
    assert failure.node == node


def test_a_full_disk_loses_checkpoints_and_a_slow_one_delays_them() -> None:
    full = run(
        Fault(kind=FaultKind.FULL_DISK, time=0.0, target=0, duration=60.0), checkpoint_every=1, nodes=1, start_nodes=1
    )
    assert events(full, ev.CheckpointSaved) == []
    slow = run(
        Fault(kind=FaultKind.SLOW_DISK, time=0.0, target=0, duration=0.5), checkpoint_every=1, nodes=1, start_nodes=1
    )
    saved = events(slow, ev.CheckpointSaved)
    assert saved
    assert saved[0].time >= struck_at(slow) + 0.5


def said_twice(seed: int) -> int:
    """Return the number of events that were lost in a power cut and written again."""
    cut = Fault(kind=FaultKind.POWER_CUT, time=0.8, duration=0.3)
    cluster = run(cut, seed=seed, nodes=1, start_nodes=1, steps=20, checkpoint_every=1)
    events = cluster.world.journal.events
    assert [event.seq for event in events] == list(range(1, len(events) + 1))
    assert cluster.world.story is not None
    written = [str(line[2]) for line in cluster.world.story if line[1] == "journal"]
    return len(written) - len(set(written))


def test_a_power_cut_loses_events_that_are_not_on_disk() -> None:
    assert sum(said_twice(seed) > 0 for seed in range(32)) > 7


@pytest.mark.parametrize("seed", range(4))
def test_no_message_is_handled_or_sent_during_a_slow_write(seed: int) -> None:
    slow = Fault(kind=FaultKind.SLOW_STORE, time=0.0, duration=2.0)
    kill = Fault(kind=FaultKind.KILL_NODE, boundary="reducing", step=2, target=1)
    cluster = run(slow, kill, seed=seed, steps=20)
    story = cluster.world.story
    assert story is not None
    doings = [line[3] for line in story if line[1] == "coordinator"]
    writes = [place for place, what in enumerate(doings) if what == "writes"]
    assert writes
    assert {doings[place + 1] for place in writes} == {"has written"}


def test_a_pending_write_succeeds_after_the_coordinators_death_or_never() -> None:
    """In both cases the next coordinator continues from the stored record, and the job finishes."""
    slow = Fault(kind=FaultKind.SLOW_STORE, time=0.0, duration=1.0)
    crash = Fault(kind=FaultKind.CRASH_COORDINATOR, time=0.3, duration=0.01)
    arrived: list[bool] = []
    for seed in range(24):
        story = run(slow, crash, seed=seed).world.story
        assert story is not None
        first = next(line[2] for line in story if line[1] == "coordinator")
        doings = [line[3] for line in story if line[1:3] == ("coordinator", first)]
        died = doings.index("crashes") if "crashes" in doings else 0
        if doings[died - 1] == "writes":
            arrived.append("has written" in doings[died:])
    assert {True, False} <= set(arrived)


def test_a_job_with_too_few_expert_slots_waits() -> None:
    kill = Fault(kind=FaultKind.KILL_NODE, time=0.6, target=0)
    back = Fault(kind=FaultKind.RETURN, time=1.6, target=0)
    cluster = run(kill, back, nodes=2, start_nodes=2, steps=20, checkpoint_every=1, experts=4, slots=2)
    (waiting,) = events(cluster, ev.JobWaiting)
    assert (waiting.nodes, waiting.expert_slots) == (1, 2)


def test_a_new_replica_group_is_not_mistaken_for_the_lost_one() -> None:
    # n1 returns while n0 waits for it; one new process attaches before its old processes are known to be dead.
    drawn = layout_plan(5130)
    assert [fault.kind for fault in drawn.faults[:2]] == [FaultKind.HANG, FaultKind.CUT]
    plan = replace(drawn, start_nodes=2, steps=5, places=2, layouts=(), told=False, faults=drawn.faults[:2])
    plan = replace(plan, experts=2, slots=1, rebalance_every=1)
    assert run_plan(plan).exit_code == EXIT_DONE
