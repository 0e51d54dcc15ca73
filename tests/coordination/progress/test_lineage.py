"""Tests of messages from before a rollback or from members that are still rolling back."""

from __future__ import annotations

import msgspec
from machinery import Job, applied, attach, commit, hello, kept, reduced, w, written

from holdfast.coordination.instructions import Send
from holdfast.protocol import events as ev
from holdfast.protocol.messages import any_side as msg
from holdfast.protocol.plan import DecisionKind, Phase


def rolled_back() -> Job:
    """Return a job of two members that lost step 2 in apply, and begin generation 2 from the checkpoint of step 1."""
    job = Job(nodes=2).start()
    job.step(1)
    job.deliver(written("n0", 1, "one"))
    job.deliver(kept("n0", 1, "one"))
    job.step(2)
    job.deliver(msg.Complaint(worker=w("n0"), generation=1, detail="reset"))
    job.report("n0", None)
    job.report("n1", None)
    assert [event.to_step for event in job.emitted(ev.RolledBack)] == [1]
    return job


def test_a_result_from_before_a_rollback_is_ignored() -> None:
    job = rolled_back()
    job.deliver(applied(w("n0"), 1, 2, commit(9.0), world=2))
    for node in ("n0", "n1"):
        job.deliver(msg.Entered(worker=w(node), generation=2, applied=1))
    for node in ("n0", "n1"):
        job.deliver(applied(w(node), 2, 2, commit(3.0), world=2))
    (committed,) = job.emitted(ev.StepCommitted)
    assert committed.loss == commit(3.0).loss_sum / commit(3.0).samples


def test_a_worker_that_entered_before_a_rollback_has_not_applied_the_undone_step() -> None:
    job = rolled_back()
    job.boot(takeover=True)
    job.connect(hello("n0", (attach(w("n0")), msg.Entered(worker=w("n0"), generation=1, applied=2)), term=1))
    job.connect(hello("n1", (attach(w("n1")), msg.Entered(worker=w("n1"), generation=2, applied=1)), term=1))
    job.report("n0", None)
    job.report("n1", 1)
    for node in ("n0", "n1"):
        job.deliver(msg.Entered(worker=w(node), generation=3, applied=1))
    job.deliver(applied(w("n1"), 3, 2, world=2))
    assert job.emitted(ev.StepCommitted) == []
    job.deliver(applied(w("n0"), 3, 2, world=2))
    assert [event.step for event in job.emitted(ev.StepCommitted)] == [2]


def test_the_end_of_a_loop_before_a_rollback_does_not_count() -> None:
    """Found by a simulation: an agent reported the end of a loop that a rollback had undone."""
    job = rolled_back()
    job.boot(takeover=True)
    ended = msg.Finished(worker=w("n0"), generation=1, step=2)
    entered = {node: msg.Entered(worker=w(node), generation=2, applied=1) for node in ("n0", "n1")}
    job.connect(hello("n0", (attach(w("n0")), entered["n0"], ended), term=1))
    job.connect(hello("n1", (attach(w("n1")), entered["n1"]), term=1))
    job.deliver(applied(w("n1"), 2, 2, world=2))
    assert job.emitted(ev.StepCommitted) == []
    job.deliver(msg.Finished(worker=w("n1"), generation=2, step=2))
    job.deliver(applied(w("n0"), 2, 2, world=2))
    assert [event.step for event in job.emitted(ev.StepCommitted)] == [2]
    assert job.machine.over is None
    job.deliver(msg.Finished(worker=w("n0"), generation=2, step=2))
    assert len(job.emitted(ev.JobFinished)) == 1


def test_a_decision_waits_for_a_member_that_reconnects() -> None:
    """After a restart, two members have reported; the third may have passed a step that they have not."""
    job = Job().start()
    job.step(1)
    job.boot(takeover=True)

    def comes_back(node: str, *more: msg.WorkerMessage) -> None:
        said = (attach(w(node)), msg.Entered(worker=w(node), generation=1, applied=0), applied(w(node), 1, 1), *more)
        job.connect(hello(node, said, term=1))

    comes_back("n0")
    comes_back("n1")
    job.deliver(msg.Complaint(worker=w("n0"), generation=1, detail="reset"))
    job.report("n0", 1, Phase.ABANDONED, **reduced(5.0))
    job.report("n1", 1, Phase.ABANDONED, **reduced(5.0))
    assert job.orders(msg.Begin) == {}
    comes_back("n2", applied(w("n2"), 1, 2, commit(5.0)))
    job.report("n2", 2, passed=msg.PassedStep(step=2, commit=commit(5.0)))
    begin = job.orders(msg.Begin)[w("n0")]
    assert begin.decision == msg.Decision(kind=DecisionKind.FORWARD, applied=2, commit=commit(5.0))
    assert len(begin.plan.members) == 3


def test_a_checkpoint_part_of_a_later_term_never_counts() -> None:
    """A coordinator of that term had an older store, so its checkpoints are not on the lineage."""
    job = Job(nodes=1).start(saves=True)
    job.step(1)

    def of_term(term: int) -> msg.CheckpointWritten:
        said = written("n0", 1, "one")
        return msgspec.structs.replace(said, term=term, name=said.name.replace("-t1-", f"-t{term}-"))

    def list_orders() -> list[type]:
        orders = [one.message for one in job.last if isinstance(one, Send)]
        return [type(order) for order in orders if isinstance(order, msg.AcceptCheckpoint | msg.PruneCheckpoints)]

    job.deliver(of_term(2))
    assert list_orders() == [msg.PruneCheckpoints]
    job.deliver(of_term(1))
    assert list_orders() == [msg.AcceptCheckpoint]
