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
    job.tell(f"n{node}", msg.NodeSnapshots(host=f"h{node}", port=node + 1, parts=parts))


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
        job.tell(f"n{node}", down)
    job.say(attach(w("n0", "b")))
    return job.orders(msg.Begin)[w("n0", "b")]


def test_where_all_workers_die_the_newest_snapshot_serves() -> None:
    job = taken(Job().start(), 2, 4)
    begin = everybody_dies(job)
    source = begin.decision.source
    assert (begin.decision.kind, begin.decision.applied) == (DecisionKind.ROLLBACK, 4)
    assert isinstance(source, msg.SnapshotSource)
    assert [source.keepers[place].node for (place,) in source.parts] == ["n0", "n1", "n2"]
    assert source.keepers[1] == msg.Keeper(node="n1", host="h1", port=2)
    assert source.part(2) == part(job, 4, 2)
    assert source.key == job.machine.context.snapshots.key
    (back,) = job.said(ev.RolledBack)
    assert back.to_step == 4
    assert "the snapshot of step 4 serves, in the memory of n0, n1, n2" in back.why


def test_one_that_lacks_a_part_or_whose_step_is_not_committed_does_not_serve() -> None:
    job = taken(Job().start(), 2)
    holds(job, 0, part(job, 2, 0), part(job, 3, 0))
    holds(job, 1, part(job, 2, 1), part(job, 3, 1))
    holds(job, 2, part(job, 2, 2), part(job, 3, 2))
    assert everybody_dies(job).decision.applied == 2
    job = taken(Job().start(), 4)
    holds(job, 2)
    for node in range(3):
        job.tell(f"n{node}", killed(w(f"n{node}")))
    (failed,) = job.said(ev.JobFailed)
    assert "4 committed steps are lost" in failed.why


def test_a_snapshot_is_told_once_it_is_whole_and_committed() -> None:
    job = Job(spec=JobSpec(recovery=RecoverySpec(fault_threshold=4))).start()
    job.step(1)
    for node in range(3):
        job.say(
            msg.SnapshotTaken(
                worker=w(f"n{node}"), snapshot=part(job, 2, node), bytes=10 + node, seconds=0.1 * node, stall_s=0.01
            )
        )
        holds(job, node, part(job, 2, node))
        assert not job.said(ev.SnapshotSaved)
    job.step(2)
    (saved,) = job.said(ev.SnapshotSaved)
    assert (saved.step, saved.saved_bytes, saved.save_s, saved.stall_s) == (2, 33, 0.2, 0.01)
    assert saved.fault_threshold == FaultThreshold(asked=4, given=3), (
        "the threshold is lowered to the available nodes, and reported"
    )
    holds(job, 0, part(job, 2, 0))
    assert not job.said(ev.SnapshotSaved)


def test_one_that_a_coordinator_has_found_whole_is_told_once_its_step_is_committed() -> None:
    """A simulation (19832909995) found this: the job rolled back to a snapshot that the journal did not know."""
    job = Job().start()
    job.step(1)
    for node in range(3):
        holds(job, node, part(job, 2, node))  # its cost was reported to the previous coordinator
    assert not job.said(ev.SnapshotSaved)
    job.step(2)
    (saved,) = job.said(ev.SnapshotSaved)
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
    assert [event.step for event in job.said(ev.SnapshotSaved)] == [4]
    holds(job, 2, part(job, 2, 2), part(job, 4, 2))
    assert not job.said(ev.SnapshotSaved), "the newer one can be used"
    holds(job, 0, part(job, 2, 0))
    assert [event.step for event in job.said(ev.SnapshotSaved)] == [2]


def test_a_thousand_nodes_are_not_looked_through_for_each_of_them() -> None:
    job = Job(nodes=100).start()
    job.step(1)
    for node in range(100):
        holds(job, node, part(job, 1, node, parts=100))
    assert not [event for event in job.events if isinstance(event, ev.SnapshotSaved)]
    job.tick(0.5)
    assert [event.step for event in job.said(ev.SnapshotSaved)] == [1]
    assert len(job.sent(msg.KeepSnapshots)) == 100


def test_no_room_is_told() -> None:
    job = Job().start()
    job.say(msg.SnapshotLeftOut(worker=w("n1"), generation=1, step=2, why="no room"))
    assert [(event.node, event.step, event.why) for event in job.said(ev.SnapshotFailed)] == [("n1", 2, "no room")]
    (asked,) = job.said(ev.ActionRequested)
    assert "no snapshot of step 2 is whole: node n1: no room" in asked.why
    job.say(msg.SnapshotLeftOut(worker=w("n2"), generation=1, step=2, why="no room"))
    assert not job.said(ev.SnapshotFailed), "one event is enough"


def test_each_part_is_to_lie_on_as_many_nodes_as_the_fault_threshold_says() -> None:
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


def test_a_lost_node_takes_its_parts_along_but_for_their_copies() -> None:
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


def test_what_cannot_be_read_is_passed_over_and_never_tried_again() -> None:
    job = taken(Job().start(), 2, 4)
    begin = everybody_dies(job)
    assert begin.decision.applied == 4
    damaged = msg.SnapshotDamaged(
        worker=w("n0", "b"), generation=begin.plan.generation, snapshot=part(job, 4, 1), node="n1", why="checksum"
    )
    job.say(damaged)
    assert [(event.step, event.node) for event in job.said(ev.SnapshotRejected)] == [(4, "n1")]
    _reports_anew(job)
    begin = job.orders(msg.Begin)[w("n0", "b")]
    assert begin.decision.applied == 2, "the older snapshot is next"
    worthless = msg.SnapshotDamaged(
        worker=w("n0", "b"), generation=begin.plan.generation, snapshot=part(job, 2, 0), node="", why="NaN"
    )
    job.say(worthless)
    _reports_anew(job)
    (failed,) = job.said(ev.JobFailed)
    assert "4 committed steps" not in failed.why or "live copy" in failed.why


def _reports_anew(job: Job) -> None:
    stop = job.machine.context.interruption.stop
    assert stop is not None
    job.say(
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
    job.say(
        msg.SnapshotDamaged(
            worker=w("n0", "b"), generation=begin.plan.generation, snapshot=part(job, 4, 1), node="n1", why="checksum"
        )
    )
    assert job.said(ev.SnapshotRejected)
    assert job.machine.context.interruption.stop is None, "n0 has another copy of it"


def test_who_has_tried_all_copies_that_were_named_is_told_of_one_that_has_come_since() -> None:
    job = taken(Job().start(), 4)
    begin = everybody_dies(job)
    holds(job, 2, part(job, 4, 2), part(job, 4, 1))
    damaged = msg.SnapshotDamaged(
        worker=w("n0", "b"), generation=begin.plan.generation, snapshot=part(job, 4, 1), node="n1", why="checksum"
    )
    job.say(damaged)
    _reports_anew(job)
    source = job.orders(msg.Begin)[w("n0", "b")].decision.source
    assert isinstance(source, msg.SnapshotSource)
    assert [source.keepers[place].node for (place,) in source.parts] == ["n0", "n2", "n2"]


def test_parts_of_another_run_are_dropped_and_said() -> None:
    job = Job().start()
    foreign = part(job, 9, 0, born=1.0)
    holds(job, 0, foreign)
    (drop,) = job.sent(msg.DropSnapshots)
    assert drop.parts == (foreign,)
    assert [event.why for event in job.said(ev.SnapshotRejected)] == ["of another run of the job"]
    holds(job, 0, part(job, 9, 0, generation=7))
    assert job.sent(msg.DropSnapshots)


def test_after_a_roll_back_what_was_undone_does_not_count_and_what_was_not_still_does() -> None:
    job = taken(Job().start(), 2, 4)
    holds(job, 2, part(job, 2, 2))
    begin = everybody_dies(job)
    assert begin.decision.applied == 2
    generation = begin.plan.generation
    holds(job, 2, part(job, 2, 2), part(job, 4, 2))
    (drop,) = job.sent(msg.DropSnapshots)
    assert drop.parts == (part(job, 4, 2),)
    assert not job.said(ev.SnapshotRejected), "the snapshot belongs to this run"
    job.say(msg.Entered(worker=w("n0", "b"), generation=generation, applied=2))
    job.tell("n0", killed(w("n0", "b")))
    job.say(attach(w("n0", "c")))
    assert job.orders(msg.Begin)[w("n0", "c")].decision.applied == 2, "its own lineage began with step 2"


def test_a_coordinator_that_comes_later_knows_it_from_hello() -> None:
    job = taken(Job().start(), 3)
    parts = [part(job, 3, node) for node in range(3)]
    job.boot(takeover=True)
    for node in range(3):
        greeting = hello(f"n{node}", kept=(killed(w(f"n{node}")),))
        told = msg.NodeSnapshots(host="h", port=1, parts=(parts[node],))
        job.connect(msgspec.structs.replace(greeting, snapshots=told))
    job.say(attach(w("n0", "b")))
    assert job.orders(msg.Begin)[w("n0", "b")].decision.applied == 3


@pytest.mark.parametrize("policy", ["shrink", "restart-all"])
def test_the_baseline_that_restarts_all_goes_back_to_checkpoints_alone(policy: str) -> None:
    spec = JobSpec(recovery=RecoverySpec(on_node_failure=policy))  # pyright: ignore[reportArgumentType]
    job = taken(Job(nodes=2, spec=spec).start(), 3, nodes=2)
    assert job.machine.context.snapshots.find_newest(3) is not None
    for node in range(2):
        job.tell(f"n{node}", killed(w(f"n{node}")))
    for node in range(2):
        job.say(attach(w(f"n{node}", "b")))
    kinds = {begin.decision.kind for begin in job.orders(msg.Begin).values()}
    assert kinds <= {DecisionKind.ROLLBACK if policy == "shrink" else DecisionKind.START}


def test_a_coordinator_that_comes_later_waits_for_those_that_hold_what_it_goes_back_to() -> None:
    job = taken(Job().start(), 3)
    parts = [part(job, 3, node) for node in range(3)]
    for node in range(3):
        job.tell(f"n{node}", killed(w(f"n{node}")))
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


def test_it_does_not_wait_for_ever() -> None:
    job = taken(Job().start(), 3)
    for node in range(3):
        job.tell(f"n{node}", killed(w(f"n{node}")))
    job.boot(takeover=True)
    job.connect(hello("n0", kept=(attach(w("n0", "b")),)))
    assert not job.said(ev.JobFailed)
    for _ in range(40):
        job.tell("n0", msg.Heartbeat())
        job.tick(0.1)
    assert any(isinstance(event, ev.JobFailed) for event in job.events)


def test_where_too_many_nodes_are_lost_the_newest_checkpoint_is_named() -> None:
    job = taken(Job().start(), 2, 4)
    job.say(kept("n0", 2, "two"))
    holds(job, 0, part(job, 4, 0), part(job, 4, 1))
    for node in ("n1", "n2"):
        job.lose(node)
    job.report("n0", None, msg.Phase.ENTERING)
    decision = job.orders(msg.Begin)[w("n0")].decision
    assert decision.source == msg.CheckpointSource(name=called(2, "two")), "the third part of step 4 is lost"
