"""What an agent keeps for a coordinator that comes back."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.control.agent_state import AgentState, DeathCount
from holdfast.protocol.agent import Committed, Welcome, WorkerDown
from holdfast.protocol.names import MAX_MESSAGE_BYTES
from holdfast.protocol.orders import Arm, Begin, JobDone, Order, Prepare, Stop, Void
from holdfast.protocol.plan import Commit, Decision, DecisionKind, EpochPlan, Phase
from holdfast.protocol.worker import (
    Applied,
    Attach,
    CheckpointWritten,
    Entered,
    Fault,
    Finished,
    Post,
    Prepared,
    Report,
    WorkerMessage,
)

A = "node-0/0/aa"
B = "node-0/0/bb"
OTHER = "node-0/1/cc"
COMMIT = Commit(grad_square=1.0, loss_sum=1.0, samples=1, nonfinite=0, swap=0)


def attach(worker: str) -> Attach:
    return Attach(worker=worker, pid=1, host="127.0.0.1", state_port=1, digest="d", global_batch=8, micro_batches=4)


def applied(worker: str, step: int, epoch: int = 1) -> Applied:
    return Applied(worker=worker, epoch=epoch, step=step, commit=COMMIT, world=2, time=float(step))


def report(worker: str, epoch: int) -> Report:
    return Report(worker=worker, term=1, epoch=epoch, applied=3, step=4, phase=Phase.VOTED)


def welcome(term: int, committed: int = 0) -> Welcome:
    return Welcome(term=term, lease_s=1.0, heartbeat_s=0.1, committed=committed)


def down(worker: str) -> WorkerDown:
    return WorkerDown(worker=worker, kind="process_exit", detail="SIGKILL", exit_code=-9)


def kept(state: AgentState) -> tuple[WorkerMessage, ...]:
    first, rest = state.replay()
    return first + rest


def test_the_latest_of_each_kind_is_replayed_in_the_order_of_a_life() -> None:
    state = AgentState()
    written = CheckpointWritten(worker=A, epoch=1, step=2, name="n", bytes=1, seconds=0.1)
    for message in (
        attach(A),
        Entered(worker=A, epoch=1, applied=0),
        applied(A, 1),
        Finished(worker=A, step=1),
        written,
    ):
        state.keep(message)
    state.keep(Entered(worker=A, epoch=2, applied=1))
    assert kept(state) == (
        attach(A),
        Entered(worker=A, epoch=2, applied=1),
        Finished(worker=A, step=1),
        written,
        applied(A, 1),
    )


def test_applied_steps_are_kept_until_the_journal_has_them() -> None:
    state = AgentState()
    state.keep(attach(A))
    for step in range(1, 6):
        state.keep(applied(A, step))
    state.commit(Committed(term=0, step=2))
    assert [m.step for m in kept(state) if isinstance(m, Applied)] == [3, 4, 5]
    assert state.welcome(welcome(1, committed=4))
    assert [m.step for m in kept(state) if isinstance(m, Applied)] == [5]
    state.keep(applied(A, 4))  # late: it is in the journal
    assert [m.step for m in kept(state) if isinstance(m, Applied)] == [5]


@pytest.mark.parametrize(
    "stale",
    [Prepared(worker=A, epoch=1), report(A, 1), Fault(worker=A, epoch=1, detail="x")],
    ids=lambda m: type(m).__name__,
)
def test_a_newer_epoch_makes_words_about_an_older_one_worthless(stale: WorkerMessage) -> None:
    state = AgentState()
    state.keep(attach(A))
    state.keep(stale)
    assert stale in kept(state)
    state.keep(Entered(worker=A, epoch=2, applied=0))
    assert stale not in kept(state)


def test_words_about_the_epoch_that_is_entered_stay() -> None:
    state = AgentState()
    state.keep(attach(A))
    state.keep(Fault(worker=A, epoch=2, detail="x"))
    state.keep(Entered(worker=A, epoch=2, applied=0))
    assert Fault(worker=A, epoch=2, detail="x") in kept(state)


def test_rendezvous_is_not_kept() -> None:
    state = AgentState()
    state.keep(attach(A))
    state.keep(Post(worker=A, epoch=1, key="k", value=b"v"))
    assert kept(state) == (attach(A),)


def test_of_a_dead_worker_only_its_end_is_told_until_another_is_there() -> None:
    state = AgentState()
    for message in (attach(A), Entered(worker=A, epoch=1, applied=0), applied(A, 1), attach(OTHER)):
        state.keep(message)
    state.down(down(A))
    assert kept(state) == (attach(OTHER),)
    assert state.downs() == (down(A),)
    state.keep(attach(B))
    assert state.downs() == ()
    assert set(kept(state)) == {attach(B), attach(OTHER)}


def test_a_finished_worker_is_forgotten() -> None:
    state = AgentState()
    state.keep(attach(A))
    state.finished(A)
    assert kept(state) == ()
    assert state.downs() == ()


def test_an_older_coordinator_is_refused() -> None:
    state = AgentState()
    assert state.welcome(welcome(3))
    assert not state.welcome(welcome(2, committed=100))
    assert state.committed == 0
    state.commit(Committed(term=2, step=100))
    assert state.committed == 0
    assert state.welcome(welcome(3))
    assert state.term == 3


PLAN = EpochPlan(term=2, epoch=5, members=())


@pytest.mark.parametrize(
    ("order", "term"),
    [
        (Begin(plan=PLAN, decision=Decision(kind=DecisionKind.REDO, applied=0)), 2),
        (Prepare(plan=PLAN), 2),
        (Stop(term=2, epoch=1), 2),
        (Arm(term=2, epoch=1), 2),
        (Void(term=2, epoch=1), 2),
    ],
)
def test_orders_of_a_lower_term_are_refused(order: Order, term: int) -> None:
    assert AgentState(term=term).accepts(order)
    assert not AgentState(term=term + 1).accepts(order)
    assert AgentState(term=term + 1).accepts(JobDone())


def test_a_long_outage_fits_through_a_bounded_hello() -> None:
    state = AgentState()
    workers = [f"node-0/{index}/aa" for index in range(8)]
    for worker in workers:
        state.keep(attach(worker))
    for step in range(1, 2001):
        for worker in workers:
            state.keep(applied(worker, step))
    first, rest = state.replay()
    assert len(msgspec.msgpack.encode(first)) < MAX_MESSAGE_BYTES - 4096
    assert first[:8] == tuple(attach(worker) for worker in workers)
    steps = [message.step for message in first + rest if isinstance(message, Applied)]
    assert steps == sorted(steps)
    assert len(steps) == 16000
    assert rest


@given(st.lists(st.tuples(st.sampled_from(["applied", "commit", "down", "attach"]), st.integers(1, 30)), max_size=60))
def test_nothing_uncommitted_of_a_live_worker_is_lost(story: list[tuple[str, int]]) -> None:
    state = AgentState()
    state.keep(attach(A))
    alive, expected, committed = True, {}, 0
    for what, step in story:
        if what == "applied" and alive:
            state.keep(applied(A, step))
            if step > committed:
                expected[step] = applied(A, step)
        elif what == "commit":
            state.commit(Committed(term=0, step=step))
            committed = max(committed, step)
        elif what == "down":
            state.down(down(A))
            alive, expected = False, {}
        elif what == "attach" and not alive:
            state.keep(attach(A))
            alive = True
    got = {message.step for message in kept(state) if isinstance(message, Applied) and message.step > committed}
    assert got == {step for step in expected if step > committed}


def test_deaths_count_until_a_step_is_committed() -> None:
    count = DeathCount()
    assert [count.died(float(now), 0) for now in range(3)] == [False, False, False]
    assert count.died(3.0, 0)


def test_a_committed_step_forgives() -> None:
    count = DeathCount()
    assert not any(count.died(float(now), now) for now in range(1, 50))


def test_deaths_of_long_ago_do_not_count() -> None:
    count = DeathCount()
    assert not any(count.died(120.0 * number, 0) for number in range(50))
