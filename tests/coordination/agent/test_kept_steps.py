"""Tests of steps that a node keeps for an absent coordinator: once per node, in pages, bounded, then committed."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from machinery import BATCH, Job, applied, attach, commit, hello, w

from holdfast.coordination.agent.kept_steps import KeptSteps
from holdfast.coordination.inputs import Received
from holdfast.protocol import events as ev
from holdfast.protocol.messages import any_side as msg
from holdfast.protocol.messages.agent import PAGE_STEPS, AppliedSteps
from holdfast.protocol.names import MAX_MESSAGE_BYTES
from holdfast.protocol.position import Position

A, B = w("n0"), msg.worker_id("n0", 1, "a")


def pages(kept: KeptSteps, committed: int = 0) -> list[AppliedSteps]:
    return list(kept.pages({A: 10**6}, committed))


def steps(kept: KeptSteps, committed: int = 0) -> list[int]:
    return [step.step for page in pages(kept, committed) for step in page.steps]


def kept_up_to(last: int, max_bytes: int = 1 << 30) -> KeptSteps:
    kept = KeptSteps(max_bytes)
    for step in range(1, last + 1):
        kept.add(applied(A, 1, step), 1.0)
    return kept


def test_a_step_is_kept_once_with_the_time_of_its_last_worker() -> None:
    kept = KeptSteps()
    kept.add(applied(A, 1, 1), 5.0)
    kept.add(applied(B, 1, 1), 7.0)
    ((step,),) = [page.steps for page in pages(kept)]
    assert (step.step, step.generation, step.world, step.time, step.commit.as_commit) == (1, 1, 3, 7.0, commit())
    assert kept.contradictions == ()


def test_contradicting_results_of_a_step_are_kept_for_the_coordinator() -> None:
    other_v, other_hash = applied(B, 1, 1, commit(2.0)), msgspec.structs.replace(applied(B, 1, 1), state_hash="b")
    kept = KeptSteps()
    kept.add(msgspec.structs.replace(applied(A, 1, 1), state_hash="a"), 1.0)
    kept.add(other_v, 1.0)
    kept.add(other_hash, 1.0)
    assert kept.contradictions == (other_v, other_hash)
    kept.forget_up_to(1)
    assert kept.contradictions == ()


def test_a_hundred_thousand_steps_are_compact_and_returned_in_order() -> None:
    kept = kept_up_to(100_000)
    assert steps(kept) == list(range(1, 100_001))
    assert all(len(page.steps) <= PAGE_STEPS for page in pages(kept))
    assert sum(len(msgspec.msgpack.encode(page)) for page in pages(kept)) < 60 * 100_000


@given(last=st.integers(0, 4 * PAGE_STEPS), committed=st.integers(0, 4 * PAGE_STEPS))
def test_only_committed_steps_are_forgotten(last: int, committed: int) -> None:
    kept = kept_up_to(last)
    kept.forget_up_to(committed)
    assert [step for step in steps(kept) if step > committed] == list(range(committed + 1, last + 1))
    assert len(steps(kept)) <= max(0, last - committed) + PAGE_STEPS


@given(last=st.integers(1, 4 * PAGE_STEPS), back=st.integers(0, 4 * PAGE_STEPS))
def test_undone_steps_are_forgotten_and_their_repetitions_kept(last: int, back: int) -> None:
    kept = kept_up_to(last)
    kept.undo_after(back, 2)
    assert steps(kept) == list(range(1, min(last, back) + 1))
    kept.add(applied(A, 2, back + 1, commit(9.0)), 1.0)
    kept.undo_after(back, 2)  # another worker of the node says it a little later
    assert steps(kept)[-1] == back + 1
    assert kept.contradictions == ()


def test_beyond_the_memory_bound_the_oldest_steps_lose_their_results() -> None:
    kept = kept_up_to(20 * PAGE_STEPS, max_bytes=10 * 60 * PAGE_STEPS)
    told = pages(kept)
    assert 0 < kept.given_up < 20 * PAGE_STEPS
    assert max(page.given_up for page in told) == kept.given_up
    assert steps(kept) == list(range(kept.given_up + 1, 20 * PAGE_STEPS + 1))
    kept.forget_up_to(kept.given_up)
    assert kept.given_up == 0


# ---- the coordinator ----


def restarted(job: Job) -> Job:
    return job.boot()


def deliver(job: Job, node: str, message: msg.AgentMessage) -> None:
    job.feed(Received(job.connections[node], message))


def page(worker: str, first: int, last: int, top: int = 0) -> AppliedSteps:
    kept = KeptSteps()
    for step in range(first, last + 1):
        kept.add(applied(worker, 1, step), 1.0)
    (only,) = kept.pages({worker: top or last}, 0)
    return only


def life(worker: str) -> tuple[msg.WorkerMessage, ...]:
    return attach(worker), msg.Begun(worker=worker, generation=1), msg.Entered(worker=worker, generation=1, applied=0)


def committed(job: Job) -> list[int]:
    return [event.step for event in job.events if isinstance(event, ev.StepCommitted)]


def test_pages_of_all_nodes_continue_the_journal() -> None:
    job = restarted(Job().start())
    for node in ("n0", "n1", "n2"):
        job.connect(hello(node, (*life(w(node)), page(w(node), 1, 300, top=600)), term=1))
        assert committed(job) == ([] if node != "n2" else list(range(1, 301)))
    for node in ("n0", "n1", "n2"):
        deliver(job, node, page(w(node), 301, 600))
    assert committed(job) == list(range(1, 601))
    assert all(event.loss == 1.0 for event in job.events if isinstance(event, ev.StepCommitted))


def test_a_step_given_up_by_one_node_is_taken_from_another() -> None:
    job = restarted(Job().start())
    job.connect(hello("n0", (*life(w("n0")), AppliedSteps(workers={w("n0"): 4}, given_up=2)), term=1))
    deliver(job, "n0", page(w("n0"), 3, 4))
    job.connect(hello("n1", (*life(w("n1")), page(w("n1"), 1, 4)), term=1))
    job.connect(hello("n2", (*life(w("n2")), AppliedSteps(workers={w("n2"): 1}, given_up=1)), term=1))
    deliver(job, "n2", page(w("n2"), 2, 4))
    assert [event.loss for event in job.events if isinstance(event, ev.StepCommitted)] == [1.0] * 4


def test_steps_that_all_nodes_have_given_up_are_committed_without_their_loss() -> None:
    job = restarted(Job().start())
    for node in ("n0", "n1", "n2"):
        job.connect(hello(node, (*life(w(node)), AppliedSteps(workers={w(node): 2}, given_up=2)), term=1))
    steps = [event for event in job.events if isinstance(event, ev.StepCommitted)]
    assert [event.samples for event in steps] == [BATCH, BATCH]
    assert all(event.loss != event.loss for event in steps)


def test_a_page_of_an_abandoned_lineage_is_ignored() -> None:
    job = Job().start()
    job.records.append(msgspec.structs.replace(job.records[-1], lineage=2, generation=2))
    restarted(job)
    for node in ("n0", "n1", "n2"):
        job.connect(hello(node, (*life(w(node)), page(w(node), 1, 5)), term=1))
    assert committed(job) == []


@pytest.mark.parametrize(("generation", "known"), [(1, 0), (2, 5)])
def test_the_state_with_which_a_worker_entered_an_abandoned_lineage_is_void(generation: int, known: int) -> None:
    job = Job().start()
    job.records.append(msgspec.structs.replace(job.records[-1], lineage=2, generation=2))
    restarted(job)
    entered = msg.Entered(worker=w("n0"), generation=generation, applied=5)
    job.connect(hello("n0", (attach(w("n0")), entered), term=1))
    assert (job.machine.context.ledger.applied_by(w("n0")) or 0) == known


def test_replicas_that_differ_in_their_pages_end_the_job() -> None:
    job = restarted(Job().start())
    kept = KeptSteps()
    kept.add(applied(w("n1"), 1, 1, commit(2.0)), 1.0)
    job.connect(hello("n0", (*life(w("n0")), page(w("n0"), 1, 1)), term=1))
    job.connect(hello("n1", (*life(w("n1")), *kept.pages({w("n1"): 1}, 0)), term=1))
    (failed,) = [event for event in job.events if isinstance(event, ev.JobFailed)]
    assert "diverged" in failed.why


def test_a_replayed_swap_flag_does_not_apply_to_the_pending_generation() -> None:
    """A step passed with every flag up and was decided FORWARD in a new generation; a node reports it again later."""
    job = Job().start()
    record = job.records[-1]
    assert record.plan is not None
    pending = msgspec.structs.replace(record.plan, generation=2)
    job.records.append(msgspec.structs.replace(record, pending=pending, generation=2))
    job.boot(Position(seq=len(job.events), step=1))
    job.connect(hello("n0", life(w("n0")), term=1))
    job.deliver(applied(w("n0"), 1, 1, commit(1.0, msg.Flag.SWAP)))
    assert job.machine.record.pending == pending


def test_pages_of_steps_with_many_metrics_fit_into_a_message() -> None:
    """The pages contain all data of each step, in order."""
    much = {f"{number:020}": float(number) for number in range(500)}
    kept, last = KeptSteps(), 3 * PAGE_STEPS
    for step in range(1, last + 1):
        kept.add(applied(A, 1, step, msgspec.structs.replace(commit(), metrics={**much, "step": float(step)})), 1.0)
    assert max(len(msgspec.msgpack.encode(page)) for page in pages(kept)) < MAX_MESSAGE_BYTES // 4
    said = [(step.step, step.commit.as_commit.metrics["step"]) for page in pages(kept) for step in page.steps]
    assert said == [(step, float(step)) for step in range(1, last + 1)]
    assert [step.step for page in kept.pages_after(last - 20, {A: last}) for step in page.steps] == [
        *range(last - 19, last + 1)
    ]
    kept.forget_up_to(last - 1)
    assert steps(kept, last - 1)[-1] == last


def test_equal_nan_metrics_do_not_contradict_each_other() -> None:
    kept, logged = KeptSteps(), msgspec.structs.replace(commit(), metrics={"a": float("nan")})
    kept.add(applied(A, 1, 1, logged), 1.0)
    kept.add(applied(B, 1, 1, logged), 2.0)
    assert kept.contradictions == ()
    kept.add(applied(B, 1, 1, msgspec.structs.replace(logged, metrics={"a": 0.0})), 2.0)
    assert len(kept.contradictions) == 1
