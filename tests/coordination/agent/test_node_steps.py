"""Tests of a node's messages about applied steps: witnesses' steps at once, other steps after a failure."""

from __future__ import annotations

import itertools

from machinery import attach, commit

from holdfast.coordination.agent.identity import NodeIdentity
from holdfast.coordination.agent.instructions import AgentInstruction, Replay, SendToCoordinator
from holdfast.coordination.agent.machine import AgentMachine
from holdfast.protocol.failures import FailureKind
from holdfast.protocol.messages import any_side as msg

BEAT_S = 0.5


class Bench:
    """A connected agent's state machine; all its workers have entered generation 1."""

    def __init__(self, workers: int = 2) -> None:
        numbers = itertools.count(1)
        node = NodeIdentity(job="job", node="n0", workers=workers, digest="d", agent_pid=7)
        self.machine = AgentMachine(node, lambda: f"{next(numbers):08x}")
        self.now = 0.0
        self.machine.start()
        self.workers = self.machine.workers
        self.connect()
        for worker in self.workers:
            self.deliver(attach(worker))
            self.deliver(msg.Entered(worker=worker, generation=1, applied=0))

    def connect(self) -> list[msg.AgentMessage]:
        self.machine.on_disconnected()
        out = self.machine.on_connected(self.now)
        welcome = msg.Welcome(term=1, lease_s=3.0, heartbeat_s=BEAT_S, committed=0, members=self.workers)
        return messages_of([*out, *self.machine.on_message(welcome, self.now)])

    def deliver(self, message: msg.WorkerMessage) -> list[msg.AgentMessage]:
        return messages_of(self.machine.on_worker_message(message, self.now))

    def apply(self, step: int, *indices: int, generation: int = 1, **fields: object) -> list[msg.AgentMessage]:
        """Make workers apply a step; return the messages that the coordinator receives."""
        out: list[msg.AgentMessage] = []
        for index in indices or range(len(self.workers)):
            out += self.deliver(applied(self.workers[index], step, generation, **fields))
        return out

    def beat(self) -> list[msg.AgentMessage]:
        self.now += BEAT_S
        return messages_of(self.machine.tick(self.now, ()))

    def report(self, index: int = 0, applied: int = 0) -> list[int]:
        """Make a worker report; return the steps that are sent to the coordinator before the report."""
        worker, phase = self.workers[index], msg.Phase.COMPUTE
        *pages, last = self.deliver(
            msg.Report(worker=worker, term=1, generation=1, applied=applied, step=applied + 1, phase=phase)
        )
        assert isinstance(last, msg.FromWorker)
        return steps(pages)


def applied(worker: str, step: int, generation: int = 1, **fields: object) -> msg.Applied:
    return msg.Applied(worker=worker, generation=generation, step=step, commit=commit(), world=3, **fields)  # pyright: ignore[reportArgumentType]


def messages_of(instructions: list[AgentInstruction]) -> list[msg.AgentMessage]:
    out: list[msg.AgentMessage] = []
    for instruction in instructions:
        if isinstance(instruction, SendToCoordinator):
            out.append(instruction.message)
        elif isinstance(instruction, Replay):
            out += instruction.messages
    return out


def steps(messages: list[msg.AgentMessage]) -> list[int]:
    pages = [message for message in messages if isinstance(message, msg.AppliedSteps)]
    assert len(pages) == len(messages)
    return [step.step for page in pages for step in page.steps]


def test_only_the_step_of_a_witness_is_sent_at_once() -> None:
    bench = Bench()
    assert bench.apply(1) == []
    witness = applied(bench.workers[0], 2, witness=True)
    assert bench.deliver(witness) == [msg.FromWorker(message=witness)]


def test_a_heartbeat_reports_one_applied_step_for_all_workers_or_one_for_each() -> None:
    bench = Bench()
    assert bench.beat() == [msg.Heartbeat()]
    bench.apply(1)
    assert bench.beat() == [msg.Heartbeat(generation=1, applied=(1,))]
    assert bench.beat() == [msg.Heartbeat()]
    bench.apply(2, 1, generation=2)
    assert bench.beat() == [msg.Heartbeat(generation=1, applied=(1, 2))]


def test_applied_steps_are_reported_in_a_heartbeat_even_after_another_message() -> None:
    bench = Bench()
    bench.apply(1, 0, witness=True)
    assert messages_of(bench.machine.tick(bench.now, ())) == []
    bench.apply(1, 1)
    assert messages_of(bench.machine.tick(bench.now, ())) == [msg.Heartbeat(generation=1, applied=(1,))]


def test_a_report_follows_all_unreported_steps() -> None:
    bench = Bench()
    for step in (1, 2, 3):
        bench.apply(step)
    assert bench.report(applied=3) == [1, 2, 3]
    bench.apply(4, 1)
    assert bench.report(1, applied=4) == [4]


def test_committed_steps_are_not_sent_before_a_report() -> None:
    bench = Bench()
    for step in (1, 2, 3):
        bench.apply(step)
    bench.machine.on_message(msg.Committed(term=1, step=2), bench.now)
    assert bench.report(applied=3) == [3]


def test_steps_already_sent_by_a_witness_are_not_sent_before_its_report() -> None:
    bench = Bench(1)
    bench.apply(1, witness=True)
    assert bench.report(applied=1) == []
    bench.apply(2)
    bench.apply(3, witness=True)
    assert bench.report(applied=3) == [2, 3]


def test_all_steps_are_sent_once_on_a_new_connection() -> None:
    bench = Bench(1)
    bench.apply(1)
    (hello,) = bench.connect()
    assert isinstance(hello, msg.Hello)
    assert steps([kept for kept in hello.kept if isinstance(kept, msg.AppliedSteps)]) == [1]
    assert bench.report(applied=1) == []
    assert bench.beat() == [msg.Heartbeat()]


def test_a_repeated_step_is_reported_again() -> None:
    bench = Bench(1)
    bench.apply(1)
    bench.apply(2)
    assert bench.report(applied=2) == [1, 2]
    bench.deliver(msg.Entered(worker=bench.workers[0], generation=2, applied=1))
    assert bench.beat() == [msg.Heartbeat()]
    bench.apply(2, generation=2)
    assert bench.beat() == [msg.Heartbeat(generation=2, applied=(2,))]
    assert bench.report(applied=2) == [2]


def test_the_steps_of_a_worker_that_left_its_loop_are_sent_before_its_end() -> None:
    bench = Bench(1)
    bench.apply(1)
    down = msg.WorkerDown(worker=bench.workers[0], kind=FailureKind.PROCESS_EXIT, detail="", exit_code=0, final=True)
    *pages, last = messages_of(bench.machine.on_worker_ended(down, bench.now, clean=True))
    assert steps(pages) == [1]
    assert isinstance(last, msg.WorkerDown)
    assert last.applied == 1


def test_steps_received_with_a_state_are_kept_as_if_applied_locally() -> None:
    bench = Bench(1)
    passed = tuple(msg.PassedStep(step=step, commit=commit(float(step)), generation=1, world=4) for step in (1, 2, 3))
    bench.machine.on_message(msg.Committed(term=1, step=1), bench.now)
    assert bench.deliver(msg.ReceivedSteps(worker=bench.workers[0], passed=passed)) == []
    bench.deliver(msg.Entered(worker=bench.workers[0], generation=2, applied=3))
    bench.apply(4, generation=2)
    (page,) = bench.machine.on_worker_message(
        msg.Report(worker=bench.workers[0], term=1, generation=2, applied=4, step=5, phase=msg.Phase.COMPUTE), 0.0
    )[:-1]
    assert isinstance(page, SendToCoordinator)
    assert isinstance(page.message, msg.AppliedSteps)
    kept = page.message.steps
    assert [(one.step, one.generation, one.world, one.commit.loss_sum) for one in kept[:-1]] == [
        (step.step, 1, 4, step.commit.loss_sum) for step in passed[1:]
    ]
    assert [one.time for one in kept[:-1]] == [0.0, 0.0], "no worker of this node knows the time"
    assert kept[-1].step == 4


def test_committed_steps_repeated_after_a_rollback_are_kept_after_a_reconnection() -> None:
    """A node that was disconnected returns with fresh workers; the coordinator tells it which steps the journal has."""
    bench = Bench(1)
    bench.machine.on_message(msg.Committed(term=1, step=2), bench.now)
    bench.connect()
    passed = msg.PassedStep(step=1, commit=commit(1.0), generation=4, world=1)
    bench.deliver(msg.ReceivedSteps(worker=bench.workers[0], passed=(passed,)))
    bench.deliver(msg.Entered(worker=bench.workers[0], generation=5, applied=1))
    bench.apply(2, generation=5)
    (hello,) = bench.connect()
    assert isinstance(hello, msg.Hello)
    assert steps([kept for kept in hello.kept if isinstance(kept, msg.AppliedSteps)]) == [1, 2]


def test_steps_repeated_without_this_node_are_kept_on_the_same_connection() -> None:
    """Otherwise a step is committed without its loss if the other nodes fail before they report it."""
    bench = Bench(1)
    bench.machine.on_message(msg.Committed(term=1, step=2), bench.now)
    passed = msg.PassedStep(step=1, commit=commit(7.0), generation=4, world=1)
    bench.deliver(msg.ReceivedSteps(worker=bench.workers[0], passed=(passed,)))
    bench.deliver(msg.Entered(worker=bench.workers[0], generation=5, applied=1))
    bench.apply(2, generation=5)
    page = bench.deliver(
        msg.Report(worker=bench.workers[0], term=1, generation=5, applied=2, step=3, phase=msg.Phase.COMPUTE)
    )[0]
    assert isinstance(page, msg.AppliedSteps)
    assert [(kept.step, kept.generation) for kept in page.steps] == [(1, 4), (2, 5)]


def test_a_node_reports_one_state_hash_per_step_unless_its_workers_differ() -> None:
    bench = Bench(3)
    (first,) = bench.apply(1, 0, 1, state_hash="a")
    assert isinstance(first, msg.FromWorker)
    assert isinstance(first.message, msg.Applied)
    assert first.message.state_hash == "a"
    (other,) = bench.apply(1, 2, state_hash="b")
    assert isinstance(other, msg.FromWorker)
    assert isinstance(other.message, msg.Applied)
    assert other.message.state_hash == "b"
    same = bench.apply(2, state_hash="c", witness=True)
    hashes = [said.message.state_hash for said in same if isinstance(said, msg.FromWorker)]  # pyright: ignore
    assert hashes == ["c", "", ""]
