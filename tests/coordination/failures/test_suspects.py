"""Who is suspected where collectives fail although everybody answers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from machinery import Job, attach, hello, w

from holdfast.coordination.failures.suspects import Suspects
from holdfast.protocol import events as ev
from holdfast.protocol.messages import any_side as msg
from holdfast.protocol.plan import DecisionKind, Phase

NODES = ("n0", "n1", "n2", "n3")
WORKERS = tuple(w(node) for node in NODES)


def reports(*phases: Phase, step: int = 5) -> dict[str, msg.Report]:
    return {
        worker: msg.Report(worker=worker, term=1, generation=1, applied=step - 1, step=step, phase=phase)
        for worker, phase in zip(WORKERS, phases, strict=False)
    }


def complaint(node: str, *unreachable: str, timed_out: bool = False) -> tuple[str, msg.Complaint]:
    peers = tuple(w(peer) for peer in unreachable)
    worker = w(node)
    return worker, msg.Complaint(worker=worker, generation=1, detail="reset", timed_out=timed_out, unreachable=peers)


REDUCING = (Phase.REDUCING,) * 4


def test_a_broken_connection_lets_the_same_members_try_once_more_and_not_twice() -> None:
    suspects = Suspects()
    complaints = dict([complaint("n2")])
    assert suspects.name(WORKERS, reports(*REDUCING), complaints, 4) == {}
    assert list(suspects.name(WORKERS, reports(*REDUCING), complaints, 4)) == ["n2"]


def test_a_step_in_between_makes_it_good() -> None:
    suspects = Suspects()
    complaints = dict([complaint("n2")])
    for committed in (4, 5, 6):
        assert suspects.name(WORKERS, reports(*REDUCING), complaints, committed) == {}


def test_who_computes_while_the_others_waited_until_their_time_was_up_is_the_suspect() -> None:
    complaints = dict([complaint("n0", timed_out=True), complaint("n2", timed_out=True)])
    standing = reports(Phase.REDUCING, Phase.COMPUTE, Phase.REDUCING, Phase.REDUCING)
    named = Suspects().name(WORKERS, standing, complaints, 4)
    assert list(named) == ["n1"]
    assert "'compute' of step 5" in named["n1"]


def test_who_only_waits_longer_is_none() -> None:
    """The one that complained first stopped the others: that they had not complained yet says nothing."""
    complaints = dict([complaint("n3", timed_out=True)])
    assert list(Suspects().name(WORKERS, reports(*REDUCING), complaints, 4)) == ["n3"]


def test_of_two_that_do_not_reach_each_other_the_later_goes() -> None:
    complaints = dict([complaint("n1", "n2", timed_out=True), complaint("n2", "n1", timed_out=True)])
    assert list(Suspects().name(WORKERS, reports(*REDUCING), complaints, 4)) == ["n2"]


def test_who_reaches_none_of_those_it_is_put_together_with_goes_although_it_is_the_earlier() -> None:
    """n0 is cut off, and the job needs two: n1 and n2 took turns beside it for ever, each taken for the guilty one."""
    suspects = Suspects()
    gone: list[str] = []
    for other in ("n1", "n2", "n1"):
        pair, complaints = (w("n0"), w(other)), [complaint("n0", other), complaint(other, "n0", timed_out=True)]
        standing = {worker: report for worker, report in reports(*REDUCING).items() if worker in pair}
        gone += suspects.name(pair, standing, dict(complaints), 4)
    assert gone == ["n1", "n0", "n0"]
    complaints = [complaint("n0", "n1", timed_out=True), complaint("n1", "n0")]
    standing = {worker: report for worker, report in reports(*REDUCING).items() if worker in (w("n0"), w("n1"))}
    named = suspects.name((w("n0"), w("n1")), standing, dict(complaints), 5)
    assert list(named) == ["n1"], "a step in between makes it good"


def test_who_is_cut_off_from_several_goes_alone() -> None:
    complaints = dict(
        [complaint("n0", "n1", timed_out=True), complaint("n2", "n1", timed_out=True), complaint("n3", "n1")]
    )
    assert list(Suspects().name(WORKERS, reports(*REDUCING), complaints, 4)) == ["n1"]


@given(
    phases=st.lists(st.sampled_from(list(Phase)), min_size=4, max_size=4),
    pairs=st.sets(st.tuples(st.sampled_from(NODES), st.sampled_from(NODES))),
    complainers=st.sets(st.sampled_from(NODES), min_size=1),
    late=st.booleans(),
)
def test_the_same_members_never_fail_three_times_and_somebody_always_stays(
    phases: list[Phase], pairs: set[tuple[str, str]], complainers: set[str], late: bool
) -> None:
    suspects = Suspects()
    cut = {node: [peer for a, peer in pairs if a == node] for node in complainers}
    complaints = dict(complaint(node, *cut[node], timed_out=late) for node in sorted(complainers))
    first = suspects.name(WORKERS, reports(*phases), complaints, 4)
    named = first or suspects.name(WORKERS, reports(*phases), complaints, 4)
    assert named
    assert set(named) < set(NODES)
    assert first or not late


def test_a_hung_training_thread_is_named_and_its_node_replaced() -> None:
    job = Job().start()
    job.step(1)
    job.say(msg.Complaint(worker=w("n0"), generation=1, detail="timed out after 120 s", timed_out=True))
    job.report("n0", 1, Phase.REDUCING)
    job.report("n1", 1, Phase.REDUCING)
    job.report("n2", 1, Phase.COMPUTE)
    (failure,) = job.said(ev.FailureDetected)
    assert (failure.node, failure.kind) == ("n2", "hang")
    assert job.sent(msg.Refused)[0].retry
    begin = job.orders(msg.Begin)[w("n0")]
    assert begin.plan.workers == (w("n0"), w("n1"))
    assert begin.decision.kind is DecisionKind.REDO


def test_who_comes_meanwhile_is_not_put_together_with_those_that_have_timed_out() -> None:
    """n1 reaches nobody: with the next node that is here it would fail again, and with the first one after that."""
    job = Job().start()
    job.step(1)
    job.lose("n2")
    job.report("n0", 1, Phase.REDUCING)
    job.report("n1", 1, Phase.REDUCING)
    job.connect(hello("n3"))
    job.say(attach(w("n3")))
    job.say(msg.Complaint(worker=w("n0"), generation=2, detail="late", timed_out=True, unreachable=(w("n1"),)))
    job.report("n0", 1, Phase.ENTERING)
    job.report("n1", 1, Phase.ENTERING)
    assert job.orders(msg.Begin)[w("n0")].plan.workers == (w("n0"),)
    assert w("n3") not in job.orders(msg.Begin)


@pytest.mark.parametrize("phase", Phase)
def test_there_is_a_verdict_wherever_a_worker_stands(phase: Phase) -> None:
    late = {w("n0"): complaint("n0", timed_out=True)[1]}
    named = Suspects().name(WORKERS, reports(Phase.APPLYING, phase, Phase.APPLYING, Phase.APPLYING), late, 4)
    assert set(named) == ({"n0"} if phase is Phase.APPLYING else {"n1"})


def test_who_has_waited_in_vain_itself_is_none_however_far_it_had_got() -> None:
    complaints = dict([complaint("n0", timed_out=True), complaint("n3", timed_out=True)])
    standing = reports(Phase.REDUCING, Phase.COMPUTE, Phase.VOTED, Phase.VOTED)
    assert list(Suspects().name(WORKERS, standing, complaints, 4)) == ["n1"]


def test_that_a_node_which_is_no_member_cannot_be_reached_is_nobodys_fault() -> None:
    complaints = dict([complaint("n1", "n2", "n9", timed_out=True), complaint("n2", "n1"), complaint("n3", "n9")])
    assert list(Suspects().name(WORKERS, reports(*REDUCING), complaints, 4)) == ["n2"]


def test_somebody_stays_where_each_node_has_one_that_is_late() -> None:
    """n0's other worker has waited itself: without further evidence its node goes, and n1 stays."""
    a, b, c = msg.worker_id("n0", 0, "a"), msg.worker_id("n0", 1, "a"), msg.worker_id("n1", 0, "a")
    phases = {a: Phase.REDUCING, b: Phase.COMPUTE, c: Phase.COMPUTE}
    standing = {
        worker: msg.Report(worker=worker, term=1, generation=1, applied=4, step=5, phase=phase)
        for worker, phase in phases.items()
    }
    late = {a: msg.Complaint(worker=a, generation=1, detail="late", timed_out=True)}
    assert list(Suspects().name((a, b, c), standing, late, 4)) == ["n0"]


def with_a_stranger() -> Job:
    """n3 is in the pending plan, n4 in none yet."""
    job = Job().start()
    for node in ("n3", "n4"):
        job.connect(hello(node))
        job.say(attach(w(node)))
    return job


def test_a_complaint_of_who_is_no_member_counts_for_nothing() -> None:
    """It has no report by which it could be judged."""
    job = with_a_stranger()
    stranger = complaint("n4", timed_out=True)[1]
    job.say(stranger)
    assert not job.last
    job.say(complaint("n0")[1])
    job.say(stranger)
    for node in ("n0", "n1", "n2"):
        job.report(node, 0)
    job.report("n3", None)
    ((*members,),) = [event.members for event in job.said(ev.GenerationStarted)]
    assert members == ["n0", "n1", "n2", "n3", "n4"]


def test_a_complaint_of_who_is_not_in_the_pending_plan_undoes_nothing() -> None:
    job = with_a_stranger()
    job.say(msg.Complaint(worker=w("n4"), generation=2, detail="x"))
    assert not job.last
    assert job.machine.record.pending is not None
