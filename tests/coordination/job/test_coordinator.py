"""Tests of the coordinator's state machine: inputs and the resulting instructions."""

from __future__ import annotations

import math
from functools import reduce
from typing import get_args

import msgspec
import pytest
from machinery import Job, applied, attach, called, commit, hello, kept, reduced, w, written

from holdfast.coordination.inputs import InjectFault, Input, Received, Shutdown, StoreBack
from holdfast.coordination.instructions import EndJob
from holdfast.coordination.job.context import JobPhase
from holdfast.coordination.job.coordinator import Coordinator
from holdfast.coordination.job.handlers import MessageHandlers
from holdfast.errors import EXIT_BAD_INPUT, EXIT_FAILED, BadInputError, UnreachableError
from holdfast.protocol import events as ev
from holdfast.protocol.failures import FailureKind
from holdfast.protocol.job_spec import ExperimentSpec, JobSpec
from holdfast.protocol.messages import any_side as msg
from holdfast.protocol.messages.agent import HeardGeneration
from holdfast.protocol.plan import DecisionKind, Phase
from holdfast.protocol.position import Position
from holdfast.protocol.record import KnownCheckpoint


def test_the_job_starts_when_all_nodes_have_joined() -> None:
    job = Job(nodes=2).boot()
    assert job.kinds == ["persist", "JobStarted"]
    job.connect(hello("n0"))
    job.deliver(attach(w("n0")))
    assert job.kinds == ["persist", "NodesJoined"]
    job.connect(hello("n1"))
    job.deliver(attach(w("n1")))
    assert job.kinds == ["persist", "NodesJoined", "GenerationStarted", "BeginNode", "BeginNode"]
    begin = job.orders(msg.Begin)[w("n1")]
    assert begin.decision == msg.Decision(kind=DecisionKind.START, applied=0)
    assert begin.plan.workers == (w("n0"), w("n1"))
    assert begin.plan.sources == {w("n1"): msg.LiveSource(members=(w("n0"),))}


def test_a_step_is_committed_once_all_members_have_applied_it() -> None:
    job = Job().start()
    job.step(1, "n0", "n1")
    assert not job.emitted(ev.StepCommitted)
    job.step(1, "n2")
    (event,) = job.emitted(ev.StepCommitted)
    assert (event.step, event.samples, event.loss) == (1, 24, 1.0)
    job.step(1, "n2")
    assert not job.last


def test_committed_steps_are_sent_to_agents_every_few_heartbeats() -> None:
    job = Job().start()
    job.step(1)
    job.tick(0.1)
    assert job.sent(msg.Committed) == [msg.Committed(term=1, step=1)] * 3
    job.step(2)
    job.tick(0.1)
    assert not job.sent(msg.Committed)
    job.step(3)
    job.tick(1.8)
    assert not job.sent(msg.Committed)
    job.tick(0.15)
    assert job.sent(msg.Committed) == [msg.Committed(term=1, step=3)] * 3
    job.tick(0.5)
    assert not job.sent(msg.Committed)


def test_after_a_node_loss_the_others_stop_and_redo_the_unreduced_step() -> None:
    job = Job().start()
    job.step(1)
    job.lose("n2")
    assert job.kinds == ["FailureDetected", "NodeLeft", "Stop", "Stop"]
    job.report("n0", 1, Phase.REDUCING, summed=(0, 3))
    assert job.kinds == []
    job.report("n1", 1, Phase.COMPUTE, summed=(1, 4))
    assert job.kinds == ["persist", "GenerationStarted", "BeginNode", "BeginNode"]
    begin = job.orders(msg.Begin)[w("n0")]
    assert begin.decision == msg.Decision(kind=DecisionKind.REDO, applied=1)
    assert begin.assignment == ((0, 3, 2), (1, 4, 5))
    assert (begin.plan.generation, begin.plan.sources) == (2, {})


def test_a_step_passed_by_one_worker_is_decided_forward_with_its_result() -> None:
    job = Job().start()
    job.lose("n2")
    job.report("n0", 0, Phase.ABANDONED, **reduced(2.0))
    job.report("n1", 0, Phase.PASSED, **reduced(2.0), passed=msg.PassedStep(step=1, commit=commit(2.0, msg.Flag.SWAP)))
    assert job.orders(msg.Begin)[w("n0")].decision == msg.Decision(
        kind=DecisionKind.FORWARD, applied=1, commit=commit(2.0, msg.Flag.SWAP)
    )


def test_a_ready_worker_finishes_the_step_and_sends_its_state() -> None:
    job = Job().start()
    job.lose("n2")
    job.report("n0", 0, Phase.REDUCING, summed=(0, 3))
    job.report("n1", 0, Phase.READY, **reduced(2.0), summed=(1, 4))
    begin = job.orders(msg.Begin)[w("n0")]
    assert begin.decision == msg.Decision(kind=DecisionKind.FORWARD, applied=1, commit=commit(2.0))
    assert begin.plan.sources == {w("n0"): msg.LiveSource(members=(w("n1"),))}
    job.lose("n1")
    job.report("n0", 0, Phase.ENTERING, summed=(0, 3))
    begin = job.orders(msg.Begin)[w("n0")]
    assert begin.decision == msg.Decision(kind=DecisionKind.REDO, applied=0), "it keeps its state and repeats the step"
    assert sorted(begin.assignment[0]) == list(range(6))


def test_flags_of_a_step_passed_only_by_lost_workers_are_ignored() -> None:
    job = joining()
    prepare_all(job)
    job.deliver(applied(w("n0"), 1, 1, commit(1.0, msg.Flag.SWAP)))
    job.lose("n0")
    job.report("n1", 0, Phase.ABANDONED, **reduced(1.0))
    job.report("n2", 0, Phase.ABANDONED, **reduced(1.0))
    job.report("n3", None)
    begin = job.orders(msg.Begin)[w("n1")]
    assert begin.decision == msg.Decision(kind=DecisionKind.FORWARD, applied=1, commit=commit(1.0))
    generation = begin.plan.generation
    for node in ("n1", "n2"):
        job.deliver(applied(w(node), generation, 1, commit(1.0)))
    for node in ("n1", "n2", "n3"):
        job.deliver(msg.Entered(worker=w(node), generation=generation, applied=1))
    assert [event.step for event in job.events if isinstance(event, ev.StepCommitted)] == [1]


def test_a_forward_decision_is_inherited_by_the_next_generation() -> None:
    job = Job().start()
    job.lose("n2")
    job.report("n0", 0, Phase.ABANDONED, **reduced(2.0))
    job.report("n1", 0, Phase.PASSED, **reduced(2.0), passed=msg.PassedStep(step=1, commit=commit(2.0, msg.Flag.SWAP)))
    job.lose("n1")
    job.report("n0", 0, Phase.ENTERING, **reduced(2.0))
    assert job.orders(msg.Begin)[w("n0")].decision.kind is DecisionKind.FORWARD


def test_a_step_applied_only_by_an_expelled_node_is_not_committed() -> None:
    job = Job().start()
    job.deliver(applied(w("n2"), 1, 1, commit(9.0)))
    job.lose("n2")
    job.report("n0", 0, Phase.COMPUTE)
    job.report("n1", 0, Phase.COMPUTE)
    for node in ("n0", "n1"):
        job.deliver(msg.Entered(worker=w(node), generation=2, applied=0))
    job.step(1, "n0", "n1", generation=2)
    assert [event.loss for event in job.emitted(ev.StepCommitted)] == [1.0]


def test_the_job_fails_if_no_copy_of_the_state_is_left() -> None:
    job = Job(nodes=1).start()
    job.step(1)
    job.lose("n0")
    assert job.kinds == ["persist", "FailureDetected", "NodeLeft", "JobFailed", "ActionRequested", "end"]
    assert "1 committed steps are lost" in job.emitted(ev.JobFailed)[0].why


def test_a_job_that_loses_all_nodes_before_its_first_step_starts_again() -> None:
    job = Job(nodes=1).start()
    job.lose("n0")
    assert not job.emitted(ev.JobFailed)
    job.connect(hello("n1"))
    job.deliver(attach(w("n1")))
    assert job.orders(msg.Begin)[w("n1")].decision.kind is DecisionKind.START


def test_a_partial_initial_state_starts_no_generation() -> None:
    job = Job(nodes=2).boot()
    for node in ("n0", "n1"):
        job.connect(hello(node))
        job.deliver(attach(w(node)))
    job.lose("n0")
    job.report("n1", None, Phase.ENTERING, fresh=False)
    assert job.sent(msg.Refused)[0].retry
    assert not job.orders(msg.Begin)
    assert job.machine.record.plan is None


def test_a_job_without_a_live_copy_rolls_back_to_the_newest_checkpoint() -> None:
    job = Job(nodes=1).start()
    job.step(1)
    job.deliver(written("n0", 1, "one"))
    (order,) = job.orders(msg.AcceptCheckpoint).values()
    assert (order.step, order.name, [file.name for file in order.files]) == (1, called(1, "one"), ["part-0"])
    job.deliver(kept("n0", 1, "one"))
    assert job.kinds == ["persist", "CheckpointSaved", "AcceptCheckpoint"]
    job.step(2)
    job.lose("n0")
    job.connect(hello("n1"))
    job.deliver(attach(w("n1")))
    assert job.emitted(ev.RolledBack)[0].to_step == 1
    begin = job.orders(msg.Begin)[w("n1")]
    assert begin.decision == msg.Decision(
        kind=DecisionKind.ROLLBACK, applied=1, source=msg.CheckpointSource(name=called(1, "one"))
    )
    assert begin.plan.sources == {}


def test_a_damaged_checkpoint_is_rejected_and_the_previous_one_is_used() -> None:
    job = Job(nodes=1).start()
    for step, name in ((1, "one"), (2, "two")):
        job.step(step)
        job.deliver(kept("n0", step, name))
    job.lose("n0")
    job.connect(hello("n1"))
    job.deliver(attach(w("n1")))
    job.deliver(msg.CheckpointDamaged(worker=w("n1"), generation=2, name=called(2, "two"), why="short"))
    assert job.emitted(ev.CheckpointRejected)[0].name == called(2, "two")
    job.report("n1", None, Phase.ENTERING)
    assert job.orders(msg.Begin)[w("n1")].decision.source == msg.CheckpointSource(name=called(1, "one"))


def test_a_checkpoint_is_accepted_only_after_its_step_is_committed() -> None:
    job = Job().start()
    job.deliver(written("n0", 1, "one"))
    assert not job.orders(msg.AcceptCheckpoint)
    job.step(1)
    assert list(job.orders(msg.AcceptCheckpoint)) == [w("n0")]


def joining() -> Job:
    job = Job().start()
    job.connect(hello("n3"))
    job.deliver(attach(w("n3")))
    assert job.kinds == ["persist", "NodesJoined", *["PrepareNode"] * 4]
    return job


def prepare_all(job: Job) -> None:
    for node in ("n0", "n1", "n2", "n3"):
        job.deliver(msg.Prepared(worker=w(node), generation=2))


def test_a_joining_worker_is_prepared_armed_and_swapped_in() -> None:
    job = joining()
    prepare_all(job)
    assert job.kinds == ["Arm"] * 4
    job.deliver(applied(w("n0"), 1, 1, commit(1.0, msg.Flag.SWAP)))
    assert job.kinds == ["persist", "GenerationStarted"]
    assert job.emitted(ev.GenerationStarted)[0].reason == "join"
    assert job.machine.record.plan is not None
    assert job.machine.record.plan.workers == (w("n0"), w("n1"), w("n2"), w("n3"))
    assert job.machine.record.pending is None


def test_a_member_with_a_failed_vote_goes_forward_if_the_others_swapped() -> None:
    job = joining()
    prepare_all(job)
    job.deliver(applied(w("n0"), 1, 1, commit(1.0, msg.Flag.SWAP)))
    job.deliver(msg.Complaint(worker=w("n2"), generation=1, detail="vote"))
    assert job.kinds == ["Stop"] * 4
    job.report("n0", 1, passed=msg.PassedStep(step=1, commit=commit(1.0, msg.Flag.SWAP)))
    job.report("n1", 1, passed=msg.PassedStep(step=1, commit=commit(1.0, msg.Flag.SWAP)))
    job.report("n2", 0, Phase.ABANDONED, **reduced(1.0))
    job.report("n3", None)
    assert job.orders(msg.Begin)[w("n2")].decision.kind is DecisionKind.FORWARD


def test_the_pending_plan_is_voided_if_a_joiner_is_lost_before_arming() -> None:
    job = joining()
    job.lose("n3")
    assert job.kinds == ["persist", "FailureDetected", "NodeLeft", "Void", "Void", "Void"]
    assert job.machine.record.pending is None


def test_members_disarm_without_a_stop_if_a_joiner_is_lost_after_arming() -> None:
    job = joining()
    prepare_all(job)
    job.lose("n3")
    assert job.kinds == ["FailureDetected", "NodeLeft", "Disarm", "Disarm", "Disarm"]
    job.deliver(msg.Disarmed(worker=w("n1"), term=1, generation=2))
    assert job.kinds == ["persist", "Void", "Void", "Void"]
    job.step(1)
    assert [event.step for event in job.emitted(ev.StepCommitted)] == [1]
    assert len([event for event in job.events if isinstance(event, ev.GenerationStarted)]) == 1


def test_a_group_that_is_not_built_in_time_is_voided() -> None:
    job = joining()
    for _ in range(31):
        for node in ("n0", "n1", "n2", "n3"):
            job.deliver_from(node, msg.Heartbeat())
        job.tick(1.0)
    assert job.machine.record.pending is None or job.machine.record.pending.generation > 2


def test_a_node_that_is_silent_for_longer_than_its_lease_is_expelled() -> None:
    job = Job().start()
    for _ in range(4):
        for node in ("n0", "n1"):
            job.deliver_from(node, msg.Heartbeat())
        job.tick(1.0)
    (failure,) = [event for event in job.events if isinstance(event, ev.FailureDetected)]
    assert (failure.node, failure.kind) == ("n2", "lease_expired")
    assert failure.after_s == pytest.approx(4.0)


def test_a_paused_coordinator_renews_all_leases() -> None:
    job = Job().start()
    job.tick(1.0)
    job.tick(60.0)
    assert job.kinds == ["persist"]
    job.tick(1.0)
    assert not job.emitted(ev.FailureDetected)


def test_a_pause_of_the_coordinator_does_not_block_a_returning_node() -> None:
    """Found by simulation 746000442: a node returned while its old lease ran, and the pause renewed that lease."""
    job = Job(nodes=1).start()
    job.connect(hello("n0", session="abcdef01", term=1))
    assert [refused.retry for refused in job.sent(msg.Refused)] == [True]
    job.tick(4.0)
    job.connect(hello("n0", session="abcdef02", term=1))
    assert [refused.retry for refused in job.sent(msg.Refused)] == [True]


def test_a_node_that_reconnects_before_the_decision_must_report_too() -> None:
    job = Job().start()
    job.lose("n2")
    job.connect(hello("n2", (attach(w("n2")), msg.Begun(worker=w("n2"), generation=1)), term=1))
    assert job.kinds == ["NodeRepaired", "Welcome", "Stop"]
    job.report("n0", 0)
    job.report("n1", 0)
    assert not job.orders(msg.Begin)
    job.report("n2", 0)
    assert set(job.orders(msg.Begin)) == {w("n0"), w("n1"), w("n2")}


def test_an_expelled_node_can_reconnect_only_with_fresh_workers() -> None:
    job = Job().start()
    job.lose("n2")
    job.report("n0", 0)
    job.report("n1", 0)
    job.connect(hello("n2", (attach(w("n2")), msg.Begun(worker=w("n2"), generation=1)), term=1))
    assert job.sent(msg.Refused)[0].retry
    before = job.machine.record
    job.deliver(applied(w("n2"), 1, 1))
    assert (job.last, job.machine.record) == ([], before)
    job.connect(hello("n2", session="abcdef01", term=1))
    assert job.kinds == ["Welcome"]


def test_a_half_open_connection_is_replaced_when_its_node_reconnects() -> None:
    job = Job().start()
    job.connect(hello("n2", (attach(w("n2")), msg.Entered(worker=w("n2"), generation=1, applied=0)), term=1))
    assert "FailureDetected" in job.kinds
    assert not any(refused.exit_code == 2 for refused in job.sent(msg.Refused))


def namesake(job: Job) -> msg.Refused:
    """Connect another node as n2 while the connection of n2 stays open."""
    connection = job.connections["n2"]
    job.connect(hello("n2", session="abcdef01"))
    job.connections["n2"] = connection
    (refused,) = job.sent(msg.Refused)
    return refused


def test_a_second_node_with_the_same_name_is_refused_while_the_first_is_alive() -> None:
    job = Job().start()
    assert namesake(job).retry
    for _ in range(7):
        for node in ("n0", "n1", "n2"):
            job.feed(Received(job.connections[node], msg.Heartbeat()), after=0.3)
        assert "n2" in job.machine.members.nodes
        refused = namesake(job)
    assert (refused.exit_code, refused.retry) == (2, False)


def test_a_node_that_reconnects_during_its_old_lease_is_refused_with_retry() -> None:
    job = Job().start()
    for _ in range(10):
        for node in ("n0", "n1"):
            job.feed(Received(job.connections[node], msg.Heartbeat()), after=0.1)
        assert namesake(job).retry
        job.tick(0.1)
    assert "n2" not in job.machine.members.nodes or namesake(job).retry
    for _ in range(4):
        for node in ("n0", "n1"):
            job.feed(Received(job.connections[node], msg.Heartbeat()), after=0.1)
        job.tick(0.1)
    job.connect(hello("n2", session="abcdef01"))
    assert job.sent(msg.Welcome)


def test_a_worker_with_another_config_ends_its_node_with_exit_code_2() -> None:
    job = Job().start()
    job.connect(hello("n3"))
    job.deliver(attach(w("n3"), model="large"))
    (end,) = job.sent(msg.EndNode)
    assert (end.exit_code, end.alone) == (2, True)
    assert end.why == "node n3 does not fit the job: model is large, the job's is small"


def test_a_job_that_waits_for_a_refused_node_reports_it_once() -> None:
    job = Job(nodes=2).boot()
    for node, model in (("n0", "small"), ("n1", "large")):
        job.connect(hello(node))
        job.deliver(attach(w(node), model=model))
    job.tick(0.1)
    (waiting,) = job.emitted(ev.JobWaiting)
    assert (waiting.nodes, waiting.why) == (1, "node n1 does not fit the job: model is large, the job's is small")
    job.tick(0.1)
    assert not job.emitted(ev.JobWaiting)


def test_an_agent_with_a_newer_term_of_another_job_is_disconnected() -> None:
    job = Job().start()
    job.connect(msgspec.structs.replace(hello("n3", term=5), heard=HeardGeneration(identity="another")))
    assert job.kinds == ["close"]


def test_the_job_finishes_when_all_members_have_and_late_workers_are_informed() -> None:
    job = Job(nodes=2).start()
    job.step(1)
    job.connect(hello("n2"))
    job.deliver(msg.Finished(worker=w("n0"), generation=1, step=1))
    assert job.kinds == []
    job.deliver(msg.Finished(worker=w("n1"), generation=1, step=1))
    assert job.kinds == ["persist", "JobFinished", "JobDone", "JobDone", "EndNode", "end"]
    job.deliver(attach(w("n2")))
    assert job.kinds == ["JobDone"]


def test_a_new_coordinator_ends_a_finished_job() -> None:
    job = Job(nodes=1).start()
    job.step(1)
    job.deliver(msg.Finished(worker=w("n0"), generation=1, step=1))
    job.boot(takeover=True)
    assert job.kinds == ["persist", "CoordinatorRestarted", "end"]
    job.connect(hello("n0", (attach(w("n0")), msg.Entered(worker=w("n0"), generation=1, applied=0)), term=1))
    assert job.kinds == ["Welcome", "JobDone"]
    assert sum(isinstance(event, ev.JobFinished) for event in job.events) == 1


def test_a_finished_job_stays_finished_if_a_coordinator_starts_on_its_store() -> None:
    job = Job(nodes=1).start()
    job.step(1)
    job.deliver(msg.Finished(worker=w("n0"), generation=1, step=1))
    job.boot()
    assert job.machine.state == "finished"
    assert job.kinds == ["persist", "CoordinatorRestarted", "end"]


def test_a_new_run_on_the_store_of_a_failed_job_starts_again() -> None:
    job = Job(nodes=1).start()
    job.step(1)
    job.lose("n0")
    assert job.machine.state == "failed"
    job.boot()
    assert job.machine.state == "waiting"


def test_a_restart_emits_and_counts_events_missing_from_the_journal() -> None:
    job = Job().start()
    job.step(1)
    job.connect(hello("n3"))
    job.deliver(attach(w("n3")))
    prepare_all(job)
    job.step(2, "n0", "n1")
    # One call commits step 2 and writes a record; the crash comes before the journal has any of it.
    job.events.clear()
    job.deliver(applied(w("n2"), 1, 2, commit(1.0, msg.Flag.SWAP)))
    record = job.records[-1]
    known = record.outbox[0].seq - 1
    job.boot(Position(seq=known, step=1, samples=24))
    assert "CoordinatorRestarted" in job.kinds
    said = [event.seq for event in job.last_events()]
    assert said == list(range(known + 1, known + 1 + len(said)))
    assert job.machine.context.ledger.committed == 1 + sum(
        isinstance(event, ev.StepCommitted) for event in record.outbox
    )


def test_a_restart_after_an_unjournaled_rollback_counts_from_its_step() -> None:
    job = Job(nodes=1).start()
    job.step(1)
    job.deliver(kept("n0", 1, "one"))
    job.step(2)
    job.lose("n0")
    job.connect(hello("n1"))
    job.deliver(attach(w("n1")))
    known = job.records[-1].outbox[0].seq - 1
    job.boot(Position(seq=known, step=2, samples=48, step_samples=24))
    assert job.machine.context.ledger.committed == 1
    assert job.machine.context.progress.samples == 24


def test_a_restart_does_not_change_the_sample_count() -> None:
    job = Job(nodes=1).start()
    job.step(1)
    job.deliver(kept("n0", 1, "one"))
    job.step(2)
    job.step(3)
    job.lose("n0")
    job.connect(hello("n1"))
    job.deliver(attach(w("n1")))
    assert job.emitted(ev.RolledBack)
    assert (job.machine.context.ledger.committed, job.machine.context.progress.samples) == (1, 24)
    job.boot()
    assert (job.machine.context.ledger.committed, job.machine.context.progress.samples) == (1, 24)


def test_a_resumed_job_continues_after_a_restart_before_its_first_step() -> None:
    job = Job(nodes=1)
    job.boot()
    job.machine.transaction.change(checkpoints=(KnownCheckpoint(step=20, name="twenty"),))
    job.connect(hello("n0"))
    job.deliver(attach(w("n0")))
    job.boot()
    kept = (attach(w("n0")), msg.Entered(worker=w("n0"), generation=1, applied=20), applied(w("n0"), 1, 21, world=1))
    job.connect(hello("n0", kept, term=1))
    assert [event.step for event in job.emitted(ev.StepCommitted)] == [21]
    assert job.machine.context.progress.samples == 24


def test_agents_are_sent_only_commits_that_the_record_contains() -> None:
    job = Job().start()
    job.step(1)
    assert job.records[-1].position.step == 0
    job.connect(hello("n3"))
    assert [welcome.committed for welcome in job.sent(msg.Welcome)] == [0]
    job.tick(0.6)
    assert job.kinds == ["persist", "Committed", "Committed", "Committed", "Committed"]
    assert (job.records[-1].position.step, job.records[-1].position.samples) == (1, 24)
    job.connect(hello("n4"))
    assert [welcome.committed for welcome in job.sent(msg.Welcome)] == [1]


@pytest.mark.parametrize("left", [0, 3, 5])
def test_a_truncated_journal_is_repaired_from_the_record(left: int) -> None:
    job = Job().start()
    for step in (1, 2, 3):
        job.step(step)
    job.tick(0.6)
    job.step(4)
    told = job.records[-1].position
    before, job.events[left:] = len(job.events), []
    end = reduce(Position.after, job.events, Position())
    job.boot()
    repaired, restarted = job.last_events()
    assert isinstance(repaired, ev.JournalRepaired)
    assert (repaired.from_seq, repaired.to_seq, repaired.seq) == (left + 1, told.seq, told.seq)
    assert (repaired.from_step, repaired.to_step, repaired.samples) == (end.step, 3, 72)
    assert isinstance(restarted, ev.CoordinatorRestarted)
    assert restarted.seq == told.seq + 1 == before
    # Step 4 had not been reported: the agents send it again.
    for node in ("n0", "n1", "n2"):
        kept = (attach(w(node)), msg.Entered(worker=w(node), generation=1, applied=0), applied(w(node), 1, 4))
        job.connect(hello(node, kept, term=1))
    assert [event.step for event in job.emitted(ev.StepCommitted)] == [4]
    assert job.machine.context.progress.samples == 96


def test_a_restarted_coordinator_waits_for_the_members_and_continues() -> None:
    job = Job().start()
    job.step(1)
    job.boot(Position(seq=len(job.events), step=1))
    for node in ("n0", "n1", "n2"):
        kept = (attach(w(node)), msg.Entered(worker=w(node), generation=1, applied=0), applied(w(node), 1, 2))
        job.connect(hello(node, kept, term=1))
        assert "Stop" not in job.kinds
    assert [event.step for event in job.emitted(ev.StepCommitted)] == [2]


def test_a_member_that_does_not_reconnect_after_a_restart_is_expelled() -> None:
    job = Job().start()
    job.boot()
    for node in ("n0", "n1"):
        job.connect(hello(node, (attach(w(node)), msg.Entered(worker=w(node), generation=1, applied=0)), term=1))
    for _ in range(4):
        for node in ("n0", "n1"):
            job.deliver_from(node, msg.Heartbeat())
        job.tick(1.0)
    assert [event.node for event in job.events if isinstance(event, ev.NodeLeft)] == ["n2"]
    assert job.machine.state == "recovering"


def test_leases_after_a_restart_start_with_the_first_reconnection() -> None:
    """The coordinator may listen at an address that no agent knows; the job once failed then and lost its steps."""
    job = Job().start()
    job.boot()
    for _ in range(50):
        job.tick(1.0)
    assert job.machine.over is None
    assert not [event for event in job.events if isinstance(event, ev.FailureDetected)]
    (waits,) = [event for event in job.events if isinstance(event, ev.JobWaiting)]
    assert waits.nodes == 3
    assert waits.why.endswith("the coordinator must listen at the address that the agents were given")
    job.connect(hello("n0", (attach(w("n0")), msg.Entered(worker=w("n0"), generation=1, applied=0)), term=1))
    for second in range(5):
        job.deliver_from("n0", msg.Heartbeat())
        job.tick(1.0)
        lost = [event.node for event in job.events if isinstance(event, ev.NodeLeft)]
        assert lost == ([] if second < 2 else lost)
    assert sorted(lost) == ["n1", "n2"]


def test_no_member_is_expelled_while_others_still_reconnect_after_a_restart() -> None:
    """A thousand nodes reconnect to one coordinator at once, so a missing node may still be in the queue."""
    job = Job(nodes=6).start()
    job.boot()
    here: list[str] = []
    for node in ("n0", "n1", "n2", "n3", "n4"):
        job.connect(hello(node, (attach(w(node)), msg.Entered(worker=w(node), generation=1, applied=0)), term=1))
        here.append(node)
        for _ in range(2):
            for known in here:
                job.deliver_from(known, msg.Heartbeat())
            job.tick(1.0)
            assert not [event for event in job.events if isinstance(event, ev.FailureDetected)]
    for _ in range(2):
        for known in here:
            job.deliver_from(known, msg.Heartbeat())
        job.tick(1.0)
    (failure,) = [event for event in job.events if isinstance(event, ev.FailureDetected)]
    assert (failure.node, failure.kind) == ("n5", "lease_expired")


def test_steps_without_a_live_witness_are_committed_without_their_loss() -> None:
    job = Job(nodes=2).start()
    job.boot(Position(seq=len(job.events)))
    kept = (attach(w("n0")), msg.Entered(worker=w("n0"), generation=1, applied=2), applied(w("n0"), 1, 3, world=2))
    job.connect(hello("n0", kept, term=1))
    for _ in range(4):
        job.deliver_from("n0", msg.Heartbeat())
        job.tick(1.0)
    job.report("n0", 3, passed=msg.PassedStep(step=3, commit=commit()))
    job.deliver(msg.Entered(worker=w("n0"), generation=2, applied=3))
    steps = [event for event in job.events if isinstance(event, ev.StepCommitted)]
    assert [step.step for step in steps] == [1, 2, 3]
    assert [math.isnan(step.loss) for step in steps] == [True, True, False]
    assert {step.samples for step in steps} == {24}


def test_a_node_with_a_worker_that_does_not_report_is_removed() -> None:
    job = Job().start()
    job.lose("n2")
    job.report("n0", 0)
    for _ in range(6):
        for node in ("n0", "n1"):
            job.deliver_from(node, msg.Heartbeat())
        job.tick(1.0)
    hangs = [e for e in job.events if isinstance(e, ev.FailureDetected) and e.kind == "hang"]
    assert [event.node for event in hangs] == ["n1"]
    assert job.machine.state == "running"


def test_a_worker_process_that_dies_leaves_its_node_in_the_job() -> None:
    job = Job().start()
    connection = job.connections["n2"]
    down = msg.WorkerDown(worker=w("n2"), kind=FailureKind.PROCESS_EXIT, detail="SIGKILL", exit_code=-9)
    job.feed(Received(connection, down))
    assert job.kinds == ["FailureDetected", "Stop", "Stop"]
    job.report("n0", 0)
    job.report("n1", 0)
    job.deliver(attach(w("n2", "b"), pid=8))
    assert job.kinds == ["WorkersChanged"]
    assert job.emitted(ev.WorkersChanged)[0].worker_pids == (8,)


def test_faults_are_refused_unless_the_job_allows_them() -> None:
    job = Job().start()
    with pytest.raises(BadInputError, match="--allow-faults"):
        job.feed(InjectFault("kill", "n0"))


@pytest.mark.parametrize(
    ("wanted", "error", "why"),
    [
        (
            InjectFault("melt", "n0"),
            BadInputError,
            "the fault is 'melt': it must be one of kill, exit, freeze, ",
        ),
        (InjectFault("kill", "n7"), UnreachableError, "there is no node 'n7': the nodes are n0, n1, n2"),
        (InjectFault("kill", "n0", worker=3), UnreachableError, "node n0 has no worker 3: it has 1"),
        (InjectFault("kill", "n0", phase="lunch"), BadInputError, "--phase is 'lunch': it must be one of compute, "),
        (InjectFault("hold", "n0"), BadInputError, "hold needs --phase: "),
        (InjectFault("slow", "n0", times=0.5), BadInputError, "--times is 0.5: it must be 1 or more"),
        (InjectFault("slow-link", "n0", times=1.0), BadInputError, "--times is 1: it must be more than 1 and at most"),
        (InjectFault("slow", "n0", times=float("nan")), BadInputError, "--times is nan: "),
    ],
    ids=["fault", "node", "worker", "phase", "hold", "faster", "not slower", "not a number"],
)
def test_invalid_faults_are_refused(wanted: InjectFault, error: type[Exception], why: str) -> None:
    job = Job(spec=JobSpec(experiments=ExperimentSpec(allow_faults=True))).start()
    with pytest.raises(error, match=why):
        job.feed(wanted)


def test_ctrl_c_ends_every_node() -> None:
    job = Job().start()
    job.feed(Shutdown(130, "Ctrl-C"))
    assert job.kinds == ["JobFinished", "EndNode", "EndNode", "EndNode", "end"]


def test_a_passed_step_of_a_decision_survives_a_coordinator_failure() -> None:
    job = Job(nodes=3).start()
    job.step(1)
    job.lose("n0")
    job.report("n1", 1, Phase.PASSED, **reduced(2.0), passed=msg.PassedStep(step=2, commit=commit(2.0)))
    job.report("n2", 1, Phase.ABANDONED, **reduced(2.0))
    assert [known.step for known in job.machine.record.passed] == [2]
    generation = job.machine.transaction.generation
    after = Job(nodes=1, records=job.records, events=job.events, now=job.now + 1)
    after.boot(takeover=True)
    for node in ("n1", "n2"):  # neither reports the result of step 2
        said = (attach(w(node)), msg.Begun(worker=w(node), generation=generation))
        after.connect(hello(node, (*said, msg.Entered(worker=w(node), generation=generation, applied=2)), term=1))
    for step in (3, 4):
        after.step(step, "n1", "n2", generation=generation)
    steps = [(event.step, event.loss) for event in after.events if isinstance(event, ev.StepCommitted)]
    assert steps == [(1, 1.0), (2, 2.0), (3, 1.0), (4, 1.0)]


def test_every_input_has_a_handler_for_every_job_phase() -> None:
    def kinds(union: object) -> set[type]:
        return set(get_args(union))

    assert set(Coordinator._INPUT_HANDLERS) == kinds(Input) - {Received}
    assert set(Coordinator._AGENT_HANDLERS) == kinds(msg.AgentMessage) - {msg.Hello}
    assert set(MessageHandlers._WORKER_HANDLERS) == kinds(msg.WorkerMessage)
    for table in (Coordinator._INPUT_HANDLERS, Coordinator._AGENT_HANDLERS, MessageHandlers._WORKER_HANDLERS):
        assert all(set(row) == set(JobPhase) for row in table.values())


def join(job: Job, *nodes: str) -> msg.GenerationPlan:
    """Connect nodes; return the pending plan."""
    for node in nodes:
        job.connect(hello(node))
        job.deliver(attach(w(node)))
    pending = job.machine.record.pending
    assert pending is not None
    return pending


def keep_alive(job: Job, seconds: float) -> None:
    """Advance the time while all nodes send heartbeats."""
    for _ in range(round(seconds / 0.5)):
        job.tick(0.5)
        for connection in job.connections.values():
            job.feed(Received(connection, msg.Heartbeat()))


def test_an_unreachable_newcomer_does_not_block_other_joins() -> None:
    job = Job(nodes=2).start()
    pending = join(job, "n2")
    job.deliver(
        msg.Complaint(worker=w("n1"), generation=pending.generation, detail="timed out", unreachable=(w("n2"),))
    )
    assert job.machine.record.pending is None
    job.connect(hello("n3"))
    job.deliver(attach(w("n3")))
    keep_alive(job, 1.0)
    pending = job.machine.record.pending
    assert pending is not None
    assert pending.workers == (w("n0"), w("n1"), w("n3"))


def test_joins_of_an_unreachable_newcomer_are_retried_with_backoff() -> None:
    job = Job(nodes=2).start()
    join(job, "n2")
    waits: list[float] = []
    for _ in range(8):
        pending, since = job.machine.record.pending, job.now
        assert pending is not None
        job.deliver(
            msg.Complaint(
                worker=w("n2"), generation=pending.generation, detail="timed out", unreachable=(w("n0"), w("n1"))
            )
        )
        assert job.machine.record.pending is None
        while job.machine.record.pending is None:
            keep_alive(job, 0.5)
        waits.append(job.now - since)
    assert waits == [2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0, 60.0]


def test_an_after_apply_error_ends_the_job_with_the_cause() -> None:
    """The step is not tried on another node, because it would raise there too."""
    job = Job().start()
    job.step(1)
    why = "after_apply raised at step 1 on n1, rank 1: ZeroDivisionError: of the script (train.py:33)"
    job.deliver(msg.ScriptFailed(worker=w("n1"), generation=1, step=1, why=why))
    assert [failed.why for failed in job.emitted(ev.JobFailed)] == [why]
    assert {end.exit_code for end in job.sent(msg.EndNode)} == {EXIT_FAILED}


def down(node: str, kind: FailureKind, detail: str, exit_code: int = 1, *, final: bool = False) -> msg.WorkerDown:
    return msg.WorkerDown(worker=w(node), kind=kind, detail=detail, exit_code=exit_code, final=final)


def test_a_script_that_exits_ends_the_job_at_once_with_the_reason() -> None:
    job = Job().start()
    job.step(1)
    end = down("n1", FailureKind.PROCESS_EXIT, "the script called sys.exit(3) (train.py, line 7)", 3, final=True)
    job.feed(Received(job.connections["n1"], end))
    (failed,) = job.emitted(ev.JobFailed)
    assert failed.why == "rank 1 on n1: the script called sys.exit(3) (train.py, line 7)"
    assert job.machine.over is not None
    assert job.machine.over.exit_code == 1


def test_bad_input_found_by_a_member_during_training_ends_the_job() -> None:
    """odd_models.py found this: each node ended alone, and the job waited for others that would end too."""
    job = Job().start()
    job.step(1)
    why = "extra['ema'] was changed outside of apply()"
    job.feed(Received(job.connections["n1"], down("n1", FailureKind.PROCESS_EXIT, why, EXIT_BAD_INPUT)))
    assert job.machine.over == EndJob(EXIT_BAD_INPUT, why)
    assert [failed.why for failed in job.emitted(ev.JobFailed)] == [why]
    assert {end.exit_code for end in job.sent(msg.EndNode)} == {EXIT_BAD_INPUT}


def test_bad_input_of_a_newcomer_ends_only_its_node() -> None:
    job = Job().start()
    job.connect(hello("n3"))
    why = "the checkpoint directory /x is not writable"
    job.feed(Received(job.connections["n3"], down("n3", FailureKind.PROCESS_EXIT, why, EXIT_BAD_INPUT)))
    assert job.machine.over is None
    assert [(end.exit_code, end.alone, end.why) for end in job.sent(msg.EndNode)] == [(EXIT_BAD_INPUT, True, why)]


def test_a_failed_job_reports_the_exception_before_its_consequences() -> None:
    job = Job().start()
    job.step(1)
    job.lose("n0")
    for node in ("n1", "n2"):
        job.feed(
            Received(
                job.connections[node], down(node, FailureKind.EXCEPTION, "ValueError: bad batch (train.py, line 9)")
            )
        )
    (failed,) = job.emitted(ev.JobFailed)
    assert failed.why.startswith("rank 1 on n1: ValueError: bad batch (train.py, line 9); then parameters")


def test_a_recovered_failure_is_not_the_reason_of_a_later_end() -> None:
    job = Job().start()
    job.feed(Received(job.connections["n1"], down("n1", FailureKind.EXCEPTION, "ValueError: old")))
    for node in ("n0", "n2"):
        job.report(node, 0)
    for node in ("n0", "n2"):
        job.deliver(msg.Entered(worker=w(node), generation=2, applied=0))
    job.step(1, "n0", "n2", generation=2)
    for node in ("n0", "n2"):
        job.lose(node)
    (failed,) = job.emitted(ev.JobFailed)
    assert failed.why.startswith("node n0: connection_lost; then parameters")


def finish(job: Job, *nodes: str) -> None:
    for node in nodes:
        job.deliver(msg.Finished(worker=w(node), generation=job.machine.transaction.generation, step=1))


def test_a_rank_that_finishes_its_loop_alone_fails_the_job() -> None:
    job = Job(report_timeout_s=2.0).start()
    job.step(1)
    finish(job, "n1")
    keep_alive(job, 3.0)
    job.report("n0", 1, Phase.REDUCING)
    job.report("n1", 1, Phase.FINISHED)
    job.report("n2", 1, Phase.COMPUTE)
    (failed,) = job.emitted(ev.JobFailed)
    assert failed.why.startswith("rank 1 on n1 left its loop after step 1 while rank 0 on n0 went on")


def test_the_wait_for_members_that_leave_their_loops_late_grows() -> None:
    job = Job(report_timeout_s=2.0).start()
    job.step(1)
    generation, asked = 1, []
    for _ in range(3):
        finish(job, "n1")
        since = job.now
        while job.machine.context.interruption.stop is None:
            keep_alive(job, 0.5)
        asked.append(job.now - since)
        for node, phase in (("n0", Phase.COMPUTE), ("n1", Phase.FINISHED), ("n2", Phase.COMPUTE)):
            job.report(node, 1, phase)
        generation += 1
        for node in ("n0", "n1", "n2"):
            job.deliver(msg.Entered(worker=w(node), generation=generation, applied=1))
    assert asked == [3.0, 5.0, 9.0]
    finish(job, "n0", "n1", "n2")
    assert job.machine.record.outcome == "finished"


def leave(job: Job, *nodes: str) -> None:
    """Make the scripts of these nodes leave their loops and end."""
    for node in nodes:
        job.feed(Received(job.connections[node], left(node, job.machine.context.ledger.committed)))


def left(node: str, step: int) -> msg.WorkerDown:
    end = down(node, FailureKind.PROCESS_EXIT, "the script ended before its steps were done", 0, final=True)
    return msgspec.structs.replace(end, applied=step)


def test_the_job_finishes_if_all_scripts_leave_their_loops_after_the_same_step() -> None:
    job = Job().start()
    job.step(1)
    leave(job, "n0", "n1")
    assert job.machine.over is None
    leave(job, "n2")
    (finished,) = job.emitted(ev.JobFinished)
    assert finished.steps == 1
    assert [end.exit_code for end in job.sent(msg.EndNode)] == [0, 0, 0]


def test_a_script_that_ends_before_its_first_step_ends_the_job() -> None:
    """The job once never ended: it waited for nodes that had no workers left."""
    job = Job().boot()
    for node in ("n0", "n1", "n2"):
        job.connect(hello(node))
        job.deliver(attach(w(node)))
    assert job.machine.record.plan is not None
    job.feed(Received(job.connections["n1"], left("n1", 0)))
    why = "rank 1 on n1: the script ended before its first step: train in a loop over job.steps()"
    assert job.machine.over == EndJob(EXIT_FAILED, why)


def test_a_script_that_ends_before_all_nodes_have_joined_ends_the_job() -> None:
    job = Job(nodes=2).boot()
    job.connect(hello("n0"))
    job.deliver(attach(w("n0")))
    job.feed(Received(job.connections["n0"], left("n0", 0)))
    assert job.machine.over is not None
    assert job.machine.over.why.startswith("worker 0 of n0: the script ended before its first step")


def test_a_newcomers_script_that_ends_before_its_first_step_does_not_end_the_job() -> None:
    job = Job().start()
    job.step(1)
    job.connect(hello("n3"))
    job.deliver(attach(w("n3")))
    job.feed(Received(job.connections["n3"], left("n3", 0)))
    assert job.machine.over is None


def came_back(node: str, *, applied: int) -> msg.Hello:
    """Return the Hello of a node after its script has left its loop without a coordinator."""
    lived = (
        attach(w(node)),
        msg.Begun(worker=w(node), generation=1),
        msg.Entered(worker=w(node), generation=1, applied=0),
    )
    return hello(node, (*lived, left(node, applied)), term=1)


def test_scripts_that_left_their_loops_without_a_coordinator_have_not_failed() -> None:
    job = Job().start()
    job.step(1)
    leave(job, "n0")
    job.boot(takeover=True)
    for node in ("n0", "n1", "n2"):
        assert job.machine.over is None
        job.connect(came_back(node, applied=1))
    assert [finished.steps for finished in job.emitted(ev.JobFinished)] == [1]
    assert not [event for event in job.events if isinstance(event, ev.FailureDetected)]
    assert [end.exit_code for end in job.sent(msg.EndNode)] == [0, 0, 0]


def test_a_node_that_reconnects_after_the_job_is_done_is_sent_an_end_order() -> None:
    job = Job().start()
    job.step(1)
    leave(job, "n0", "n1", "n2")
    job.boot(takeover=True)
    job.connect(came_back("n0", applied=1))
    assert {end.exit_code for end in job.sent(msg.EndNode)} == {0}


def test_the_last_step_of_a_script_that_left_is_ignored_if_it_was_repeated() -> None:
    """Its last step did not pass everywhere, and the other workers repeated it with another step result."""
    job = Job().start()
    job.step(1)
    job.deliver(applied(w("n0"), 1, 2, commit(1.0)))
    job.feed(Received(job.connections["n0"], left("n0", 2)))
    job.deliver(msg.Complaint(worker=w("n1"), generation=1, detail="peer lost"))
    for node in ("n1", "n2"):
        job.report(node, 1, Phase.ABANDONED)
    assert job.machine.record.plan is not None
    assert set(job.machine.record.plan.workers) == {w("n1"), w("n2")}
    job.boot(takeover=True)
    page = msg.AppliedSteps(
        workers={w("n0"): 2},
        steps=(
            msg.KeptStep(
                step=2, generation=1, world=3, time=1.0, commit=msg.CompactCommit(**msgspec.structs.asdict(commit(1.0)))
            ),
        ),
    )
    back = came_back("n0", applied=2)
    job.connect(msgspec.structs.replace(back, kept=(*back.kept[:-1], page, back.kept[-1])))
    assert not job.sent(msg.Refused)
    for node in ("n1", "n2"):
        entered = msg.Entered(worker=w(node), generation=2, applied=1)
        job.connect(hello(node, (attach(w(node)), msg.Begun(worker=w(node), generation=2), entered), term=1))
        job.deliver(applied(w(node), 2, 2, commit(2.0), world=2))
    leave(job, "n1", "n2")
    assert [finished.final_loss for finished in job.emitted(ev.JobFinished)] == [2.0]


def test_a_script_exit_without_a_coordinator_ends_the_job_with_its_reason() -> None:
    job = Job(nodes=1).start()
    job.step(1)
    job.boot(takeover=True)
    job.connect(hello("n0", (down("n0", FailureKind.PROCESS_EXIT, "the script called sys.exit(3)", 3, final=True),)))
    assert [failed.why for failed in job.emitted(ev.JobFailed)] == ["rank 0 on n0: the script called sys.exit(3)"]


def test_a_worker_death_without_a_coordinator_is_one_failure() -> None:
    job = Job(nodes=2).start()
    job.step(1)
    job.boot(takeover=True)
    job.connect(hello("n0", (down("n0", FailureKind.PROCESS_EXIT, "killed by SIGKILL"),)))
    assert [failure.detail for failure in job.emitted(ev.FailureDetected)] == ["killed by SIGKILL"]


def test_a_script_that_leaves_its_loop_alone_fails_the_job() -> None:
    job = Job(report_timeout_s=2.0).start()
    job.step(1)
    leave(job, "n1")
    keep_alive(job, 3.0)
    job.report("n0", 1, Phase.REDUCING)
    job.report("n2", 1, Phase.REDUCING)
    (failed,) = job.emitted(ev.JobFailed)
    assert failed.why.startswith("rank 1 on n1 left its loop after step 1 while rank 0 on n0 went on")


def test_a_model_mismatch_names_the_first_different_items() -> None:
    job = Job(nodes=2).boot()
    for node, model in (("n0", "a 4x8, b 8, c 2"), ("n1", "a 4x8, b 9, d 2")):
        job.connect(hello(node))
        job.deliver(attach(w(node), model=model))
    (end,) = job.sent(msg.EndNode)
    assert end.why == "node n1 does not fit the job: the first of the model that differs is b 9, the job's is b 8"


def test_replayed_steps_have_their_original_times_despite_clock_offsets() -> None:
    job = Job(nodes=2).start()
    job.step(1)
    after = Job(nodes=2, records=job.records, events=job.events, now=job.now + 10.0)
    after.boot(takeover=True)
    said = {node: (attach(w(node)), msg.Entered(worker=w(node), generation=1, applied=0)) for node in ("n0", "n1")}
    lanes = msg.CompactCommit(**msgspec.structs.asdict(commit()))
    for node, clock in (("n0", 50.0), ("n1", -3600.0)):
        # Two seconds and one second ago; n1's clock is set forward by an hour before it reports the third step.
        times = (clock - 2.0, clock - 1.0, clock + 3600.0 * (node == "n1"))
        steps = tuple(
            msg.KeptStep(step=step, generation=1, world=2, time=time, commit=lanes)
            for step, time in enumerate(times, start=2)
        )
        page = msg.AppliedSteps(workers={w(node): 4}, steps=steps)
        after.connect(msgspec.structs.replace(hello(node, said[node], term=1), clock=clock, kept=(*said[node], page)))
    committed = [event for event in after.events if isinstance(event, ev.StepCommitted)]
    assert [event.time - after.now for event in committed[-3:]] == [-2.0, -1.0, 0.0]
    assert [event.step_s for event in committed[-2:]] == [1.0, 1.0]


def test_a_script_that_leaves_during_a_recovery_is_the_recorded_end_reason() -> None:
    """The other workers once waited five seconds for it, and continued without it."""
    job = Job().start(saves=True)
    job.step(1)
    job.deliver_from("n1", down("n1", FailureKind.PROCESS_EXIT, "SIGKILL"))
    job.report("n0", 1, summed=(0,))
    job.report("n2", 1, summed=(2,))
    assert set(job.orders(msg.Begin)) == {w("n0"), w("n2")}
    leave(job, "n2")
    assert job.machine.context.interruption.stop is not None, "it never reports"
    job.report("n0", 1, Phase.ENTERING)
    assert set(job.orders(msg.Begin)) == {w("n0")}
    job.deliver(msg.Entered(worker=w("n0"), generation=3, applied=1))
    job.tick(0.2)
    assert job.machine.record.will is None, "it may also be about to leave its loop"
    job.step(2, "n0", generation=3)
    job.tick(0.2)
    assert job.machine.record.will is not None
    why = "worker 0 of n2 left its loop after step 1, and the others went on: all ranks must leave it after the"
    assert job.machine.record.will.why.startswith(why)


def test_a_node_that_joins_as_all_others_leave_is_sent_job_done() -> None:
    """It once waited for a state that no worker had any longer, and the job failed without a live copy."""
    job = joining()
    prepare_all(job)
    members = ("n0", "n1", "n2")
    for node in members:
        job.deliver(applied(w(node), 1, 1, commit(1.0, msg.Flag.SWAP)))
        job.deliver(msg.Entered(worker=w(node), generation=2, applied=1))
    assert not [event for event in job.events if isinstance(event, ev.StepCommitted)]
    for node in members:
        assert job.machine.context.interruption.stop is None, "other workers have the state"
        job.feed(Received(job.connections[node], left(node, 1)))
    assert "Stop" in job.kinds
    job.report("n3", None)
    assert [event.step for event in job.emitted(ev.StepCommitted)] == [1]
    assert [(event.reason, event.steps) for event in job.emitted(ev.JobFinished)] == [("completed", 1)]
    assert set(job.orders(msg.JobDone)) == {w("n3")}


def test_a_store_outage_is_journaled_once_the_store_returns() -> None:
    job = Job().start()
    job.feed(StoreBack(60.5))
    assert [event.away_s for event in job.emitted(ev.StoreReturned)] == [60.5]


def test_a_paused_coordinator_writes_its_record_to_detect_another_leader() -> None:
    job = Job().boot()
    job.tick(0.2)
    assert job.kinds == []
    job.tick(2.0)
    assert job.kinds == ["persist"]
