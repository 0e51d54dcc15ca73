"""Tests of escalation: number of tries, quarantined and returning nodes, and rank holds for restarted processes."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import msgspec
import pytest
from machinery import Job, attach, hello, w

from holdfast.coordination.failures.budget import WINDOW_S
from holdfast.coordination.failures.escalation import MAX_RETRIES
from holdfast.coordination.generations.plan_distribution import MAX_ASKED
from holdfast.coordination.inputs import Undrain
from holdfast.coordination.recovery.rank_hold import RankHold
from holdfast.errors import EXIT_REFUSED, UnreachableError
from holdfast.protocol import events as ev
from holdfast.protocol.failures import FailureKind
from holdfast.protocol.job_spec import JobSpec, RecoverySpec
from holdfast.protocol.messages import any_side as msg
from holdfast.protocol.plan import Phase

STRICT = JobSpec(recovery=RecoverySpec(max_restarts=1))
HOLD = JobSpec(recovery=RecoverySpec(on_process_failure="hold"))


def coming(node: str, worker: str, *, host: str = "", session: str = "0" * 8, agent: int = 1) -> msg.Hello:
    return msgspec.structs.replace(hello(node, session=session), host=host, agent_pid=agent, kept=(attach(worker),))


def report_steps(job: Job, at: int = 0) -> None:
    """Make n0 and n1 report their steps, if asked."""
    for node in ("n0", "n1"):
        if job.machine.context.interruption.stop is not None:
            job.report(node, at)


def down(node: str, detail: str = "SIGKILL", kind: FailureKind = FailureKind.PROCESS_EXIT) -> msg.WorkerDown:
    return msg.WorkerDown(worker=w(node), kind=kind, detail=detail, exit_code=-9)


def test_a_failure_event_contains_the_number_of_tries() -> None:
    job = Job().start()
    tries: list[int] = []
    for number in range(3):
        job.now += 10.0
        job.lose("n2")
        tries += [failure.tries for failure in job.emitted(ev.FailureDetected)]
        report_steps(job)
        job.connect(coming("n2", f"n2/0/{number}"))
    assert tries == [1, 2, 3]
    job.now += 2 * WINDOW_S
    job.lose("n2")
    assert job.emitted(ev.FailureDetected)[0].tries == 1


def test_a_node_that_fails_too_often_is_quarantined_until_undrained() -> None:
    job = Job(spec=STRICT).start()
    for number in range(2):
        job.now += 10.0
        job.lose("n2")
        report_steps(job)
        job.connect(coming("n2", f"n2/0/{number}", host="rack7"))
    (left,) = [event for event in job.events if isinstance(event, ev.NodeLeft) and event.reason == "quarantined"]
    assert left.detail == "it has failed 2 times in 300 s, most recently: connection_lost"
    (refused,) = job.sent(msg.Refused)
    assert (refused.exit_code, refused.retry) == (EXIT_REFUSED, False)
    assert "node n2 is quarantined: it has failed 2 times" in refused.why
    job.boot(takeover=True)
    job.connect(coming("n2", "n2/0/9"))
    assert job.sent(msg.Refused)[0].exit_code == EXIT_REFUSED, "a later coordinator refuses it too"
    with pytest.raises(
        UnreachableError, match=r"n7 is not in the job, and neither drained nor quarantined: .* can be undrained: n2"
    ):
        job.feed(Undrain("n7"))
    job.now += 50.0
    job.feed(Undrain("n2"))
    assert job.machine.record.quarantined == ()
    job.connect(coming("n2", "n2/0/9"))
    (repaired,) = [event for event in job.events if isinstance(event, ev.NodeRepaired) and event.repair == "ticket"]
    assert (repaired.node, repaired.repair_s) == ("n2", pytest.approx(50.0))


def test_nodes_lost_together_are_not_quarantined() -> None:
    job = Job(nodes=4, spec=STRICT).start()
    for number in range(4):
        job.now += 10.0
        for node in ("n2", "n3"):
            job.lose(node)
        report_steps(job)
        for node in ("n2", "n3"):
            job.connect(coming(node, f"{node}/0/{number}"))
    assert job.machine.record.quarantined == ()
    assert [e.tries for e in job.events if isinstance(e, ev.FailureDetected)] == [1, 0] * 4


def test_a_replaced_machine_starts_with_an_empty_failure_count() -> None:
    job = Job(spec=STRICT).start()
    for number in range(4):
        job.now += 10.0
        job.lose("n2")
        report_steps(job)
        job.connect(coming("n2", f"n2/0/{number}", agent=100 + number))
    assert job.machine.record.quarantined == ()


@pytest.mark.parametrize("asks", [True, False])
def test_failed_joins_are_counted_by_node_name_across_agent_processes(asks: bool) -> None:
    """Such a node once kept all other newcomers out, because a replaced machine starts with an empty count."""
    job = Job().start()
    undone = 0
    for number in range(5 * (RecoverySpec().max_restarts + 1)):
        for node in ("n0", "n1", "n2"):
            job.deliver_from(node, msg.Heartbeat())
        job.tick(2.0)
        job.connect(coming("n7", f"n7/0/{number}", agent=100 + number, session=f"{number:08x}"))
        pending = job.machine.record.pending
        if pending is None:
            assert job.sent(msg.Refused)[0].exit_code == EXIT_REFUSED
            continue
        if asks:
            for _ in range(MAX_ASKED + 1):
                job.deliver_from("n7", msg.AskPlan(generation=pending.generation))
        else:
            job.lose("n7")
        undone += job.machine.record.pending is None
    assert undone == RecoverySpec().max_restarts + 1
    job.connect(coming("n8", w("n8"), host="another"))
    assert job.orders(msg.Prepare).keys() == {w(node) for node in ("n0", "n1", "n2", "n8")}, "other nodes still join"


def test_a_job_that_has_not_begun_ends_if_all_nodes_raise_the_same_error() -> None:
    job, raised = Job(nodes=2, spec=JobSpec(max_nodes=2)).boot(), msg.ScriptError(place="train.py, line 1")
    for node, last in (("n0", False), ("n1", True)):
        job.connect(msgspec.structs.replace(hello(node), host="rack7"))
        job.deliver_from(node, msgspec.structs.replace(down(node, "out of luck", FailureKind.EXCEPTION), error=raised))
        if not last:
            job.deliver_from(node, msg.Leave(reason="exhausted", detail="its workers fail again and again"))
        assert (job.machine.context.job_end.over is not None) == last
    assert "out of luck (on nodes n0, n1)" in job.machine.context.job_end.over.why


def exhausted(why: str = "its workers fail again and again") -> msg.Leave:
    return msg.Leave(reason="exhausted", detail=why)


def quarantines(job: Job) -> list[str]:
    return [event.node for event in job.events if isinstance(event, ev.NodeLeft) and event.reason == "quarantined"]


def raises(job: Job, node: str, number: int, error: msg.ScriptError) -> None:
    """Make the script of a node's newest worker raise, before or after it has attached."""
    if number % 2:
        job.deliver(attach(f"{node}/0/{number}"))
    died = msgspec.structs.replace(down(node, "oops", FailureKind.EXCEPTION), worker=f"{node}/0/{number}")
    job.deliver_from(node, msgspec.structs.replace(died, exit_code=1, error=error))


@pytest.mark.parametrize("seed", range(40))
def test_a_script_that_raises_on_all_nodes_quarantines_no_node(seed: int) -> None:
    """On a slow machine, one node once used up its tries and was quarantined before another had started."""
    rng, error = Random(seed), msg.ScriptError(place="ValueError (train.py, line 1)", traceback="Traceback: oops")
    job = Job(nodes=3, spec=JobSpec(max_nodes=3)).boot()
    tries = dict.fromkeys(("n0", "n1", "n2"), 0)
    while job.machine.over is None:
        node = rng.choice([*tries])
        job.now += rng.choice((0.01, 1.0, 2 * WINDOW_S))
        if rng.random() < 0.1:
            job.boot(takeover=True)
        if node not in job.machine.members.nodes:
            job.connect(hello(node))
        raises(job, node, tries[node], error)
        tries[node] += 1
        if tries[node] > RecoverySpec().max_restarts and job.machine.over is None:
            job.deliver_from(node, exhausted())
            del tries[node]
    (failed,) = [event for event in job.events if isinstance(event, ev.JobFailed)]
    why, _, nodes = failed.why.removesuffix(")").partition(" (on nodes ")
    assert (why, sorted(nodes.split(", ")), failed.traceback) == ("oops", ["n0", "n1", "n2"], "Traceback: oops")
    assert quarantines(job) == []
    assert job.machine.record.quarantined == ()


def test_an_exhausted_node_is_quarantined_once_the_others_train_without_it() -> None:
    job = Job().start()
    job.step(1)
    job.deliver_from("n2", exhausted("oops"))
    (left,) = job.emitted(ev.NodeLeft)
    assert (left.node, left.reason, left.detail) == ("n2", "failed", "oops")
    report_steps(job, 1)
    for node in ("n0", "n1"):
        job.deliver(msg.Entered(worker=w(node), generation=2, applied=1))
    job.step(2, "n0", "n1", generation=2)
    assert quarantines(job) == [], "that step may have been in progress"
    job.boot(takeover=True)
    for node in ("n0", "n1"):
        job.connect(hello(node, (attach(w(node)), msg.Entered(worker=w(node), generation=2, applied=2))))
    job.step(3, "n0", "n1", generation=2)
    assert quarantines(job) == ["n2"]
    (asked,) = job.emitted(ev.ActionRequested)
    assert asked.command == "holdfast undrain n2"
    assert [one.node for one in job.machine.record.quarantined] == ["n2"]
    assert not job.machine.record.given_up


@pytest.mark.parametrize("undrained", [True, False])
def test_an_exhausted_node_that_rejoins_first_is_not_quarantined(undrained: bool) -> None:
    job = Job().start()
    job.deliver_from("n2", exhausted("oops"))
    report_steps(job)
    if undrained:
        job.feed(Undrain("n2"))
    job.connect(coming("n2", "n2/0/b", session="c" * 8, agent=9))
    for node in ("n0", "n1"):
        job.deliver(msg.Entered(worker=w(node), generation=2, applied=0))
    for step in (1, 2, 3):
        job.step(step, "n0", "n1", generation=2)
    assert [event.step for event in job.events if isinstance(event, ev.StepCommitted)] == [1, 2, 3]
    assert quarantines(job) == []


def test_a_job_waiting_for_an_exhausted_node_reports_it_once_all_others_joined() -> None:
    job = Job(nodes=2, spec=JobSpec(max_nodes=2)).boot()
    job.connect(hello("n0"))
    job.deliver_from("n0", exhausted("oops"))
    job.tick(0.2)
    assert not job.emitted(ev.JobWaiting)
    job.connect(hello("n1", (attach(w("n1")),)))
    job.tick(0.2)
    (waits,) = job.emitted(ev.JobWaiting)
    assert (waits.nodes, waits.why) == (1, "node n0 is out: oops")


def lost(job: Job, node: str) -> None:
    """Lose a node more often than it may be lost."""
    job.now += 10.0
    job.lose(node)


def leaves(job: Job, node: str) -> None:
    job.deliver_from(node, msg.Leave(reason="quarantined", detail="ecc_error: x"))


def gives_up(job: Job, node: str) -> None:
    job.deliver_from(node, exhausted())


@pytest.mark.parametrize("last", [lost, leaves, gives_up])
@pytest.mark.parametrize("first", [lost, leaves, gives_up])
def test_the_job_ends_when_its_last_node_is_out_for_any_reason(
    first: Callable[[Job, str], None], last: Callable[[Job, str], None]
) -> None:
    """If the last node was lost too often, the job once waited forever."""
    job = Job(nodes=2, spec=JobSpec(recovery=RecoverySpec(max_restarts=0))).start(saves=True)
    first(job, "n0")
    assert job.machine.over is None
    last(job, "n1")
    assert job.machine.over is not None
    assert job.machine.over.why.startswith("the last node, n1, is ")


@pytest.mark.parametrize("gone_first", [True, False])
def test_a_job_waits_for_a_lost_node_that_may_return(gone_first: bool) -> None:
    job = Job(nodes=2).start(saves=True)
    first, last = (lost, leaves) if gone_first else (leaves, lost)
    first(job, "n0")
    last(job, "n1")
    assert job.machine.over is None
    job.tick(0.2)
    assert job.emitted(ev.JobWaiting)


def test_a_job_that_has_not_begun_ends_once_all_its_nodes_are_quarantined() -> None:
    job = Job(nodes=2, spec=JobSpec(max_nodes=2)).boot()
    for node, last in (("n0", False), ("n1", True)):
        job.connect(msgspec.structs.replace(hello(node), host="rack7"))
        job.deliver_from(node, msg.Leave(reason="quarantined", detail="ecc_error: x"))
        assert (job.machine.context.job_end.over is not None) == last


def test_a_host_is_quarantined_with_its_node_unless_others_are_on_it() -> None:
    job = Job(nodes=2).boot()
    job.connect(coming("n0", w("n0"), host="shared"))
    job.connect(coming("n1", w("n1"), host="shared"))
    job.connect(coming("n2", w("n2"), host="alone"))
    for node in ("n1", "n2"):
        job.deliver_from(node, msg.Leave(reason="quarantined", detail="ecc_error: x"))
    assert [(one.node, one.host) for one in job.machine.record.quarantined] == [("n1", ""), ("n2", "alone")]
    job.connect(coming("n3", w("n3"), host="shared"))
    assert not job.sent(msg.Refused)
    job.connect(coming("n4", w("n4"), host="alone"))
    assert "alone, the host of node n2, is quarantined" in job.sent(msg.Refused)[0].why


def test_an_unfit_node_is_refused_and_quarantined() -> None:
    job = Job().start()
    job.connect(msgspec.structs.replace(hello("n3"), unfit="disk: 3 MiB are left"))
    (left,) = job.emitted(ev.NodeLeft)
    assert (left.node, left.reason, left.detail) == ("n3", "quarantined", "disk: 3 MiB are left")
    assert job.sent(msg.Refused)[0].exit_code == EXIT_REFUSED
    assert "n3" not in job.machine.members.nodes


@pytest.mark.parametrize(
    ("off", "uncertain_s", "told"),
    [(-86_400.0, 0.01, -86_400.0), (0.25, 0.01, 0.25), (7200.0, 3.0, 7200.0), (-2.25, 2.5, 0.0), (2.25, 2.5, 0.0)],
)
def test_clock_offsets_are_reported_and_affect_no_decision(off: float, uncertain_s: float, told: float) -> None:
    """Nodes of a loaded machine were once "2.3 s behind", which was only the delay of their first messages."""
    job = Job(nodes=2).boot()
    for node in ("n0", "n1"):
        shown = job.now + off if node == "n1" else job.now
        job.connect(msgspec.structs.replace(hello(node), clock=shown))
        (welcome,) = job.sent(msg.Welcome)
        job.deliver_from(node, msg.ClockOffset(ahead_s=shown - welcome.time, uncertainty_s=uncertain_s))
        job.deliver(attach(w(node)))
    job.tick(0.2)
    joined = [node for event in job.events if isinstance(event, ev.NodesJoined) for node in event.nodes]
    assert {node.node: node.clock_off_s for node in joined} == {"n0": 0.0, "n1": told}
    for node in ("n0", "n1"):
        job.deliver(msg.Entered(worker=w(node), generation=1, applied=0))
    job.step(1, "n0", "n1")
    assert [event.step for event in job.events if isinstance(event, ev.StepCommitted)] == [1]
    assert not [event for event in job.events if isinstance(event, ev.FailureDetected | ev.NodeLeft)]


def test_an_automatic_repair_is_reported_with_its_duration() -> None:
    job = Job().start()
    job.lose("n2")
    report_steps(job)
    job.now += 7.0
    job.connect(coming("n2", "n2/0/b"))
    (repaired,) = [event for event in job.events if isinstance(event, ev.NodeRepaired)]
    assert (repaired.node, repaired.repair, repaired.repair_s) == ("n2", "automatic", pytest.approx(7.0))


def broken(job: Job, step: int, detail: str = "reset by peer") -> None:
    """Make a collective fail at n1 in the current generation, and all nodes report their steps."""
    generation = job.machine.record.generation
    job.deliver(msg.Complaint(worker=w("n1"), generation=generation, detail=detail))
    for node in ("n0", "n1", "n2"):
        job.report(node, step, Phase.REDUCING)


def test_repeatedly_broken_links_remove_a_node_although_steps_are_committed() -> None:
    job = Job().start()
    for step in range(1, MAX_RETRIES + 2):
        job.step(step, "n0", "n1", "n2", generation=step)
        broken(job, step)
        for node in ("n0", "n1", "n2"):
            if job.machine.members.worker(w(node)) is not None:
                job.deliver(msg.Entered(worker=w(node), generation=step + 1, applied=step))
    failures = [event for event in job.events if isinstance(event, ev.FailureDetected)]
    assert [failure.severity for failure in failures] == [3] * (MAX_RETRIES + 1) + [1]
    assert [failure.tries for failure in failures[:-1]] == list(range(1, MAX_RETRIES + 2))
    assert failures[-1].node == "n1"
    assert "n1" not in job.machine.members.nodes


def test_a_member_with_a_hardware_fault_in_its_complaint_is_quarantined() -> None:
    job = Job().start()
    job.step(1)
    broken(job, 1, "NCCL error: uncorrectable NVLink error detected during the execution")
    (failure,) = job.emitted(ev.FailureDetected)
    assert (failure.node, failure.category, failure.severity) == ("n1", "nvlink_error", 1)
    assert [one.node for one in job.machine.record.quarantined] == ["n1"]
    (end,) = job.sent(msg.EndNode)
    assert end.alone


# ---- rank holds ----


def held(job: Job, node: str = "n1") -> None:
    """Make a worker die; the others report their steps and wait."""
    job.deliver_from(node, down(node))
    for other in {"n0", "n1", "n2"} - {node}:
        job.report(other, 1, summed=(0,) if other == "n0" else ())
    assert not job.orders(msg.Begin)
    assert job.machine.context.interruption.stop is not None


def test_a_rank_is_held_for_the_restarted_process() -> None:
    job = Job(spec=HOLD).start()
    job.step(1)
    held(job)
    job.deliver(attach("n1/0/b"), 0.2)
    begins = job.orders(msg.Begin)
    assert begins[w("n0")].plan.workers == (w("n0"), "n1/0/b", w("n2"))
    assert begins[w("n0")].plan.sources.keys() == {"n1/0/b"}
    assert begins[w("n0")].assignment == ((0, 3), (1, 4), (2, 5))


def test_a_rank_hold_ends_after_a_timeout() -> None:
    job = Job(spec=HOLD).start()
    job.step(1)
    held(job)
    job.tick(0.9)
    assert not job.orders(msg.Begin)
    job.tick(0.2)
    assert set(job.orders(msg.Begin)) == {w("n0"), w("n2")}


def test_a_rank_hold_ends_when_the_node_is_lost() -> None:
    job = Job(spec=HOLD).start()
    job.step(1)
    held(job)
    job.lose("n1")
    assert set(job.orders(msg.Begin)) == {w("n0"), w("n2")}


def test_ranks_are_not_held_by_default() -> None:
    job = Job().start()
    job.step(1)
    job.deliver_from("n1", down("n1"))
    for other in ("n0", "n2"):
        job.report(other, 1)
    assert set(job.orders(msg.Begin)) == {w("n0"), w("n2")}


def test_the_rank_hold_timeout_follows_measured_restart_times() -> None:
    job = Job(spec=HOLD).start()
    kept = RankHold(job.machine.transaction, job.machine.config)
    kept.on_process_attached("n0/0/b", job.now - 4.0)
    kept.hold_ranks([w("n1")])
    job.machine.transaction.now += 11.9
    assert kept.waits
    job.machine.transaction.now += 0.2
    assert not kept.waits
