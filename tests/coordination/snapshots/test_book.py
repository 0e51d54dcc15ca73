"""Tests of usable snapshots: the coordinator's state machine, with parts reported by agents."""

from __future__ import annotations

import msgspec
import pytest
from machinery import Job, attach, called, hello, kept, w

from holdfast.protocol import events as ev
from holdfast.protocol.failures import FailureKind
from holdfast.protocol.job_spec import JobSpec, RecoverySpec
from holdfast.protocol.messages import any_side as msg
from holdfast.protocol.plan import DecisionKind, FaultThreshold


def part(
    job: Job, step: int, number: int, *, parts: int = 3, generation: int = 1, born: float = 0.0
) -> msg.SnapshotPart:
    config, record = job.machine.config, job.machine.record
    seal = msg.seal_of(config.plan_secret(born or record.born, 1, generation))
    return msg.SnapshotPart(term=1, generation=generation, step=step, part=number, parts=parts, seal=seal)


def killed(worker: str) -> msg.WorkerDown:
    return msg.WorkerDown(worker=worker, kind=FailureKind.PROCESS_EXIT, detail="", exit_code=-9)


def holds(job: Job, node: int, *parts: msg.SnapshotPart) -> None:
    job.deliver_from(f"n{node}", msg.NodeSnapshots(host=f"h{node}", port=node + 1, parts=parts))


def taken(job: Job, *steps: int, nodes: int = 3) -> Job:
    """Return a job with committed steps in which each node holds its part of their snapshots."""
    for step in range(1, max(steps) + 1):
        job.step(step)
    for node in range(nodes):
        holds(job, node, *(part(job, step, node, parts=nodes) for step in steps))
    return job


def everybody_dies(job: Job, *others: int) -> msg.Begin:
    """End all worker processes, but not their agents; return the Begin of the first worker that returns."""
    for node in others or range(job.nodes):
        down = killed(w(f"n{node}"))
        job.deliver_from(f"n{node}", down)
    job.deliver(attach(w("n0", "b")))
    return job.orders(msg.Begin)[w("n0", "b")]


def test_the_newest_snapshot_is_restored_after_all_workers_died() -> None:
    job = taken(Job().start(), 2, 4)
    begin = everybody_dies(job)
    source = begin.decision.source
    assert (begin.decision.kind, begin.decision.applied) == (DecisionKind.ROLLBACK, 4)
    assert isinstance(source, msg.SnapshotSource)
    assert [source.keepers[place].node for (place,) in source.parts] == ["n0", "n1", "n2"]
    assert source.keepers[1] == msg.Keeper(node="n1", host="h1", port=2)
    assert source.part(2) == part(job, 4, 2)
    assert source.key == job.machine.context.snapshots.key
    (back,) = job.emitted(ev.RolledBack)
    assert back.to_step == 4
    assert "the snapshot of step 4 serves, in the memory of n0, n1, n2" in back.why


def test_an_incomplete_or_uncommitted_snapshot_is_not_restored() -> None:
    job = taken(Job().start(), 2)
    holds(job, 0, part(job, 2, 0), part(job, 3, 0))
    holds(job, 1, part(job, 2, 1), part(job, 3, 1))
    holds(job, 2, part(job, 2, 2), part(job, 3, 2))
    assert everybody_dies(job).decision.applied == 2
    job = taken(Job().start(), 4)
    holds(job, 2)
    for node in range(3):
        job.deliver_from(f"n{node}", killed(w(f"n{node}")))
    (failed,) = job.emitted(ev.JobFailed)
    assert "4 committed steps are lost" in failed.why


def test_a_snapshot_is_emitted_once_it_is_complete_and_committed() -> None:
    job = Job(spec=JobSpec(recovery=RecoverySpec(fault_threshold=4))).start()
    job.step(1)
    for node in range(3):
        job.deliver(
            msg.SnapshotTaken(
                worker=w(f"n{node}"), snapshot=part(job, 2, node), bytes=10 + node, seconds=0.1 * node, stall_s=0.01
            )
        )
        holds(job, node, part(job, 2, node))
        assert not job.emitted(ev.SnapshotSaved)
    job.step(2)
    (saved,) = job.emitted(ev.SnapshotSaved)
    assert (saved.step, saved.saved_bytes, saved.save_s, saved.stall_s) == (2, 33, 0.2, 0.01)
    assert saved.fault_threshold == FaultThreshold(asked=4, given=3), (
        "the threshold is lowered to the available nodes, and reported"
    )
    holds(job, 0, part(job, 2, 0))
    assert not job.emitted(ev.SnapshotSaved)


def test_a_snapshot_found_complete_is_emitted_once_its_step_is_committed() -> None:
    """A simulation (19832909995) found this: the job rolled back to a snapshot that the journal did not know."""
    job = Job().start()
    job.step(1)
    for node in range(3):
        holds(job, node, part(job, 2, node))  # its cost was reported to the previous coordinator
    assert not job.emitted(ev.SnapshotSaved)
    job.step(2)
    (saved,) = job.emitted(ev.SnapshotSaved)
    assert saved.step == 2


def test_an_older_snapshot_is_emitted_once_it_is_the_newest_that_is_complete() -> None:
    """A simulation (19410357537) found this: the job rolled back to a snapshot that the journal did not know."""
    job = taken(Job().start(), 2, 4)
    holds(job, 2, part(job, 4, 2))
    job.boot(takeover=True)
    for node in range(3):
        worker = w(f"n{node}")
        job.connect(hello(f"n{node}", kept=(attach(worker), msg.Entered(worker=worker, generation=1, applied=4))))
    holds(job, 0, part(job, 2, 0), part(job, 4, 0))
    holds(job, 1, part(job, 2, 1), part(job, 4, 1))
    holds(job, 2, part(job, 4, 2))
    assert [event.step for event in job.emitted(ev.SnapshotSaved)] == [4]
    holds(job, 2, part(job, 2, 2), part(job, 4, 2))
    assert not job.emitted(ev.SnapshotSaved), "the newer one can be used"
    holds(job, 0, part(job, 2, 0))
    assert [event.step for event in job.emitted(ev.SnapshotSaved)] == [2]


def test_a_thousand_nodes_are_not_all_searched_for_each_report() -> None:
    job = Job(nodes=100).start()
    job.step(1)
    for node in range(100):
        holds(job, node, part(job, 1, node, parts=100))
    assert not [event for event in job.events if isinstance(event, ev.SnapshotSaved)]
    job.tick(0.5)
    assert [event.step for event in job.emitted(ev.SnapshotSaved)] == [1]
    assert len(job.sent(msg.KeepSnapshots)) == 100


def test_a_snapshot_without_room_is_emitted_as_failed() -> None:
    job = Job().start()
    job.deliver(msg.SnapshotLeftOut(worker=w("n1"), generation=1, step=2, why="no room"))
    assert [(event.node, event.step, event.why) for event in job.emitted(ev.SnapshotFailed)] == [("n1", 2, "no room")]
    (asked,) = job.emitted(ev.ActionRequested)
    assert "no snapshot of step 2 is whole: node n1: no room" in asked.why
    job.deliver(msg.SnapshotLeftOut(worker=w("n2"), generation=1, step=2, why="no room"))
    assert not job.emitted(ev.SnapshotFailed), "one event is enough"


def test_each_part_is_copied_to_as_many_nodes_as_the_fault_threshold() -> None:
    job = Job(nodes=4).start()
    for node in range(4):
        holds(job, node)
    job.step(1)
    holds(job, 0, part(job, 1, 0, parts=4))
    (asked,) = job.sent(msg.KeepSnapshots)
    (wanted,) = asked.wanted
    assert wanted == msg.WantedPart(snapshot=part(job, 1, 0, parts=4), keeper=msg.Keeper(node="n0", host="h0", port=1))
    assert job.last[-1].connection == job.connections["n1"], "n0 and n1 form a group"  # pyright: ignore
    holds(job, 1, part(job, 1, 0, parts=4))
    assert [asked.wanted for asked in job.sent(msg.KeepSnapshots)] == [()], "n1 already holds the part"


def test_a_snapshot_with_copies_of_a_lost_nodes_parts_is_restored() -> None:
    job = taken(Job().start(), 4)
    holds(job, 0, part(job, 4, 0), part(job, 4, 1))
    assert job.machine.context.snapshots.newest(4) == (4, 1)
    assert job.machine.context.snapshots.newest(3) is None
    job.lose("n1")
    job.report("n0", None, msg.Phase.ENTERING)
    job.report("n2", None, msg.Phase.ENTERING)
    source = job.orders(msg.Begin)[w("n0")].decision.source
    assert isinstance(source, msg.SnapshotSource)
    assert [source.keepers[place].node for (place,) in source.parts] == ["n0", "n0", "n2"]


def test_an_unreadable_snapshot_is_skipped_and_never_tried_again() -> None:
    job = taken(Job().start(), 2, 4)
    begin = everybody_dies(job)
    assert begin.decision.applied == 4
    damaged = msg.SnapshotDamaged(
        worker=w("n0", "b"), generation=begin.plan.generation, snapshot=part(job, 4, 1), node="n1", why="checksum"
    )
    job.deliver(damaged)
    assert [(event.step, event.node) for event in job.emitted(ev.SnapshotRejected)] == [(4, "n1")]
    _reports_anew(job)
    begin = job.orders(msg.Begin)[w("n0", "b")]
    assert begin.decision.applied == 2, "the older snapshot is next"
    worthless = msg.SnapshotDamaged(
        worker=w("n0", "b"), generation=begin.plan.generation, snapshot=part(job, 2, 0), node="", why="NaN"
    )
    job.deliver(worthless)
    _reports_anew(job)
    (failed,) = job.emitted(ev.JobFailed)
    assert "4 committed steps" not in failed.why or "live copy" in failed.why


def _reports_anew(job: Job) -> None:
    stop = job.machine.context.interruption.stop
    assert stop is not None
    job.deliver(
        msg.Report(
            worker=w("n0", "b"),
            term=1,
            generation=stop.generation,
            applied=None,
            step=1,
            phase=msg.Phase.ENTERING,
        )
    )


def test_a_second_copy_of_a_damaged_part_keeps_the_snapshot() -> None:
    job = taken(Job().start(), 4)
    holds(job, 0, part(job, 4, 0), part(job, 4, 1))
    begin = everybody_dies(job)
    job.deliver(
        msg.SnapshotDamaged(
            worker=w("n0", "b"), generation=begin.plan.generation, snapshot=part(job, 4, 1), node="n1", why="checksum"
        )
    )
    assert job.emitted(ev.SnapshotRejected)
    assert job.machine.context.interruption.stop is None, "n0 has another copy of it"


def test_a_worker_that_tried_all_named_copies_gets_one_that_appeared_since() -> None:
    job = taken(Job().start(), 4)
    begin = everybody_dies(job)
    holds(job, 2, part(job, 4, 2), part(job, 4, 1))
    damaged = msg.SnapshotDamaged(
        worker=w("n0", "b"), generation=begin.plan.generation, snapshot=part(job, 4, 1), node="n1", why="checksum"
    )
    job.deliver(damaged)
    _reports_anew(job)
    source = job.orders(msg.Begin)[w("n0", "b")].decision.source
    assert isinstance(source, msg.SnapshotSource)
    assert [source.keepers[place].node for (place,) in source.parts] == ["n0", "n2", "n2"]


def test_parts_of_another_run_are_dropped_and_emitted_as_rejected() -> None:
    job = Job().start()
    foreign = part(job, 9, 0, born=1.0)
    holds(job, 0, foreign)
    (drop,) = job.sent(msg.DropSnapshots)
    assert drop.parts == (foreign,)
    assert [event.why for event in job.emitted(ev.SnapshotRejected)] == ["of another run of the job"]
    holds(job, 0, part(job, 9, 0, generation=7))
    assert job.sent(msg.DropSnapshots)


def test_snapshots_of_undone_steps_do_not_count_after_a_rollback() -> None:
    job = taken(Job().start(), 2, 4)
    holds(job, 2, part(job, 2, 2))
    begin = everybody_dies(job)
    assert begin.decision.applied == 2
    generation = begin.plan.generation
    holds(job, 2, part(job, 2, 2), part(job, 4, 2))
    (drop,) = job.sent(msg.DropSnapshots)
    assert drop.parts == (part(job, 4, 2),)
    assert not job.emitted(ev.SnapshotRejected), "the snapshot belongs to this run"
    job.deliver(msg.Entered(worker=w("n0", "b"), generation=generation, applied=2))
    job.deliver_from("n0", killed(w("n0", "b")))
    job.deliver(attach(w("n0", "c")))
    assert job.orders(msg.Begin)[w("n0", "c")].decision.applied == 2, "its own lineage began with step 2"


def test_a_later_coordinator_learns_the_snapshots_from_hello() -> None:
    job = taken(Job().start(), 3)
    parts = [part(job, 3, node) for node in range(3)]
    job.boot(takeover=True)
    for node in range(3):
        greeting = hello(f"n{node}", kept=(killed(w(f"n{node}")),))
        told = msg.NodeSnapshots(host="h", port=1, parts=(parts[node],))
        job.connect(msgspec.structs.replace(greeting, snapshots=told))
    job.deliver(attach(w("n0", "b")))
    assert job.orders(msg.Begin)[w("n0", "b")].decision.applied == 3


@pytest.mark.parametrize("policy", ["shrink", "restart-all"])
def test_the_restart_baseline_uses_checkpoints_only(policy: str) -> None:
    spec = JobSpec(recovery=RecoverySpec(on_node_failure=policy))  # pyright: ignore[reportArgumentType]
    job = taken(Job(nodes=2, spec=spec).start(), 3, nodes=2)
    assert job.machine.context.snapshots.find_newest(3) is not None
    for node in range(2):
        job.deliver_from(f"n{node}", killed(w(f"n{node}")))
    for node in range(2):
        job.deliver(attach(w(f"n{node}", "b")))
    kinds = {begin.decision.kind for begin in job.orders(msg.Begin).values()}
    assert kinds <= {DecisionKind.ROLLBACK if policy == "shrink" else DecisionKind.START}


def test_a_later_coordinator_waits_for_the_nodes_that_hold_the_decided_snapshot() -> None:
    job = taken(Job().start(), 3)
    parts = [part(job, 3, node) for node in range(3)]
    for node in range(3):
        job.deliver_from(f"n{node}", killed(w(f"n{node}")))
    decision = job.machine.record.decision
    assert job.machine.record.plan is None
    assert decision is not None
    assert decision.kind is DecisionKind.ROLLBACK
    job.boot(takeover=True)
    for node in range(3):
        told = msg.NodeSnapshots(host="h", port=1, parts=(parts[node],))
        job.connect(msgspec.structs.replace(hello(f"n{node}", kept=(attach(w(f"n{node}", "b")),)), snapshots=told))
        assert bool(job.orders(msg.Begin)) == (node == 2)
    assert job.orders(msg.Begin)[w("n0", "b")].decision.applied == 3


def test_a_later_coordinator_stops_waiting_for_the_nodes_of_a_snapshot() -> None:
    job = taken(Job().start(), 3)
    for node in range(3):
        job.deliver_from(f"n{node}", killed(w(f"n{node}")))
    job.boot(takeover=True)
    job.connect(hello("n0", kept=(attach(w("n0", "b")),)))
    assert not job.emitted(ev.JobFailed)
    for _ in range(40):
        job.deliver_from("n0", msg.Heartbeat())
        job.tick(0.1)
    assert any(isinstance(event, ev.JobFailed) for event in job.events)


def test_a_checkpoint_is_restored_if_too_many_parts_of_the_snapshot_are_lost() -> None:
    job = taken(Job().start(), 2, 4)
    job.deliver(kept("n0", 2, "two"))
    holds(job, 0, part(job, 4, 0), part(job, 4, 1))
    for node in ("n1", "n2"):
        job.lose(node)
    job.report("n0", None, msg.Phase.ENTERING)
    decision = job.orders(msg.Begin)[w("n0")].decision
    assert decision.source == msg.CheckpointSource(name=called(2, "two")), "the third part of step 4 is lost"
