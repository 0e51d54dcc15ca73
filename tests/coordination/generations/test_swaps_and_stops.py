"""Tests of failures during a pending generation, and of the reports that count after a Stop."""

from __future__ import annotations

from machinery import Job, applied, attach, commit, hello, w

from holdfast.coordination.generations.assignment import first_assignment
from holdfast.coordination.generations.planner import held_experts
from holdfast.protocol.messages import any_side as msg
from holdfast.protocol.plan import Decision, DecisionKind, Phase
from holdfast.protocol.record import SCHEMA, Record

NODES = ("n0", "n1", "n2", "n3")


def joining(*, armed: bool) -> Job:
    """Return a job of three members in which n3 joins in generation 2."""
    job = Job().start()
    job.connect(hello("n3"))
    job.deliver(attach(w("n3")))
    for node in NODES if armed else ():
        job.deliver(msg.Prepared(worker=w(node), generation=2))
    return job


def test_workers_of_the_pending_plan_are_stopped_too() -> None:
    job = joining(armed=True)
    job.lose("n2")
    assert set(job.orders(msg.Stop)) == {w("n0"), w("n1"), w("n3")}


def test_a_stop_has_the_pending_generation_for_workers_that_already_swapped() -> None:
    """A worker that has swapped is in generation 2, so it would ignore a Stop of generation 1 as stale."""
    job = joining(armed=True)
    job.lose("n2")
    assert {stop.generation for stop in job.orders(msg.Stop).values()} == {2}


def test_a_long_step_does_not_void_an_armed_plan() -> None:
    job = joining(armed=True)
    assert not stops_within(job, 72.0)
    assert job.machine.record.pending is not None


def stops_within(job: Job, seconds: float) -> bool:
    """Whether members are stopped in that time, while all nodes send heartbeats."""
    for _ in range(int(seconds / 0.9)):
        job.tick(0.9)
        if job.orders(msg.Stop):
            return True
        for node in NODES:
            job.deliver_from(node, msg.Heartbeat())
    return False


def test_members_are_stopped_if_the_swap_does_not_happen_for_several_steps() -> None:
    job = joining(armed=True)
    for step in (1, 2, 3):
        job.step(step)
    assert stops_within(job, 72.0)


def test_silence_during_a_coordinator_pause_expels_no_node() -> None:
    job = Job(report_timeout_s=2.0).start()
    job.step(1)
    job.lose("n2")
    assert set(job.orders(msg.Stop)) == {w("n0"), w("n1")}
    job.tick(30.0)
    for _ in range(2):
        job.tick(0.9)
        assert set(job.machine.members.nodes) == {"n0", "n1"}
    job.tick(0.9)
    assert not job.machine.members.nodes, "their leases run from then on"


def test_a_swap_that_passed_before_a_stop_is_void() -> None:
    job = joining(armed=True)
    job.lose("n2")
    job.deliver(applied(w("n0"), 1, 1, commit(1.0, msg.Flag.SWAP)))
    assert job.machine.record.plan is not None
    assert job.machine.record.plan.generation == 1


def test_a_pending_plan_of_the_previous_coordinator_is_disarmed_before_it_is_void() -> None:
    job = joining(armed=False)
    job.boot(takeover=True)
    for node in NODES[:3]:
        job.connect(hello(node, (attach(w(node)), msg.Entered(worker=w(node), generation=1, applied=0)), term=1))
    job.connect(hello("n3", (attach(w("n3")),), term=1))
    job.lose("n3")
    assert set(job.orders(msg.Disarm)) == {w("n0"), w("n1"), w("n2")}
    assert job.orders(msg.Void) == {}


def disarming() -> Job:
    """Return a job that lost n3 after all were armed, so that the flags must be lowered."""
    job = joining(armed=True)
    job.lose("n3")
    assert set(job.orders(msg.Disarm)) == {w("n0"), w("n1"), w("n2")}
    return job


def disarmed(node: str = "n0", term: int = 1, generation: int = 2) -> msg.Disarmed:
    return msg.Disarmed(worker=w(node), term=term, generation=generation)


def test_members_stop_at_once_if_the_swap_passed_before_they_disarmed() -> None:
    job = disarming()
    job.deliver(applied(w("n0"), 1, 1, commit(1.0, msg.Flag.SWAP)))
    assert job.machine.record.plan is not None
    assert job.machine.record.plan.generation == 2
    assert set(job.orders(msg.Stop)) == {w("n0"), w("n1"), w("n2")}
    job.deliver(disarmed("n1"))
    assert job.orders(msg.Void) == {}


def test_a_disarmed_message_of_another_term_or_generation_is_ignored() -> None:
    job = disarming()
    for stale in (disarmed(term=0), disarmed(generation=1), disarmed(generation=3)):
        job.deliver(stale)
        assert job.machine.record.pending is not None
        assert job.kinds == []
    job.deliver(disarmed())
    assert job.machine.record.pending is None
    job.deliver(disarmed("n1"))
    assert job.kinds == [], "one order is enough"


def test_an_unrequested_disarmed_message_is_ignored() -> None:
    job = joining(armed=True)
    job.deliver(disarmed())
    assert job.machine.record.pending is not None
    job.lose("n3")
    job.connect(hello("n4"))
    job.deliver(attach(w("n4")))
    job.deliver(disarmed("n4"))
    assert job.machine.record.pending is not None, "the worker is in no plan"


def test_members_are_not_armed_again_when_a_joiner_reconnects_while_disarming() -> None:
    """Another Arm would make a member's earlier message about its flag outdated."""
    job = joining(armed=False)
    job.boot(takeover=True)
    for node in NODES:
        kept = (attach(w(node)), *([msg.Entered(worker=w(node), generation=1, applied=0)] if node != "n3" else []))
        job.connect(hello(node, kept, term=1))
    job.lose("n3")
    job.connect(hello("n3", (attach(w("n3")),), term=1))
    for node in NODES:
        job.deliver(msg.Prepared(worker=w(node), generation=2))
        assert "Arm" not in job.kinds
    job.deliver(disarmed(term=2))
    assert job.kinds == ["persist", *["Void"] * 4]


def test_a_member_lost_while_disarming_is_a_failure() -> None:
    job = disarming()
    job.lose("n2")
    assert set(job.orders(msg.Stop)) == {w("n0"), w("n1")}
    job.deliver(disarmed())
    assert job.orders(msg.Void) == {}
    for node in ("n0", "n1"):
        job.report(node, 0)
    assert job.machine.record.pending is None


def test_all_members_are_stopped_if_none_disarms_in_time() -> None:
    job = disarming()
    for _ in range(31):
        for node in NODES[:3]:
            job.deliver_from(node, msg.Heartbeat())
        job.tick(1.0)
    assert job.machine.context.interruption.stop is not None


def test_a_report_for_another_stop_is_ignored() -> None:
    job = Job(nodes=2).start()
    job.step(1)
    job.deliver(msg.Complaint(worker=w("n0"), generation=1, detail="reset"))
    job.report("n0", 1)
    old = msg.Report(worker=w("n1"), term=1, generation=0, applied=1, step=2, phase=Phase.COMPUTE)
    job.deliver(old)
    assert job.orders(msg.Begin) == {}
    job.report("n1", 1)
    assert set(job.orders(msg.Begin)) == {w("n0"), w("n1")}


def stand(node: str, at: int, **fields: object) -> msg.Report:
    return msg.Report(worker=w(node), term=1, generation=1, applied=at, step=at + 1, phase=Phase.COMPUTE, **fields)  # pyright: ignore[reportArgumentType]


def test_a_worker_that_will_go_forward_holds_the_next_experts() -> None:
    reports = {
        w("n0"): stand("n0", 5, state=msg.Holding(experts=b"now")),
        w("n1"): stand("n1", 4, result=msg.Holding(experts=b"next")),
    }
    forward = Decision(kind=DecisionKind.FORWARD, applied=5, commit=commit())
    assert held_experts(forward, reports) == {w("n0"): b"now", w("n1"): b"next"}


def test_only_gradients_of_the_repeated_step_are_kept() -> None:
    record = Record(schema=SCHEMA, job="job", term=1, micro_batches=4)
    members = tuple(msg.Member(worker=w(node), host="h", state_port=1) for node in ("n0", "n1"))
    plan = msg.GenerationPlan(term=1, generation=2, members=members)
    reports = {w("n0"): stand("n0", 5, summed=(1,)), w("n1"): stand("n1", 4, summed=(0, 2, 3))}
    redo = Decision(kind=DecisionKind.REDO, applied=5)
    assert first_assignment(record, plan, redo, reports) == ((1, 2), (0, 3))
