"""Tests of suspects after failed collectives, although all workers answer."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from machinery import Job, applied, attach, commit, hello, w

from holdfast.coordination.failures.suspects import (
    StateTransfers,
    Suspects,
    find_failed_transfers,
    find_lacking_members,
)
from holdfast.protocol import events as ev
from holdfast.protocol.messages import any_side as msg
from holdfast.protocol.plan import DecisionKind, GenerationPlan, Member, Phase
from holdfast.protocol.state import LiveSource

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


def test_after_a_broken_connection_the_same_members_retry_once() -> None:
    suspects = Suspects()
    complaints = dict([complaint("n2")])
    assert suspects.find_suspects(WORKERS, reports(*REDUCING), complaints, 4) == {}
    assert list(suspects.find_suspects(WORKERS, reports(*REDUCING), complaints, 4)) == ["n2"]


def test_a_commit_between_failures_clears_the_suspicion() -> None:
    suspects = Suspects()
    complaints = dict([complaint("n2")])
    for committed in (4, 5, 6):
        assert suspects.find_suspects(WORKERS, reports(*REDUCING), complaints, committed) == {}


def test_a_worker_that_computes_while_the_others_timed_out_is_the_suspect() -> None:
    complaints = dict([complaint("n0", timed_out=True), complaint("n2", timed_out=True)])
    standing = reports(Phase.REDUCING, Phase.COMPUTE, Phase.REDUCING, Phase.REDUCING)
    named = Suspects().find_suspects(WORKERS, standing, complaints, 4)
    assert list(named) == ["n1"]
    assert "'compute' of step 5" in named["n1"]


def test_a_worker_that_only_waits_longer_is_not_a_suspect() -> None:
    """The first complaint stopped the other workers, so their silence proves nothing."""
    complaints = dict([complaint("n3", timed_out=True)])
    assert list(Suspects().find_suspects(WORKERS, reports(*REDUCING), complaints, 4)) == ["n3"]


def test_of_two_mutually_unreachable_workers_the_later_is_removed() -> None:
    complaints = dict([complaint("n1", "n2", timed_out=True), complaint("n2", "n1", timed_out=True)])
    assert list(Suspects().find_suspects(WORKERS, reports(*REDUCING), complaints, 4)) == ["n2"]


def test_an_earlier_worker_is_removed_if_it_reaches_none_of_its_peers() -> None:
    """n0 is cut off and the job needs two nodes: n1 and n2 once alternated next to it forever, each blamed in turn."""
    suspects = Suspects()
    gone: list[str] = []
    for other in ("n1", "n2", "n1"):
        pair, complaints = (w("n0"), w(other)), [complaint("n0", other), complaint(other, "n0", timed_out=True)]
        standing = {worker: report for worker, report in reports(*REDUCING).items() if worker in pair}
        gone += suspects.find_suspects(pair, standing, dict(complaints), 4)
    assert gone == ["n1", "n0", "n0"]
    complaints = [complaint("n0", "n1", timed_out=True), complaint("n1", "n0")]
    standing = {worker: report for worker, report in reports(*REDUCING).items() if worker in (w("n0"), w("n1"))}
    named = suspects.find_suspects((w("n0"), w("n1")), standing, dict(complaints), 5)
    assert list(named) == ["n1"], "a step in between clears the suspicion"


def test_only_the_worker_cut_off_from_several_peers_is_removed() -> None:
    complaints = dict(
        [complaint("n0", "n1", timed_out=True), complaint("n2", "n1", timed_out=True), complaint("n3", "n1")]
    )
    assert list(Suspects().find_suspects(WORKERS, reports(*REDUCING), complaints, 4)) == ["n1"]


@given(
    phases=st.lists(st.sampled_from(list(Phase)), min_size=4, max_size=4),
    pairs=st.sets(st.tuples(st.sampled_from(NODES), st.sampled_from(NODES))),
    complainers=st.sets(st.sampled_from(NODES), min_size=1),
    late=st.booleans(),
)
def test_suspects_are_named_by_the_second_failure_and_some_node_stays(
    phases: list[Phase], pairs: set[tuple[str, str]], complainers: set[str], late: bool
) -> None:
    suspects = Suspects()
    cut = {node: [peer for a, peer in pairs if a == node] for node in complainers}
    complaints = dict(complaint(node, *cut[node], timed_out=late) for node in sorted(complainers))
    first = suspects.find_suspects(WORKERS, reports(*phases), complaints, 4)
    named = first or suspects.find_suspects(WORKERS, reports(*phases), complaints, 4)
    assert named
    assert set(named) < set(NODES)
    assert first or not late


def test_a_hung_training_thread_is_named_and_its_node_replaced() -> None:
    job = Job().start()
    job.step(1)
    job.deliver(msg.Complaint(worker=w("n0"), generation=1, detail="timed out after 120 s", timed_out=True))
    job.report("n0", 1, Phase.REDUCING)
    job.report("n1", 1, Phase.REDUCING)
    job.report("n2", 1, Phase.COMPUTE)
    (failure,) = job.emitted(ev.FailureDetected)
    assert (failure.node, failure.kind) == ("n2", "hang")
    assert job.sent(msg.Refused)[0].retry
    begin = job.orders(msg.Begin)[w("n0")]
    assert begin.plan.workers == (w("n0"), w("n1"))
    assert begin.decision.kind is DecisionKind.REDO


def test_a_new_node_is_not_grouped_with_nodes_that_timed_out() -> None:
    """n1 reaches no node: it would fail again with n3, and after that with n0."""
    job = Job().start()
    job.step(1)
    job.lose("n2")
    job.report("n0", 1, Phase.REDUCING)
    job.report("n1", 1, Phase.REDUCING)
    job.connect(hello("n3"))
    job.deliver(attach(w("n3")))
    job.deliver(msg.Complaint(worker=w("n0"), generation=2, detail="late", timed_out=True, unreachable=(w("n1"),)))
    job.report("n0", 1, Phase.ENTERING)
    job.report("n1", 1, Phase.ENTERING)
    assert job.orders(msg.Begin)[w("n0")].plan.workers == (w("n0"),)
    assert w("n3") not in job.orders(msg.Begin)


@pytest.mark.parametrize("phase", Phase)
def test_every_phase_leads_to_a_suspect(phase: Phase) -> None:
    late = {w("n0"): complaint("n0", timed_out=True)[1]}
    named = Suspects().find_suspects(WORKERS, reports(Phase.APPLYING, phase, Phase.APPLYING, Phase.APPLYING), late, 4)
    assert set(named) == ({"n0"} if phase is Phase.APPLYING else {"n1"})


def test_a_worker_that_timed_out_is_not_a_suspect_in_any_phase() -> None:
    complaints = dict([complaint("n0", timed_out=True), complaint("n3", timed_out=True)])
    standing = reports(Phase.REDUCING, Phase.COMPUTE, Phase.VOTED, Phase.VOTED)
    assert list(Suspects().find_suspects(WORKERS, standing, complaints, 4)) == ["n1"]


def test_an_unreachable_non_member_is_not_counted_as_evidence() -> None:
    complaints = dict([complaint("n1", "n2", "n9", timed_out=True), complaint("n2", "n1"), complaint("n3", "n9")])
    assert list(Suspects().find_suspects(WORKERS, reports(*REDUCING), complaints, 4)) == ["n2"]


def test_one_node_stays_although_every_node_has_a_late_worker() -> None:
    """n0's other worker has waited too. Without further evidence n0 is removed and n1 stays."""
    a, b, c = msg.worker_id("n0", 0, "a"), msg.worker_id("n0", 1, "a"), msg.worker_id("n1", 0, "a")
    phases = {a: Phase.REDUCING, b: Phase.COMPUTE, c: Phase.COMPUTE}
    standing = {
        worker: msg.Report(worker=worker, term=1, generation=1, applied=4, step=5, phase=phase)
        for worker, phase in phases.items()
    }
    late = {a: msg.Complaint(worker=a, generation=1, detail="late", timed_out=True)}
    assert list(Suspects().find_suspects((a, b, c), standing, late, 4)) == ["n0"]


def with_a_stranger() -> Job:
    """Return a job in which n3 is in the pending plan and n4 is in no plan yet."""
    job = Job().start()
    for node in ("n3", "n4"):
        job.connect(hello(node))
        job.deliver(attach(w(node)))
    return job


def test_a_complaint_of_a_non_member_is_ignored() -> None:
    """It has no report that could be evaluated."""
    job = with_a_stranger()
    stranger = complaint("n4", timed_out=True)[1]
    job.deliver(stranger)
    assert not job.last
    job.deliver(complaint("n0")[1])
    job.deliver(stranger)
    for node in ("n0", "n1", "n2"):
        job.report(node, 0)
    job.report("n3", None)
    ((*members,),) = [event.members for event in job.emitted(ev.GenerationStarted)]
    assert members == ["n0", "n1", "n2", "n3", "n4"]


def test_a_complaint_of_a_worker_outside_the_pending_plan_does_not_void_it() -> None:
    job = with_a_stranger()
    job.deliver(msg.Complaint(worker=w("n4"), generation=2, detail="x"))
    assert not job.last
    assert job.machine.record.pending is not None


# ---- members that lack the state ----


def newcomers(*nodes: str, **fields: Any) -> StateTransfers:
    return StateTransfers(lacking=frozenset(map(w, nodes)), **fields)


def test_of_two_mutually_unreachable_workers_the_one_without_state_is_removed() -> None:
    complaints = dict([complaint("n1", "n0", timed_out=True)])
    named = Suspects().find_suspects(WORKERS, reports(*REDUCING), complaints, 4, transfers=newcomers("n0"))
    assert list(named) == ["n0"]


def test_newcomers_unreachable_for_all_members_are_removed_before_a_member() -> None:
    complaints = dict([complaint("n0", "n2", "n3", timed_out=True)])
    one_holder = newcomers("n1", "n2", "n3")
    assert set(Suspects().find_suspects(WORKERS, reports(*REDUCING), complaints, 4, transfers=one_holder)) == {
        "n2",
        "n3",
    }
    other_holder = newcomers("n2", "n3")
    assert list(Suspects().find_suspects(WORKERS, reports(*REDUCING), complaints, 4, transfers=other_holder)) == ["n0"]
    needed = newcomers("n2", "n3", can_spare=lambda _node: False)
    assert set(Suspects().find_suspects(WORKERS, reports(*REDUCING), complaints, 4, transfers=needed)) == {"n2", "n3"}


def test_a_broken_link_between_members_with_state_explains_other_broken_links() -> None:
    complaints = dict([complaint("n1", "n0", "n3", timed_out=True), complaint("n0", "n1", timed_out=True)])
    named = Suspects().find_suspects(WORKERS, reports(*REDUCING), complaints, 4, transfers=newcomers("n3"))
    assert list(named) == ["n1"]


def test_a_member_that_is_late_because_it_sends_its_state_stays() -> None:
    complaints = dict([complaint("n0", timed_out=True)])
    standing = reports(Phase.REDUCING, Phase.APPLYING, Phase.REDUCING, Phase.ENTERING)
    standing[w("n1")] = msgspec.structs.replace(standing[w("n1")], step=4)
    standing[w("n3")] = msgspec.structs.replace(standing[w("n3")], step=1, applied=None)
    named = Suspects().find_suspects(WORKERS, standing, complaints, 4, transfers=newcomers("n3"))
    assert list(named) == ["n3"]


def test_without_other_evidence_a_member_without_the_state_is_removed_first() -> None:
    suspects, complaints = Suspects(), dict([complaint("n0"), complaint("n2")])
    transfers = newcomers("n2", "n3")
    assert suspects.find_suspects(WORKERS, reports(*REDUCING), complaints, 4, transfers=transfers) == {}
    assert list(suspects.find_suspects(WORKERS, reports(*REDUCING), complaints, 4, transfers=transfers)) == ["n2"]
    alone = dict([complaint("n0")])
    assert list(suspects.find_suspects(WORKERS, reports(*REDUCING), alone, 4, transfers=transfers)) == ["n3"]


def test_after_failed_transfers_a_bad_sender_is_removed_before_receivers() -> None:
    complaints = dict([complaint("n0")])
    failed = {w("n2"): {w("n0")}, w("n3"): {w("n0")}}
    first = newcomers("n2", "n3", failed=failed)
    assert Suspects().find_suspects(WORKERS, reports(*REDUCING), complaints, 4, transfers=first) == {}
    again = newcomers("n2", "n3", failed=failed, exhausted={w("n2")})
    named = Suspects().find_suspects(WORKERS, reports(*REDUCING), complaints, 4, transfers=again)
    assert named == {"n2": "it could not be sent the state by n0"}
    proven = newcomers("n2", "n3", failed=failed, exhausted={w("n2")}, suspects=["n1", "n0"])
    assert list(Suspects().find_suspects(WORKERS, reports(*REDUCING), complaints, 4, transfers=proven)) == ["n0"]
    needed = newcomers("n2", "n3", failed=failed, exhausted={w("n2")}, suspects=["n0"], can_spare=lambda _node: False)
    assert list(Suspects().find_suspects(WORKERS, reports(*REDUCING), complaints, 4, transfers=needed)) == ["n2"]


def joined_plan() -> GenerationPlan:
    """Return a plan in which n0 and n1 send the state to n2 and n3."""
    members = tuple(Member(worker=worker, host="h", state_port=1) for worker in WORKERS)
    source = LiveSource(members=(w("n0"), w("n1")))
    return GenerationPlan(term=1, generation=1, members=members, sources={w("n2"): source, w("n3"): source})


def transfer_complaint(node: str, *peers: str) -> msg.Complaint:
    return msg.Complaint(worker=w(node), generation=1, detail="reset", transfer_peers=tuple(map(w, peers)))


def test_a_receivers_complaint_overrides_that_of_its_senders() -> None:
    plan = joined_plan()
    assert find_failed_transfers(plan, [transfer_complaint("n0", "n2"), transfer_complaint("n1", "n2", "n3")]) == {
        w("n2"): {w("n0"), w("n1")},
        w("n3"): {w("n1")},
    }
    told = [transfer_complaint("n0", "n2"), transfer_complaint("n2", "n1")]
    assert find_failed_transfers(plan, told) == {w("n2"): {w("n1")}}
    between_members = [transfer_complaint("n0", "n1"), transfer_complaint("n2", "n3")]
    assert find_failed_transfers(plan, between_members) == {}


@pytest.mark.parametrize("trained", [False, True])
def test_an_unreachable_node_with_only_the_initial_state_is_removed(*, trained: bool) -> None:
    """Because only this node had the state of step 0, the other nodes were once removed in turn until the job ended."""
    job, at = Job().start(), 0
    if trained:
        job.step(1)
        at = 1
    job.lose("n1")
    job.lose("n2")
    for node in ("n3", "n4"):
        job.connect(hello(node))
        job.deliver(attach(w(node)))
    job.report("n0", at)
    plan = job.machine.record.plan
    assert plan is not None
    assert set(plan.workers) == {w("n0"), w("n3"), w("n4")}
    cut = {"n0": ("n3", "n4"), "n3": ("n0",), "n4": ("n0",)}
    for node, peers in cut.items():
        unreachable = tuple(map(w, peers))
        job.deliver(
            msg.Complaint(
                worker=w(node), generation=plan.generation, detail="late", timed_out=True, unreachable=unreachable
            )
        )
    job.report("n0", at, Phase.ENTERING)
    job.report("n3", None, Phase.ENTERING, fresh=True)
    job.report("n4", None, Phase.ENTERING, fresh=True)
    blamed = [event.node for event in job.emitted(ev.FailureDetected)]
    plan = job.machine.record.plan
    assert plan is not None
    if trained:
        assert blamed == ["n4", "n3"], "n0 has the only copy of step 1"
        assert plan.workers == (w("n0"),)
    else:
        assert blamed == ["n0"]
        assert plan.workers == (w("n3"), w("n4"))


def test_members_that_lack_the_state_are_found_from_reports() -> None:
    standing = reports(*REDUCING)
    standing[w("n2")] = msgspec.structs.replace(standing[w("n2")], applied=None)
    assert find_lacking_members(joined_plan(), standing, 4) == {w("n2")}
    standing[w("n3")] = msgspec.structs.replace(standing[w("n3")], applied=3)
    assert find_lacking_members(joined_plan(), standing, 4) == {w("n2"), w("n3")}


def join_one(job: Job) -> None:
    """Make n9 join after the first step; all members will send it the state."""
    job.connect(hello("n9"))
    job.deliver(attach(w("n9")))
    pending = job.machine.record.pending
    assert pending is not None
    for worker in pending.workers:
        job.deliver(msg.Prepared(worker=worker, generation=pending.generation))
    for index in range(job.nodes):
        job.deliver(applied(w(f"n{index}"), 1, 2, commit(1.0, msg.Flag.SWAP), world=job.nodes))


def fail_transfer(job: Job, sender: str) -> None:
    """Make a member fail to send the state to the newcomer; all answer Stop."""
    detail = "state for n9 could not be sent: [Errno 111] Connection refused"
    generation = job.machine.record.generation
    job.deliver(msg.Complaint(worker=w(sender), generation=generation, detail=detail, transfer_peers=(w("n9"),)))
    job.report("n9", None, Phase.ENTERING, fresh=True)
    for index in range(job.nodes):
        job.report(f"n{index}", 2, Phase.REDUCING)


@pytest.mark.parametrize("nodes", [1, 3])
def test_a_newcomer_that_cannot_receive_the_state_is_removed_not_the_members(nodes: int) -> None:
    """A forgotten --advertise once destroyed a healthy job: each sender was blamed in turn, and all steps were lost."""
    job = Job(nodes=nodes).start()
    job.step(1)
    join_one(job)
    for _ in range(2):
        plan = job.machine.record.plan
        assert plan is not None
        fail_transfer(job, msg.node_of(plan.senders(w("n9"))[0]))
    assert [event.node for event in job.events if isinstance(event, ev.NodeLeft)] == ["n9"]
    assert {event.node for event in job.events if isinstance(event, ev.FailureDetected)} == {"n9"}
    plan = job.machine.record.plan
    assert plan is not None
    assert set(plan.workers) == {w(f"n{index}") for index in range(nodes)}


def test_the_second_transfer_uses_another_sender_if_there_is_one() -> None:
    job = Job(nodes=2).start()
    job.step(1)
    join_one(job)
    plan = job.machine.record.plan
    assert plan is not None
    assert plan.senders(w("n9")) == (w("n0"), w("n1"))
    fail_transfer(job, "n0")
    plan = job.machine.record.plan
    assert plan is not None
    assert plan.senders(w("n9")) == (w("n1"),)
    job.deliver(msg.Entered(worker=w("n9"), generation=plan.generation, applied=2, received_bytes=9))
    assert not job.machine.members.transfers.tries("n9")


def test_a_second_complaint_of_a_member_does_not_hide_its_failed_transfer() -> None:
    job = Job(nodes=1).start()
    job.step(1)
    join_one(job)
    generation = job.machine.record.generation
    job.deliver(msg.Complaint(worker=w("n0"), generation=generation, detail="refused", transfer_peers=(w("n9"),)))
    job.deliver(msg.Complaint(worker=w("n0"), generation=generation, detail="a peer is gone"))
    assert job.machine.context.interruption.complaints[w("n0")].transfer_peers == (w("n9"),)
