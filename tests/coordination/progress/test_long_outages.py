"""Tests of thousands of steps that were applied without a coordinator."""

from __future__ import annotations

import tracemalloc

import msgspec
import pytest
from machinery import BATCH, Job, applied, attach, commit, hello, w

from holdfast.coordination.progress.announced import AT_ONCE
from holdfast.coordination.progress.ledger import MAX_BEYOND, StepLedger
from holdfast.protocol import events as ev
from holdfast.protocol.failures import FailureKind
from holdfast.protocol.messages import any_side as msg

STEPS = 3 * AT_ONCE


def pages(node: str) -> list[msg.AppliedSteps]:
    lanes = msg.CompactCommit(**msgspec.structs.asdict(commit()))
    steps = [msg.KeptStep(step=step, generation=1, world=2, time=0.0, commit=lanes) for step in range(2, STEPS + 1)]
    tops = {w(node): STEPS}
    size = msg.PAGE_STEPS
    return [msg.AppliedSteps(workers=tops, steps=tuple(steps[at : at + size])) for at in range(0, len(steps), size)]


def test_a_node_that_reports_implausibly_many_steps_is_expelled() -> None:
    """Otherwise the coordinator would count every claimed step."""
    job = Job(nodes=3).start()
    job.deliver_from("n0", msg.AppliedSteps(workers={w("n0"): 1 << 53}, given_up=1 << 53))
    assert [failure.node for failure in job.emitted(ev.FailureDetected)] == ["n0"]
    job.report("n1", 1 << 53)
    assert [failure.node for failure in job.emitted(ev.FailureDetected)] == ["n1"]
    job.report("n2", 0)
    assert [event.members for event in job.emitted(ev.GenerationStarted)] == [("n2",)]


def test_a_report_of_more_steps_than_the_time_allows_expels_the_node() -> None:
    """Otherwise all steps in between would be written to the journal, and training would skip them."""
    job = Job(nodes=3).start()
    job.step(1)
    job.tick(0.5)
    job.lose("n2")
    job.report("n0", 1_000_000)
    assert [failure.node for failure in job.emitted(ev.FailureDetected)] == ["n0"]
    job.report("n1", 1)
    assert [event.members for event in job.emitted(ev.GenerationStarted)] == [("n1",)]


def test_after_an_outage_as_many_steps_are_accepted_as_its_time_allows() -> None:
    before = Job(nodes=2).start()
    before.step(1)
    for top, expelled in ((100_000, []), (10_000_000, ["n0"])):
        job = Job(nodes=2, records=before.records[:], events=before.events[:], now=before.now + 300.0)
        job.boot(takeover=True)
        stands = (attach(w("n0")), msg.Entered(worker=w("n0"), generation=1, applied=top))
        job.connect(hello("n0", stands, term=1))
        assert [failure.node for failure in job.emitted(ev.FailureDetected)] == expelled


def test_more_steps_are_accepted_if_the_time_of_the_outage_is_unknown() -> None:
    """A clock was set back, the previous step result is unknown, or some nodes missed a rollback."""
    before = Job(nodes=2).start()
    before.step(1)
    job = Job(nodes=2, records=before.records, events=before.events, now=before.now - 50.0).boot(takeover=True)
    job.connect(hello("n0", (attach(w("n0")), msg.Entered(worker=w("n0"), generation=1, applied=1_000_000)), term=1))
    assert not job.emitted(ev.FailureDetected)
    ledger = StepLedger()
    ledger.give_up_to(100_000, BATCH)
    ledger.release(up_to=100_000)
    ledger.reset(10)
    assert ledger.plausible(100_001, 0.1)
    assert not ledger.plausible(1_000_000, 0.1)


def test_steps_with_lost_results_do_not_make_later_steps_implausible() -> None:
    """The time of such a step is unknown; later steps may have taken most of the outage."""
    before = Job(nodes=2).start()
    before.step(1)
    job = Job(nodes=2, records=before.records, events=before.events, now=before.now + 3600.0).boot(takeover=True)
    top = 1_000_000
    for node in ("n0", "n1"):
        job.connect(hello(node, (attach(w(node)), msg.Entered(worker=w(node), generation=1, applied=0)), term=1))
    for node in ("n0", "n1"):
        job.deliver_from(node, msg.AppliedSteps(workers={w(node): top}, given_up=3 * AT_ONCE))
    assert job.emitted(ev.StepCommitted)
    job.deliver_from("n0", msg.AppliedSteps(workers={w("n0"): top}, given_up=top))
    assert not job.emitted(ev.FailureDetected)


@pytest.mark.parametrize(("steps", "waited_for"), [(msg.PAGE_STEPS, True), (1, False)])
def test_a_report_in_full_pages_is_awaited_and_one_in_small_pieces_is_not(steps: int, waited_for: bool) -> None:
    job = Job(nodes=2, report_timeout_s=5.0).start()
    job.step(1)
    job.lose("n1")
    lanes = msg.CompactCommit(**msgspec.structs.asdict(commit()))
    for page in range(5):
        first = 2 + page * steps
        told = range(first, first + steps)
        kept = tuple(msg.KeptStep(step=step, generation=1, world=2, time=0.0, commit=lanes) for step in told)
        job.tick(1.4)
        job.deliver_from("n0", msg.AppliedSteps(workers={w("n0"): told[-1]}, steps=kept))
    assert ("n0" in job.machine.members.nodes) is waited_for


ABSURD = (1 << 64) - 1
KEPT = msg.KeptStep(
    step=ABSURD, generation=1, world=3, time=0.0, commit=msg.CompactCommit(**msgspec.structs.asdict(commit()))
)


@pytest.mark.parametrize(
    "claim",
    [
        msg.Heartbeat(generation=1, applied=(ABSURD,)),
        msg.Heartbeat(generation=1, applied=(1, ABSURD)),
        msg.AppliedSteps(workers={w("n2"): ABSURD}, steps=(msgspec.structs.replace(KEPT, step=1),)),
        msg.AppliedSteps(workers={w("n2"): 1}, steps=(KEPT,)),
        msg.FromWorker(message=applied(w("n2"), 1, ABSURD)),
        msg.FromWorker(message=msg.Entered(worker=w("n2"), generation=1, applied=ABSURD)),
        msg.FromWorker(message=msg.Finished(worker=w("n2"), generation=1, step=ABSURD)),
        msg.WorkerDown(
            worker=w("n2"), kind=FailureKind.PROCESS_EXIT, detail="", exit_code=0, final=True, applied=ABSURD
        ),
    ],
)
def test_a_node_at_an_impossible_step_is_expelled_and_the_job_finishes(claim: msg.AgentMessage) -> None:
    """A reported step only grows, so the job would wait forever for all nodes to reach its last step."""
    job = Job(nodes=3).start()
    job.deliver_from("n2", claim)
    assert [failure.node for failure in job.emitted(ev.FailureDetected)] == ["n2"]
    for node in ("n0", "n1"):
        job.report(node, 0)
    for node in ("n0", "n1"):
        job.deliver(msg.Entered(worker=w(node), generation=2, applied=0))
    job.step(1, "n0", "n1", generation=2)
    for node in ("n0", "n1"):
        job.deliver(msg.Finished(worker=w(node), generation=2, step=1))
    assert job.machine.record.outcome == "finished"


def test_a_result_of_an_impossible_step_expels_the_node() -> None:
    job = Job(nodes=3).start()
    job.lose("n2")
    job.report("n0", 0, passed=msg.PassedStep(step=ABSURD, commit=commit()))
    assert [failure.node for failure in job.emitted(ev.FailureDetected)] == ["n0"]
    job.report("n1", 0)
    assert [event.members for event in job.emitted(ev.GenerationStarted)] == [("n1",)]


def test_no_message_of_a_node_counts_after_its_hello_expelled_it() -> None:
    job = Job(nodes=3).start()
    absurd = msg.AppliedSteps(workers={w("n3"): 1}, given_up=ABSURD)
    job.connect(hello("n3", (absurd, attach(w("n3")), absurd)))
    assert [failure.node for failure in job.emitted(ev.FailureDetected)] == ["n3"]
    assert job.machine.members.nodes.keys() == {"n0", "n1", "n2"}
    assert job.machine.members.worker(w("n3")) is None


def test_the_cost_of_an_announcement_does_not_depend_on_the_length_of_the_outage() -> None:
    """Millions of steps may be given up, or claimed falsely; each announcement processes a limited number."""
    ledger, top = StepLedger(), MAX_BEYOND
    report = msg.Report(worker=w("n0"), term=1, generation=1, applied=top, step=top + 1, phase=msg.Phase.COMPUTE)
    ledger.follow(1, [w("n0")])
    tracemalloc.start()
    for _ in range(100):
        ledger.give_up_to(top, BATCH)
        ledger.add_final_reports([report], BATCH)
    taken = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert taken < 1 << 16
    assert [done.step for done in ledger.release(AT_ONCE)] == list(range(1, AT_ONCE + 1))


def test_a_result_in_a_report_counts_for_a_step_that_was_given_up() -> None:
    ledger = StepLedger()
    ledger.follow(1, [w("n0")])
    ledger.give_up_to(2, BATCH)
    passed = msg.PassedStep(step=2, commit=commit(3.0))
    ledger.add_final_reports(
        [msg.Report(worker=w("n0"), term=1, generation=1, applied=2, step=3, passed=passed, phase=msg.Phase.COMPUTE)],
        BATCH,
    )
    first, second = ledger.release()
    assert first.commit.sample_hashes < 0
    assert second.commit == commit(3.0)


def test_filled_in_steps_that_are_undone_are_filled_in_again() -> None:
    ledger = StepLedger()
    ledger.give_up_to(8, BATCH)
    ledger.undo_after(3)
    ledger.give_up_to(6, BATCH)
    assert [known.step for known in ledger.unannounced] == [1, 2, 3, 4, 5, 6]
    ledger.reset(1)
    ledger.give_up_to(4, BATCH)
    assert [known.step for known in ledger.unannounced] == [2, 3, 4]


def test_the_steps_of_an_outage_are_announced_over_several_records() -> None:
    before = Job(nodes=2).start()
    before.step(1)
    job = Job(nodes=2, records=before.records, events=before.events, now=before.now + 1000.0).boot(takeover=True)
    job.connect(hello("n0", (attach(w("n0")), msg.Entered(worker=w("n0"), generation=1, applied=0)), term=1))
    for page in pages("n0"):
        job.deliver_from("n0", page)
    while job.machine.context.interruption.stop is None:
        job.deliver_from("n0", msg.Heartbeat())
        job.tick(0.5)
    job.report("n0", STEPS, passed=msg.PassedStep(step=STEPS, commit=commit()))
    while not job.orders(msg.Begin):
        job.tick(0.1)
    job.deliver(msg.Entered(worker=w("n0"), generation=2, applied=STEPS))
    assert [event.step for event in job.events if isinstance(event, ev.StepCommitted)] == list(range(1, STEPS + 1))
    assert max(len(record.outbox) + len(record.passed) for record in job.records) <= AT_ONCE + 100
