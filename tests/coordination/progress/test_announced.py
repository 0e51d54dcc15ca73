"""Tests of when a step is announced: a later step proves that all have applied it, or all have reported it."""

from __future__ import annotations

import msgspec
from machinery import Job, applied, attach, commit, hello, kept, w, written

from holdfast.coordination.progress.announced import TOLD_AT_ONCE
from holdfast.protocol import events as ev
from holdfast.protocol.messages import any_side as msg
from holdfast.protocol.plan import DecisionKind

NODES = ("n0", "n1", "n2")


def steps(job: Job) -> list[int]:
    return [event.step for event in job.events if isinstance(event, ev.StepCommitted)]


def stand(job: Job, node: str, step: int, generation: int = 1) -> None:
    job.deliver_from(node, msg.Heartbeat(generation=generation, applied=(step,)))


def entered(node: str, generation: int, at: int) -> msg.Entered:
    return msg.Entered(worker=w(node), generation=generation, applied=at)


def losses(job: Job) -> list[float | None]:
    return [event.loss for event in job.events if isinstance(event, ev.StepCommitted)]


def broken() -> Job:
    """Return a job in which all have applied step 1, but only a lost node reported it; the others owe reports."""
    job = Job().start()
    job.lose("n0")
    return job


def page(node: str, *numbers: int) -> msg.AppliedSteps:
    lanes = msg.CompactCommit(grad_square=1.0, loss_sum=24.0, samples=24, nonfinite=0)
    known = tuple(msg.KeptStep(step=step, generation=1, world=3, time=0.0, commit=lanes) for step in numbers)
    return msg.AppliedSteps(workers={w(node): max(numbers)}, steps=known)


def test_a_step_is_announced_with_its_own_time_by_one_witness_of_the_next() -> None:
    job = Job().start()
    job.deliver(applied(w("n1"), 1, 1), after=1.0)
    heard = job.now
    assert steps(job) == []
    job.deliver(applied(w("n1"), 1, 2), after=7.0)
    assert steps(job) == [1]
    assert [event.time for event in job.emitted(ev.StepCommitted)] == [heard]


def test_the_last_step_is_announced_by_the_reports_of_all_members() -> None:
    job = Job().start()
    job.deliver(applied(w("n1"), 1, 1))
    for node in ("n0", "n2"):
        assert steps(job) == []
        stand(job, node, 1)
    assert steps(job) == [1]


def test_a_heartbeat_has_one_step_per_worker_of_the_node() -> None:
    job, here = Job(nodes=1).boot(), [msg.worker_id("n0", index, "a") for index in range(2)]
    job.connect(msgspec.structs.replace(hello("n0"), workers=2))
    for worker in here:
        job.deliver(attach(worker))
    for worker in here:
        job.deliver(msg.Entered(worker=worker, generation=1, applied=0))
    job.deliver(applied(here[0], 1, 1))
    job.deliver_from("n0", msg.Heartbeat(generation=1, applied=(1, 0)))
    assert steps(job) == []
    job.deliver_from("n0", msg.Heartbeat(generation=1, applied=(0, 1)))
    assert steps(job) == [1]


def test_a_passed_step_proves_nothing_before_all_members_have_entered() -> None:
    """Only then the costs of the Begin are known, and workers that need no state may execute FORWARD earlier."""
    job = Job().boot()
    for node in NODES:
        job.connect(hello(node))
        job.deliver(attach(w(node)))
    for node in NODES[:2]:
        job.deliver(entered(node, 1, 0))
    job.deliver(applied(w("n0"), 1, 1))
    job.deliver(applied(w("n0"), 1, 2))
    assert steps(job) == []
    job.deliver(entered("n2", 1, 0))
    assert steps(job) == [1]


def joining() -> Job:
    """Return a job of three members and n3, with raised swap flags."""
    job = Job().start()
    job.connect(hello("n3"))
    job.deliver(attach(w("n3")))
    for node in (*NODES, "n3"):
        job.deliver(msg.Prepared(worker=w(node), generation=2))
    return job


def test_a_committed_step_has_the_longest_pause_of_its_members() -> None:
    job = Job().start()
    for node, paused_s in (("n0", 0.0), ("n1", 0.25), ("n2", 0.125)):
        job.tick(1.0)
        job.deliver(msgspec.structs.replace(applied(w(node), 1, 1), paused_s=paused_s))
    (committed,) = job.emitted(ev.StepCommitted)
    assert committed.paused_s == 0.0  # the start of the first step is unknown
    for node, paused_s in (("n0", 0.0), ("n1", 0.25), ("n2", 0.125)):
        job.tick(1.0)
        job.deliver(msgspec.structs.replace(applied(w(node), 1, 2), paused_s=paused_s))
    (committed,) = job.emitted(ev.StepCommitted)
    assert committed.paused_s == 0.25


def test_a_committed_step_has_the_number_of_the_last_step() -> None:
    job = Job().start()
    for step, last_step in ((1, 0), (2, 500), (3, 600)):
        job.tick(1.0)
        for node in NODES:
            job.deliver(msgspec.structs.replace(applied(w(node), 1, step), last_step=last_step))
        (committed,) = job.emitted(ev.StepCommitted)
        assert (committed.step, committed.last_step) == (step, last_step)


def test_steps_proven_by_a_swap_are_announced_before_the_new_generation() -> None:
    job = joining()
    job.deliver(applied(w("n0"), 1, 1))
    job.deliver(applied(w("n0"), 1, 2, commit(1.0, msg.Flag.SWAP)))
    (started,) = job.emitted(ev.GenerationStarted)
    (committed,) = job.emitted(ev.StepCommitted)
    assert (committed.step, committed.generation, started.generation) == (1, 1, 2)


def test_a_swap_reported_only_by_the_new_node_proves_the_step_before_it() -> None:
    job = joining()
    job.deliver(applied(w("n0"), 1, 1))
    job.deliver(entered("n3", 2, 2))
    assert steps(job) == [1]


def test_a_passed_step_proves_steps_only_for_the_members_of_its_generation() -> None:
    job = joining()
    job.deliver(applied(w("n0"), 1, 1))
    job.deliver(applied(w("n0"), 1, 2, commit(1.0, msg.Flag.SWAP)))
    for node in (*NODES, "n3"):
        job.deliver(entered(node, 2, 2 if node != "n3" else 1))
    # n3 reports an older step than it must have, which delays every announcement until a step with it passes.
    job.deliver(applied(w("n1"), 1, 3))
    assert steps(job) == [1]
    job.deliver(applied(w("n1"), 2, 3))
    assert steps(job) == [1, 2]


def test_no_step_is_announced_between_a_stop_and_its_decision() -> None:
    job = broken()
    for step in (1, 2, 3):
        job.deliver(applied(w("n1"), 1, step))
    assert steps(job) == []
    job.report("n1", 2)
    assert steps(job) == []


def test_steps_applied_only_by_survivors_are_announced_with_their_losses() -> None:
    job = broken()
    job.deliver_from("n1", page("n1", 1, 2))
    job.report("n1", 2)
    job.report("n2", 2)
    assert job.machine.record.decision == msg.Decision(kind=DecisionKind.REDO, applied=2)
    assert [passed.step for passed in job.machine.record.passed] == []
    assert losses(job) == [1.0, 1.0]


def test_a_decision_drops_results_of_later_steps() -> None:
    job = broken()
    job.deliver(applied(w("n1"), 1, 1, commit(5.0)))
    job.lose("n1")
    job.report("n2", 0)
    job.deliver(entered("n2", 2, 0))
    job.deliver(applied(w("n2"), 2, 1, commit(3.0)))
    assert losses(job) == [3.0]


def test_heartbeats_from_before_a_rollback_do_not_count() -> None:
    job = Job(nodes=2).start()
    job.step(1)
    job.deliver(written("n0", 1, "one"))
    job.deliver(kept("n0", 1, "one"))
    job.step(2)
    job.deliver(msg.Complaint(worker=w("n0"), generation=1, detail="reset"))
    for node in ("n0", "n1"):
        job.report(node, None)
    assert [event.to_step for event in job.emitted(ev.RolledBack)] == [1]
    for node in ("n0", "n1"):
        job.deliver(entered(node, 2, 1))
    job.deliver(applied(w("n0"), 2, 2))
    stand(job, "n1", 2)
    assert steps(job) == [1, 2]
    stand(job, "n1", 2, generation=2)
    assert steps(job) == [1, 2, 2]


def test_a_step_keeps_the_time_of_its_first_report() -> None:
    job = Job().start()
    job.deliver(applied(w("n0"), 1, 1))
    heard = job.now
    job.now += 9.0
    job.deliver_from("n1", page("n1", 1))
    job.deliver(applied(w("n0"), 1, 2))
    assert [event.time for event in job.emitted(ev.StepCommitted)] == [heard]


def test_committed_messages_are_less_frequent_with_more_nodes() -> None:
    def told_after_s(nodes: int) -> float:
        job = Job(nodes=nodes).start()
        times: list[float] = []
        for step in (1, 2):
            job.step(step)
            job.tick(0.1)
            while not job.sent(msg.Committed):
                job.tick(0.1)
            times.append(job.now)
        return times[1] - times[0]

    assert 1.9 < told_after_s(4) < 2.2
    assert 2.4 < told_after_s(5 * TOLD_AT_ONCE) < 2.7
