"""Tests of draining nodes: no state is lost, no failure is counted, and they stay away."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from machinery import Job, applied, attach, commit, hello, reduced, w, written

from holdfast.coordination.experts.blobs import encode_experts, find_lost_experts
from holdfast.coordination.inputs import Drain, Undrain
from holdfast.coordination.instructions import Instruction
from holdfast.coordination.nodes.draining import RETRY_STEPS
from holdfast.errors import EXIT_DONE, BadInputError, RefusedError, UnreachableError
from holdfast.protocol import events as ev
from holdfast.protocol.job_spec import ExperimentSpec, JobSpec, RecoverySpec
from holdfast.protocol.messages import any_side as msg
from holdfast.protocol.plan import DecisionKind


def reported(job: Job, *nodes: str, at: int = 1) -> None:
    for node in nodes:
        job.report(node, at)


def entered(job: Job, *nodes: str, generation: int, at: int = 1) -> None:
    for node in nodes:
        job.deliver(msg.Entered(worker=w(node), generation=generation, applied=at))


def gone_on(job: Job, step: int, *nodes: str, generation: int = 2) -> None:
    """Make these nodes enter a generation and apply its first step; keep all instructions for checks."""
    entered(job, *nodes, generation=generation, at=step - 1)
    said: list[Instruction] = []
    for node in nodes:
        job.step(step, node, generation=generation)
        said += job.last
    job.last = said


def leaves() -> Job:
    """Return a job of n0 to n2 in which n1 has left after step 1 and no node has continued yet."""
    job = Job().start()
    job.feed(Drain(("n1",)))
    job.step(1)
    reported(job, "n0", "n1", "n2")
    return job


def test_a_closed_connection_after_a_drain_stop_is_not_a_failure() -> None:
    """Found under load: a stopped worker closes its group, and others not yet stopped see failed peers."""
    job = Job().start()
    job.feed(Drain(("n1",)))
    job.step(1)
    job.deliver(msg.Complaint(worker=w("n2"), generation=1, detail="Connection closed by peer"))
    reported(job, "n0", "n1", "n2")
    assert job.emitted(ev.GenerationStarted)[-1].reason == "drain"
    assert not [event for event in job.events if isinstance(event, ev.FailureDetected)]


def test_a_timeout_after_a_drain_stop_is_a_failure() -> None:
    job = Job().start()
    job.feed(Drain(("n1",)))
    job.step(1)
    job.deliver(msg.Complaint(worker=w("n2"), generation=1, detail="timed out", timed_out=True))
    reported(job, "n0", "n1", "n2")
    assert [event for event in job.events if isinstance(event, ev.FailureDetected)]


def test_a_departed_node_is_taken_back_if_the_others_are_lost_first() -> None:
    job = leaves()
    job.lose("n0")
    stops = job.orders(msg.Stop)
    assert stops.keys() == {w("n1"), w("n2")}, "it is also asked for its report"
    assert stops[w("n1")].generation == 2
    job.lose("n2")
    reported(job, "n1")
    begun = job.emitted(ev.GenerationStarted)[-1]
    assert (begun.members, begun.decision) == (("n1",), DecisionKind.REDO)
    assert not [event for event in job.events if isinstance(event, ev.NodeLeft) and event.node == "n1"]
    assert not [event for event in job.events if isinstance(event, ev.RolledBack)]


def static_drain() -> Job:
    """Return a job whose experts need two nodes: n1 has left after step 1, and n2 has replaced it."""
    job = Job(spec=JobSpec(experiments=ExperimentSpec(static_experts=True, ep_size=2))).boot()
    for node in ("n0", "n1", "n2"):
        job.connect(hello(node))
        job.deliver(attach(w(node)))
    entered(job, "n0", "n1", generation=1, at=0)
    job.feed(Drain(("n1",)))
    job.step(1, "n0", "n1")
    reported(job, "n0", "n1")
    assert job.emitted(ev.GenerationStarted)[-1].members == ("n0", "n2")
    return job


def test_a_retained_node_is_taken_back_if_the_others_are_too_few_for_all_experts() -> None:
    job = static_drain()
    job.lose("n2")
    reported(job, "n0", "n1")
    assert job.emitted(ev.GenerationStarted)[-1].members == ("n0", "n1")
    assert not [event for event in job.events if isinstance(event, ev.JobWaiting)]


def test_a_retained_node_with_a_script_error_is_not_taken_back() -> None:
    """The job failed: its new process counted as usable, but no generation could include it."""
    job = static_drain()
    error = msg.ScriptError(place="train.py:1", step=2)
    job.deliver(msg.Raised(worker=w("n1"), generation=1, exit_code=1, error=error, detail="ValueError: x"))
    job.lose("n2")
    reported(job, "n0", "n1")
    job.deliver(attach(w("n1", "b")))
    job.tick(0.2)
    assert not [event for event in job.events if isinstance(event, ev.JobFailed)]
    assert [event for event in job.events if isinstance(event, ev.JobWaiting)]


def test_only_the_needed_one_of_two_retained_nodes_is_taken_back() -> None:
    """Both were taken back, and could only leave together."""
    job = Job(nodes=4, spec=JobSpec(experiments=ExperimentSpec(static_experts=True, ep_size=2))).boot()
    nodes = ("n0", "n1", "n2", "n3")
    for node in nodes:
        job.connect(hello(node))
    for node in nodes:
        job.deliver(attach(w(node)))
    entered(job, *nodes, generation=1, at=0)
    job.feed(Drain(("n2", "n3")))
    job.step(1, *nodes)
    reported(job, *nodes)
    assert job.emitted(ev.GenerationStarted)[-1].members == ("n0", "n1")
    job.lose("n1")
    reported(job, "n0", "n2", "n3")
    (begun,) = job.emitted(ev.GenerationStarted)
    assert set(begun.members) in ({"n0", "n2"}, {"n0", "n3"})
    gone_on(job, 2, *begun.members, generation=3)
    (left,) = [event.node for event in job.events if isinstance(event, ev.NodeLeft) and event.reason == "drained"]
    assert {*begun.members, left} == {"n0", "n2", "n3"}


def test_all_nodes_that_can_go_together_leave_although_fewer_could_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """A standby that replaces the last of them may bring more expert slots than that node had."""
    draining = Job().start().machine.context.draining
    monkeypatch.setattr(draining, "can_go", lambda leavers, workers: len(leavers) == 3)
    workers = [w("n0"), w("n1"), w("n2")]
    assert draining.select_dispensable(workers, workers) == workers


def test_a_standby_that_warms_up_later_replaces_a_node_that_was_taken_back() -> None:
    """The node and the standby that had replaced it counted as two, so the drain never ended."""
    spec = JobSpec(
        recovery=RecoverySpec(on_node_failure="standby"),
        experiments=ExperimentSpec(static_experts=True, ep_size=2),
    )
    job = Job(nodes=2, spec=spec).boot()
    for node in ("n0", "n1", "s0", "s1"):
        job.connect(msgspec.structs.replace(hello(node), session=f"{node}000000", standby=node[0] == "s"))
        job.deliver(attach(w(node)))
    entered(job, "n0", "n1", generation=1, at=0)
    job.deliver(msg.Warmed(worker=w("s0"), seconds=0.5))
    job.step(1, "n0", "n1")
    job.feed(Drain(("n1",)))
    job.step(2, "n0", "n1")
    reported(job, "n0", "n1", at=2)
    assert job.emitted(ev.GenerationStarted)[-1].members == ("n0", "s0")
    job.lose("n0")
    reported(job, "n1", at=2)
    job.report("s0", None)
    assert set(job.emitted(ev.GenerationStarted)[-1].members) == {"s0", "n1"}
    job.deliver(msg.Warmed(worker=w("s1"), seconds=0.5))
    entered(job, "s0", "n1", generation=3, at=2)
    for step in range(3, 3 + RETRY_STEPS):
        job.step(step, "s0", "n1", generation=3)
        job.tick(0.05)
        if job.machine.context.interruption.stop is not None:
            break
    reported(job, "s0", "n1", at=step)
    assert set(job.emitted(ev.GenerationStarted)[-1].members) == {"s0", "s1"}


def test_the_loss_of_a_departed_node_does_not_stop_the_others() -> None:
    job = leaves()
    job.lose("n1")
    assert job.machine.context.interruption.stop is None
    (left,) = job.emitted(ev.NodeLeft)
    assert (left.node, left.reason) == ("n1", "drained")
    assert not [event for event in job.events if isinstance(event, ev.FailureDetected)]
    gone_on(job, 2, "n0", "n2")
    assert job.emitted(ev.StepCommitted)[-1].step == 2


def test_a_new_coordinator_knows_the_retained_departed_nodes() -> None:
    job = leaves()
    job.boot(takeover=True)
    for node in ("n0", "n2"):
        job.connect(hello(node, kept=(attach(w(node)), msg.Begun(worker=w(node), generation=2))))
    report = msg.Report(worker=w("n1"), term=1, generation=1, applied=1, step=2, phase=msg.Phase.COMPUTE)
    job.connect(hello("n1", kept=(attach(w("n1")), msg.Begun(worker=w("n1"), generation=1), report)))
    assert not job.sent(msg.Refused)
    reported(job, "n0", "n2")
    reported(job, "n1")
    assert job.emitted(ev.GenerationStarted)[-1].members == ("n0", "n2")
    gone_on(job, 2, "n0", "n2", generation=3)
    assert [event.node for event in job.emitted(ev.NodeLeft)] == ["n1"]
    assert [one.node for one in job.machine.record.drained] == ["n1"]


def test_a_node_that_left_without_a_coordinator_is_not_awaited() -> None:
    """Found when servers were killed during moves: departed nodes that did not return were taken for lost."""
    job = leaves()
    job.boot(takeover=True)
    for node in ("n0", "n2"):
        stands = (attach(w(node)), msg.Entered(worker=w(node), generation=2, applied=1))
        job.connect(hello(node, kept=stands))
    for step in (2, 3):
        job.step(step, "n0", "n2", generation=2)
    assert [(event.node, event.reason) for event in job.events if isinstance(event, ev.NodeLeft)] == [("n1", "drained")]
    assert not job.machine.context.disconnected.promised
    for _ in range(40):
        for node in ("n0", "n2"):
            job.deliver_from(node, msg.Heartbeat())
        job.tick(0.25)
    assert not [event for event in job.events if isinstance(event, ev.FailureDetected)]
    assert len([event for event in job.events if isinstance(event, ev.NodeLeft)]) == 1


def test_a_job_ends_although_a_retained_node_lags_behind() -> None:
    """n1 was stopped before it applied step 2, the last step of the others: no node waits for n1."""
    job = Job().start()
    job.step(1)
    job.feed(Drain(("n1",)))
    job.lose("n2")
    v = reduced(1.0)
    job.report("n0", 2, passed=msg.PassedStep(step=2, commit=v["reduced"]))
    job.report("n1", 1)
    (begun,) = job.emitted(ev.GenerationStarted)
    assert (begun.members, begun.decision) == (("n0",), DecisionKind.REDO)
    entered(job, "n0", generation=2, at=2)
    assert job.machine.record.position.step == 1, "no step beyond the retained node is announced"
    job.deliver(msg.Finished(worker=w("n0"), generation=2, step=2))
    assert [event.step for event in job.emitted(ev.StepCommitted)] == [2]
    assert [event.reason for event in job.emitted(ev.NodeLeft)] == ["drained"]
    assert job.emitted(ev.JobFinished)


def test_a_checkpoint_of_the_last_step_releases_a_retained_node() -> None:
    """No later step proves that the other nodes have it; they finish only once it is committed and saved."""
    job = Job().start(saves=True)
    job.step(1)
    job.feed(Drain(("n1",)))
    job.lose("n2")
    job.report("n0", 2, passed=msg.PassedStep(step=2, commit=reduced(1.0)["reduced"]))
    job.report("n1", 1)
    entered(job, "n0", generation=2, at=2)
    assert job.machine.record.position.step == 1
    job.deliver(written("n0", 2, "x", generation=2))
    assert [event.reason for event in job.emitted(ev.NodeLeft)] == ["drained"]
    assert [event.step for event in job.emitted(ev.StepCommitted)] == [2]


def test_a_drained_node_leaves_after_a_step_without_a_failure() -> None:
    job = Job().start()
    job.feed(Drain(("n1",)))
    assert job.machine.context.interruption.stop is None, "no node stops in the middle of a step"
    job.step(1)
    assert job.machine.context.interruption.stop is not None
    reported(job, "n0", "n1", "n2")
    (begun,) = job.emitted(ev.GenerationStarted)
    assert (begun.reason, begun.members, begun.decision) == ("drain", ("n0", "n2"), DecisionKind.REDO)
    assert not job.emitted(ev.NodeLeft), "it is retained until the others have continued without it"
    gone_on(job, 2, "n0", "n2")
    (left,) = job.emitted(ev.NodeLeft)
    assert (left.node, left.reason) == ("n1", "drained")
    (end,) = job.sent(msg.EndNode)
    assert (end.exit_code, end.alone) == (EXIT_DONE, True)
    (recovered,) = job.emitted(ev.Recovered)
    assert (recovered.action, recovered.detect_s) == ("shrink", 0.0)
    assert not [event for event in job.events if isinstance(event, ev.FailureDetected)]
    assert job.machine.record.leaving == ()


def test_a_drained_node_returns_only_after_undrain_even_after_a_takeover() -> None:
    job = Job().start()
    job.feed(Drain(("n1",)))
    job.step(1)
    reported(job, "n0", "n1", "n2")
    gone_on(job, 2, "n0", "n2")
    job.boot(takeover=True)
    job.connect(hello("n1", kept=(attach(w("n1", "b")),)))
    (refused,) = job.sent(msg.Refused)
    assert (refused.exit_code, refused.retry) == (EXIT_DONE, False)
    assert "`holdfast undrain n1`" in refused.why
    job.feed(Undrain("n1"))
    job.connect(hello("n1", kept=(attach(w("n1", "b")),)))
    assert job.sent(msg.Welcome)


def test_repeated_drains_of_a_node_have_no_further_effect() -> None:
    job = Job().start()
    job.feed(Drain(("n1",)))
    job.feed(Drain(("n1",)))
    assert [one.node for one in job.machine.record.leaving] == ["n1"]
    with pytest.raises(RefusedError, match="n1 is still about to leave"):
        job.feed(Undrain("n1"))
    job.step(1)
    reported(job, "n0", "n1", "n2")
    job.feed(Drain(("n1",)))
    gone_on(job, 2, "n0", "n2")
    assert job.machine.record.leaving == ()
    job.feed(Drain(("n1",)))
    assert job.machine.record.leaving == ()


def test_invalid_drain_requests_are_refused_without_effect() -> None:
    job = Job().start()
    with pytest.raises(BadInputError, match="'n1' is named twice"):
        job.feed(Drain(("n1", "n1")))
    with pytest.raises(BadInputError, match="no node is named"):
        job.feed(Drain(()))
    with pytest.raises(UnreachableError, match="no node 'n9': the nodes are n0, n1, n2"):
        job.feed(Drain(("n9",)))
    with pytest.raises(RefusedError, match=r"no node would be left; add some first \(holdfast scale \+1\)"):
        job.feed(Drain(("n0", "n1", "n2")))
    job.feed(Drain(("n0", "n1")))
    with pytest.raises(RefusedError, match="no node would be left"):
        job.feed(Drain(("n2",)))
    job.step(1)
    reported(job, "n0", "n1", "n2")
    assert job.emitted(ev.GenerationStarted)[0].members == ("n2",)


def test_a_draining_node_with_the_only_state_stays_until_others_have_it() -> None:
    """Only n1 has applied a step that the others cannot reach: it sends them the state, and leaves later."""
    job = Job().start()
    job.feed(Drain(("n1",)))
    job.step(1)
    job.report("n0", None)
    job.report("n1", 1)
    job.report("n2", None)
    assert not job.emitted(ev.NodeLeft)
    (begun,) = job.emitted(ev.GenerationStarted)
    assert begun.members == ("n0", "n1", "n2")
    entered(job, "n0", "n1", "n2", generation=2)
    for step in range(2, 2 + RETRY_STEPS):
        assert job.machine.context.interruption.stop is None
        job.step(step, generation=2)
    reported(job, "n0", "n1", "n2", at=1 + RETRY_STEPS)
    gone_on(job, 2 + RETRY_STEPS, "n0", "n2", generation=3)
    assert job.emitted(ev.NodeLeft)[0].node == "n1"


def test_a_draining_node_leaves_during_recovery_from_another_failure() -> None:
    job = Job(nodes=4).start()
    job.feed(Drain(("n1",)))
    job.lose("n3")
    reported(job, "n0", "n1", "n2", at=0)
    (begun,) = job.emitted(ev.GenerationStarted)
    assert (begun.reason, begun.members) == ("failure", ("n0", "n2"))
    assert [event.reason for event in job.events if isinstance(event, ev.NodeLeft)] == ["failed", "drained"]


def test_a_node_lost_while_draining_also_counts_as_drained() -> None:
    job = Job().start()
    job.feed(Drain(("n1",)))
    job.lose("n1")
    reported(job, "n0", "n2", at=0)
    job.tick(0.1)
    assert [one.node for one in job.machine.record.drained] == ["n1"]
    job.connect(hello("n1", kept=(attach(w("n1", "b")),)))
    assert job.sent(msg.Refused)[0].exit_code == EXIT_DONE


def test_a_waiting_node_is_drained_immediately() -> None:
    job = Job(nodes=2).boot()
    job.connect(hello("n0"))
    job.deliver(attach(w("n0")))
    job.connect(hello("n1"))
    job.deliver(attach(w("n1")))
    assert job.machine.record.plan is not None
    job.connect(hello("n2"))
    job.feed(Drain(("n2",)))
    assert [event.node for event in job.emitted(ev.NodeLeft)] == ["n2"]
    assert [message.why for message in job.sent(msg.EndNode)] == ["node n2 is drained"]


def test_a_new_coordinator_continues_a_drain() -> None:
    job = Job().start()
    job.feed(Drain(("n1",)))
    job.boot(takeover=True)
    for node in ("n0", "n1", "n2"):
        stands = (attach(w(node)), msg.Entered(worker=w(node), generation=1, applied=0))
        job.connect(hello(node, kept=stands))
    job.step(1)
    reported(job, "n0", "n1", "n2")
    gone_on(job, 2, "n0", "n2")
    assert [event.node for event in job.emitted(ev.NodeLeft)] == ["n1"]


SHAPE = msg.ExpertShape(layers=1, experts=4, slots=4)


def with_experts(slots: int, nodes: int = 3) -> Job:
    shape = msgspec.structs.replace(SHAPE, slots=slots)
    job = Job(nodes=nodes).boot()
    for index in range(nodes):
        job.connect(hello(f"n{index}"))
        job.deliver(attach(w(f"n{index}"), experts=shape))
    entered(job, *(f"n{index}" for index in range(nodes)), generation=1, at=0)
    return job


def test_a_drain_is_refused_if_the_experts_do_not_fit_the_others() -> None:
    job = with_experts(slots=2, nodes=2)
    with pytest.raises(RefusedError, match="4 experts per layer do not fit the 2 slots"):
        job.feed(Drain(("n1",)))


def test_a_drain_below_the_fault_threshold_is_refused_with_advice() -> None:
    job = with_experts(slots=4, nodes=2)
    with pytest.raises(RefusedError, match=r"fewer than 2 nodes .*; add nodes first .* \+1"):
        job.feed(Drain(("n1",)))
    job = with_experts(slots=4, nodes=3)
    job.feed(Drain(("n1",)))
    assert [one.node for one in job.machine.record.leaving] == ["n1"]


def test_a_draining_node_hands_off_unique_experts_before_it_leaves() -> None:
    """The drain was once refused; before that, `holdfast drain` waited forever."""
    job = with_experts(slots=2, nodes=3)
    plan = job.machine.record.plan
    assert plan is not None
    assert plan.expert_plan is not None
    assert plan.expert_plan.given == 1, "six slots for four experts"
    held = dict(zip(("n0", "n1", "n2"), plan.expert_plan.placement, strict=True))
    alone = [name for name in held if find_lost_experts(SHAPE, [blob for other, blob in held.items() if other != name])]
    job.feed(Drain((alone[0],)))
    job.step(1)
    assert job.machine.context.interruption.stop is None, "it does not leave before others have its experts"
    pending = job.machine.record.pending
    assert pending is not None
    assert pending.expert_plan is not None
    rows = dict(zip(("n0", "n1", "n2"), pending.expert_plan.placement, strict=True))
    assert rows[alone[0]] == held[alone[0]], "the draining node sends them"
    assert not find_lost_experts(SHAPE, [blob for name, blob in rows.items() if name != alone[0]])
    for node in held:
        job.deliver(msg.Prepared(worker=w(node), generation=2))
    swap = commit(1.0, msg.Flag.SWAP)
    for node in held:
        job.deliver(applied(w(node), 1, 2, swap))
    entered(job, *held, generation=2, at=2)
    job.step(3, generation=2)
    assert job.machine.context.interruption.stop is not None
    for node, blob in rows.items():
        job.report(node, 3, state=msg.Holding(dense=True, experts=blob))
    assert alone[0] not in job.emitted(ev.GenerationStarted)[0].members


def test_steps_beyond_a_lagging_retained_node_are_not_announced() -> None:
    """Only n2 finishes step 3, without n1. Step 2 was announced anyway, and was lost with n2."""
    job = Job().start()
    job.feed(Drain(("n1",)))
    job.step(1)
    job.report("n0", 1, **reduced(2.0))
    reported(job, "n1", "n2")
    assert job.emitted(ev.GenerationStarted)[0].decision is DecisionKind.FORWARD
    job.lose("n0")
    reported(job, "n1")
    second, third = (msg.PassedStep(step=step, commit=commit(float(step))) for step in (2, 3))
    job.report("n2", 2, passed=second, **reduced(3.0))
    (begun,) = job.emitted(ev.GenerationStarted)
    assert (begun.members, begun.decision) == (("n2",), DecisionKind.FORWARD)
    job.deliver(applied(w("n2"), 3, 3, third.commit))
    entered(job, "n2", generation=3, at=3)
    told = [event.step for event in job.events if isinstance(event, ev.StepCommitted)]
    assert told == [1], "no step beyond the retained node is announced"
    job.lose("n2")
    reported(job, "n1")
    (begun,) = job.emitted(ev.GenerationStarted)
    assert (begun.members, begun.decision) == (("n1",), DecisionKind.REDO)


def test_gradients_of_a_step_repeated_by_the_others_are_not_used() -> None:
    """n1 had reduced step 2 before it left, and the others repeated it. With both results, replicas would diverge."""
    job = with_experts(slots=4, nodes=3)
    all_of_them, half = (
        msg.Holding(dense=True, experts=encode_experts(np.array([row]))) for row in ([1] * 4, [2, 2, 0, 0])
    )
    job.feed(Drain(("n1",)))
    job.step(1)
    job.report("n0", 1, state=half)
    job.report("n1", 1, state=all_of_them, result=all_of_them, reduced=commit(2.0))
    job.report("n2", 1, state=all_of_them)
    (begun,) = job.emitted(ev.GenerationStarted)
    assert (begun.members, begun.decision) == (("n0", "n2"), DecisionKind.REDO), "n1 leaves, and is retained"
    entered(job, "n0", "n2", generation=2)
    job.lose("n2")
    anew, third = commit(2.5), msg.PassedStep(step=3, commit=commit(3.0))
    job.deliver(applied(w("n0"), 2, 2, anew))
    job.report("n0", 2, state=half, result=half, passed=third, reduced=third.commit)
    job.report("n1", 1, state=all_of_them, result=all_of_them, reduced=commit(2.0))
    (begun,) = job.emitted(ev.GenerationStarted)
    decision = job.machine.record.decision
    assert decision is not None
    assert (decision.kind, decision.applied) == (DecisionKind.REDO, 1)
    assert sorted(begun.members) == ["n0", "n1"], "its state is needed"


def test_a_step_is_announced_only_once_all_members_have_its_state() -> None:
    """Only n0 continued to step 3, and the experts are lost with n2: the job returns to step 2, which n1 finishes."""
    job = with_experts(slots=4, nodes=3)
    all_of_them, half = (
        msg.Holding(dense=True, experts=encode_experts(np.array([row]))) for row in ([1] * 4, [2, 2, 0, 0])
    )
    job.feed(Drain(("n1",)))
    job.step(1)
    ready = {"reduced": commit(2.0)}
    job.report("n0", 1, state=half, result=half, **ready)
    job.report("n1", 1, state=all_of_them, result=all_of_them, **ready)
    job.report("n2", 1, state=all_of_them, result=all_of_them, **ready)
    assert job.emitted(ev.GenerationStarted)[0].decision is DecisionKind.FORWARD
    job.lose("n2")
    job.report("n0", 3, state=half, passed=msg.PassedStep(step=3, commit=commit(3.0)))
    job.report("n1", 1, state=all_of_them, result=all_of_them, **ready)
    (begun,) = job.emitted(ev.GenerationStarted)
    assert (sorted(begun.members), begun.decision) == (["n0", "n1"], DecisionKind.FORWARD)
    job.deliver(applied(w("n1"), 3, 2, commit(2.0)))
    entered(job, "n1", generation=3, at=2)
    assert not job.emitted(ev.StepCommitted), "n0 has no state at all"
    entered(job, "n0", generation=3, at=2)
    assert [event.step for event in job.emitted(ev.StepCommitted)] == [2]
