"""The server shell executes instructions in order, and stops permanently when it must."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable, Iterator, Sequence

import msgspec
import pytest

from holdfast.control.coordinator.shell import RecordKeeper, Shell
from holdfast.control.serving.machine_shell import MAX_INPUTS, TransactionLock
from holdfast.control.store.interface import StoreAwayError, StoreError
from holdfast.control.store.memory import MemoryStore
from holdfast.coordination.inputs import Disconnected, Input, Received, StoreBack, Tick
from holdfast.coordination.instructions import Broadcast, Close, Emit, EndJob, Instruction, Persist, PlanExperts, Send
from holdfast.errors import BadInputError, HoldfastError, RefusedError, SupersededError, UnreachableError
from holdfast.observability.journal import Journal, JournalError
from holdfast.observability.metrics import Metrics
from holdfast.protocol.events import ActionRequested, AnyEvent, CoordinatorRestarted, StepCommitted
from holdfast.protocol.messages.agent import Committed, Heartbeat, Hello
from holdfast.protocol.names import PROTOCOL
from holdfast.protocol.record import SCHEMA, KnownCheckpoint, Record
from made_events import made

PATIENCE_S = 30.0
HELLO = Hello(protocol=PROTOCOL, job="j", node="n", session="0" * 8, term=0, agent_pid=1, workers=1, digest="")


def _event(seq: int) -> StepCommitted:
    return StepCommitted(
        time=1.0, job="j", term=1, generation=1, seq=seq, step=seq, loss=1.0, samples=1, world_size=1, step_s=0.1
    )


def _record(term: int) -> Record:
    return Record(schema=SCHEMA, job="j", term=term)


class FakeMachine:
    """A machine that answers every input with prepared instructions."""

    def __init__(self) -> None:
        self.answers: list[list[Instruction] | Exception] = []
        self.seen: list[tuple[Input, float]] = []

    def start(self, now: float, url: str, pid: int, checkpoints: Sequence[KnownCheckpoint] = ()) -> list[Instruction]:
        event = CoordinatorRestarted(time=now, job="j", term=1, generation=0, seq=1, url=url, coordinator_pid=pid)
        return [Persist(_record(1)), Emit(event)]

    def handle(self, event: Input, now: float) -> list[Instruction]:
        self.seen.append((event, now))
        answer = self.answers.pop(0) if self.answers else []
        if isinstance(answer, Exception):
            raise answer
        return answer


class FakeConnection:
    def __init__(self) -> None:
        self.said: list[object] = []
        self.frames: list[bytes] = []

    def send(self, message: bytes) -> None:
        self.frames.append(message)
        self.said.append(msgspec.msgpack.decode(message)["step"])

    def close(self) -> None:
        self.said.append("closed")


class GatedStore(MemoryStore):
    """A store that writes once its gate is open."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.gate.set()
        self.failure: Exception | None = None
        self.tries = 0  # The failed attempts.
        self.writes = 0
        self.fails_after = math.inf
        self.outboxes: list[tuple[AnyEvent, ...]] = []

    def compare_and_swap(self, key: str, value: bytes, expected_revision: int) -> int | None:
        assert self.gate.wait(PATIENCE_S)
        self.tries += self.failure is not None
        if self.failure is not None:
            raise self.failure
        self.writes += 1
        if self.fails_after <= 0:
            raise StoreError("the server is gone")
        self.fails_after -= 1
        self.outboxes.append(msgspec.msgpack.decode(value, type=Record).outbox)
        return super().compare_and_swap(key, value, expected_revision)


class Bench:
    """A server shell with a fake machine, and all of its visible effects."""

    def __init__(self, runner: asyncio.Runner) -> None:
        self.store = GatedStore()
        self.machine = FakeMachine()
        self.journal = Journal()
        self.ended: list[int] = []
        self.requests: list[ActionRequested] = []
        self.planned: list[PlanExperts] = []
        self.failed: list[BaseException] = []
        self.time = 10.0
        self.run = runner.run
        self.shell = Shell(
            self.machine,
            RecordKeeper(self.store, "j"),
            self.journal,
            Metrics("j"),
            now=lambda: self.time,
            on_request=self.requests.append,
            on_plan=self.planned.append,
            on_end=self.ended.append,
            on_failure=self.failed.append,
        )

    def connect(self, number: int) -> FakeConnection:
        connection = FakeConnection()
        self.run(self.shell.add_connection(number, connection, HELLO))
        return connection

    def does(self, *instructions: Instruction) -> None:
        self.machine.answers.append(list(instructions))
        self.run(self.shell.feed(Tick()))

    def stored_term(self) -> int:
        record = RecordKeeper(self.store, "j").record
        return record.term if record else 0


@pytest.fixture
def bench() -> Iterator[Bench]:
    with asyncio.Runner() as runner:
        yield Bench(runner)


def _say(connection: int, step: int) -> Send:
    return Send(connection, Committed(term=1, step=step))


def test_instructions_are_executed_in_order(bench: Bench) -> None:
    bench.run(bench.shell.start("http://h:1", 7))
    first, second = bench.connect(1), bench.connect(2)
    bench.does(Persist(_record(2)), Emit(_event(2)), _say(1, 5), _say(2, 6), _say(1, 7), Close(1), EndJob(3, "over"))
    assert first.said == [5, 7, "closed"]
    assert second.said == [6]
    assert bench.stored_term() == 2
    assert bench.journal.last_seq == 2
    assert bench.ended == [3]
    assert bench.failed == []


def test_the_journal_is_synced_before_each_record_and_before_the_end(bench: Bench) -> None:
    done: list[object] = []
    bench.journal.sync = lambda: done.append((bench.journal.last_seq, bench.stored_term(), list(bench.ended)))
    bench.does(Emit(_event(1)), Persist(_record(1)), Emit(_event(2)), Emit(_event(3)), EndJob(0, "done"))
    assert done == [(1, 0, []), (3, 1, [])]


def test_inputs_contain_the_time_and_the_connection(bench: Bench) -> None:
    bench.connect(4)
    bench.time = 11.0
    bench.run(bench.shell.remove_connection(4))
    bench.run(bench.shell.remove_connection(4))
    bench.run(bench.shell.remove_connection(5))
    assert bench.machine.seen == [(Received(4, HELLO), 10.0), (Disconnected(4), 11.0)]
    assert bench.shell.connections == {}


def test_sending_to_a_closed_connection_is_not_an_error(bench: Bench) -> None:
    bench.does(_say(9, 1), Close(9), Emit(_event(1)))
    assert bench.journal.last_seq == 1


def test_an_action_request_is_forwarded_only_once(bench: Bench) -> None:
    asked = made("action_requested", seq=1, job="j", about_seq=0)
    bench.does(Emit(asked), Emit(asked))
    assert bench.requests == [asked]
    assert bench.journal.last_seq == 1


def test_an_event_already_in_the_journal_is_not_counted_again(bench: Bench) -> None:
    bench.does(Emit(_event(1)), Emit(_event(1)))
    assert bench.journal.last_seq == 1
    assert b'steps_committed_total{job_name="j"} 1.0' in bench.shell.metrics.exposition()


def test_a_superseded_shell_sends_nothing_more(bench: Bench) -> None:
    bench.run(bench.shell.start("http://h:1", 7))
    connection = bench.connect(1)
    RecordKeeper(bench.store, "j").swap(_record(9))
    bench.machine.answers.append([_say(1, 1), Persist(_record(2)), Emit(_event(2)), _say(1, 2)])
    with pytest.raises(SupersededError):
        bench.run(bench.shell.feed(Tick()))
    assert [type(error) for error in bench.failed] == [SupersededError]
    assert connection.said == [1]
    assert bench.journal.last_seq == 1
    assert bench.stored_term() == 9
    seen = len(bench.machine.seen)
    bench.run(bench.shell.feed(Tick()))
    bench.run(bench.shell.remove_connection(1))
    assert len(bench.machine.seen) == seen
    assert bench.connect(2).said == ["closed"]
    assert bench.failed[1:] == []


def test_only_one_of_two_coordinators_can_replace_the_same_record() -> None:
    store = MemoryStore()
    first, second = RecordKeeper(store, "j"), RecordKeeper(store, "j")
    first.swap(_record(1))
    with pytest.raises(SupersededError):
        second.swap(_record(1))
    first.swap(_record(2))
    third = RecordKeeper(store, "j")
    assert third.record is not None
    assert third.record.term == 2
    RecordKeeper(store, "other").swap(_record(1))


@pytest.mark.parametrize("refusal", [BadInputError("no phase"), UnreachableError("no node")], ids=["bad", "nowhere"])
def test_a_refused_request_does_not_stop_the_shell(bench: Bench, refusal: HoldfastError) -> None:
    bench.machine.answers.append(refusal)
    with pytest.raises(type(refusal), match="no "):
        bench.run(bench.shell.feed(Tick()))
    assert bench.failed == []
    bench.does(Emit(_event(1)))
    assert bench.journal.last_seq == 1


@pytest.mark.parametrize("answer", [ZeroDivisionError(), [Emit(_event(5))]], ids=["machine", "journal"])
def test_an_unexpected_error_stops_the_shell(bench: Bench, answer: list[Instruction] | Exception) -> None:
    bench.machine.answers.append(answer)
    kind = ZeroDivisionError if isinstance(answer, Exception) else JournalError
    with pytest.raises(kind):
        bench.run(bench.shell.feed(Tick()))
    assert [type(error) for error in bench.failed] == [kind]
    bench.run(bench.shell.feed(Tick()))
    assert len(bench.machine.seen) == 1


async def _soon(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.001)


def test_instructions_after_a_record_and_later_inputs_wait_for_its_write(bench: Bench) -> None:
    connection, _ = bench.connect(1), bench.connect(2)
    before, after = [_say(1, 1), Emit(_event(1))], [_say(1, 2), Emit(_event(2))]
    bench.machine.answers = [
        [*before, Persist(_record(2)), *after, Persist(_record(3)), _say(1, 3)],
        [_say(1, 4)],
    ]
    seen = len(bench.machine.seen)

    async def main() -> None:
        bench.store.gate.clear()
        first = asyncio.create_task(bench.shell.feed(Tick()))
        await _soon(lambda: connection.said == [1])
        others = [asyncio.create_task(bench.shell.feed(Tick())), asyncio.create_task(bench.shell.remove_connection(2))]
        looked = asyncio.create_task(bench.shell.read_durable(lambda: list(connection.said)))
        for _ in range(10):
            await asyncio.sleep(0)
        assert (connection.said, bench.journal.last_seq, bench.stored_term()) == ([1], 1, 0)
        assert len(bench.machine.seen) == seen + 1, "the machine must get no input while its record is being written"
        assert not looked.done()
        bench.store.gate.set()
        await asyncio.gather(first, *others)
        assert await looked == [1, 2, 3, 4]

    bench.run(main())
    assert (bench.journal.last_seq, bench.stored_term()) == (2, 3)
    assert [event for event, _ in bench.machine.seen[seen:]] == [Tick(), Tick(), Disconnected(2)]


def test_waiting_inputs_share_one_write_before_their_effects(bench: Bench) -> None:
    bench.run(bench.shell.start("http://h:1", 7))
    waiting = range(2, 2 + MAX_INPUTS)
    coming = {number: FakeConnection() for number in range(1, 3 + MAX_INPUTS)}
    bench.machine.answers = [[Persist(_record(10 + n)), Emit(_event(1 + n)), _say(n, n)] for n in coming]

    async def main() -> None:
        writes: list[int] = []
        bench.store.gate.clear()
        before = bench.store.writes
        adding = [asyncio.create_task(bench.shell.add_connection(n, one, HELLO)) for n, one in coming.items()]
        while len(bench.machine.seen) < 1:
            await asyncio.sleep(0)
        assert not any(one.said for one in coming.values())
        bench.store.gate.set()
        await asyncio.gather(*adding)
        writes.append(bench.store.writes - before)
        assert writes == [3], "one input alone, one full transaction, and the remaining input"

    bench.run(main())
    assert {number: one.said for number, one in coming.items()} == {number: [number] for number in coming}
    stored = RecordKeeper(bench.store, "j").record
    assert stored is not None
    assert stored.term == 10 + len(coming)
    assert [event.seq for event in bench.store.outboxes[-2]] == [1 + number for number in waiting]
    assert bench.journal.last_seq == 1 + len(coming)


def test_a_refused_request_does_not_affect_others_in_its_transaction(bench: Bench) -> None:
    connection = bench.connect(1)
    bench.machine.answers = [
        [Persist(_record(2))],
        [Persist(_record(3)), _say(1, 3)],
        BadInputError("no phase"),
        [Persist(_record(4)), _say(1, 4)],
    ]

    async def main() -> list[bool | BaseException]:
        bench.store.gate.clear()
        feeding = [asyncio.create_task(bench.shell.feed(Tick())) for _ in range(4)]
        while len(bench.machine.seen) < 2:
            await asyncio.sleep(0)
        bench.store.gate.set()
        return await asyncio.gather(*feeding, return_exceptions=True)

    first, second, refused, fourth = bench.run(main())
    assert (first, second, fourth) == (True, True, True)
    assert isinstance(refused, BadInputError)
    assert (connection.said, bench.stored_term(), bench.failed) == ([3, 4], 4, [])


@pytest.mark.parametrize("breaks", ["the machine", "the store"])
def test_a_failed_transaction_sends_nothing_for_any_of_its_inputs(bench: Bench, breaks: str) -> None:
    connection = bench.connect(1)
    input_instructions: list[Instruction] = [Persist(_record(3)), _say(1, 3)]
    bench.machine.answers = [
        [Persist(_record(2))],
        input_instructions,
        input_instructions if breaks == "the store" else ZeroDivisionError(),
    ]

    async def main() -> list[bool | BaseException]:
        bench.store.gate.clear()
        feeding = [asyncio.create_task(bench.shell.feed(Tick())) for _ in range(2)]
        feeding.append(asyncio.create_task(bench.shell.remove_connection(1)))
        late = FakeConnection()
        feeding.append(asyncio.create_task(bench.shell.add_connection(2, late, HELLO)))
        while len(bench.machine.seen) < 2:
            await asyncio.sleep(0)
        if breaks == "the store":
            bench.store.fails_after = 1
        bench.store.gate.set()
        outcome = await asyncio.gather(*feeding, return_exceptions=True)
        assert late.said == (["closed"] if breaks == "the machine" else [])
        return outcome

    outcome = bench.run(main())
    kind = StoreError if breaks == "the store" else ZeroDivisionError
    assert outcome[0] is True
    assert [type(one) for one in outcome[1:3]] == [kind, kind]
    assert [type(error) for error in bench.failed] == [kind]
    assert (connection.said, bench.stored_term()) == ([], 2)


def test_an_input_cancelled_while_it_waits_is_not_handled(bench: Bench) -> None:
    connection = bench.connect(1)
    bench.machine.answers = [[Persist(_record(2)), _say(1, 2)], [_say(1, 3)]]
    seen = len(bench.machine.seen)

    async def main() -> None:
        bench.store.gate.clear()
        feeding = [asyncio.create_task(bench.shell.feed(Tick())) for _ in range(3)]
        while len(bench.machine.seen) < seen + 1:
            await asyncio.sleep(0)
        feeding[1].cancel()
        await asyncio.sleep(0)
        bench.store.gate.set()
        assert await asyncio.gather(feeding[0], feeding[2]) == [True, True]

    bench.run(main())
    assert (connection.said, len(bench.machine.seen)) == ([2, 3], seen + 2)


def test_a_transaction_completes_even_if_its_caller_is_cancelled(bench: Bench) -> None:
    connection = bench.connect(1)
    bench.machine.answers.append([Persist(_record(2)), _say(1, 1), Persist(_record(3)), _say(1, 2)])

    async def main() -> None:
        bench.store.gate.clear()
        caller = asyncio.create_task(bench.shell.feed(Tick()))
        await asyncio.sleep(0)
        caller.cancel()
        stopping = asyncio.create_task(bench.shell.stop())
        await asyncio.sleep(0)
        caller.cancel()
        bench.store.gate.set()
        await stopping
        assert caller.cancelled()

    bench.run(main())
    assert (connection.said, bench.stored_term(), bench.failed) == ([1, 2], 3, [])


def test_a_failed_write_stops_the_shell(bench: Bench) -> None:
    connection = bench.connect(1)
    bench.machine.answers.append([Persist(_record(2)), _say(1, 1)])
    seen = len(bench.machine.seen)

    async def main() -> list[BaseException | bool]:
        bench.store.gate.clear()
        feeding = [asyncio.create_task(bench.shell.feed(Tick())) for _ in range(2)]
        await asyncio.sleep(0)
        bench.store.failure = StoreError("the server is gone")
        bench.store.gate.set()
        return await asyncio.gather(*feeding, return_exceptions=True)

    failed, unheard = bench.run(main())
    assert isinstance(failed, StoreError)
    assert unheard is False
    assert [type(error) for error in bench.failed] == [StoreError]
    assert (connection.said, len(bench.machine.seen)) == ([], seen + 1)


def test_inputs_wait_while_the_store_is_unavailable(bench: Bench) -> None:
    connection = bench.connect(1)
    bench.machine.answers.append([Persist(_record(2)), _say(1, 1)])
    bench.machine.answers.append([Persist(_record(3)), _say(1, 2)])
    seen = len(bench.machine.seen)

    async def main() -> None:
        bench.store.failure = StoreAwayError("nobody answers at h:1")
        feeding = [asyncio.create_task(bench.shell.feed(Tick())) for _ in range(2)]
        while bench.store.tries < 2:
            await asyncio.sleep(0.01)
        bench.time += 60.0
        for ask in (bench.shell.check_store, lambda: bench.shell.read_durable(lambda: None).send(None)):
            with pytest.raises(RefusedError, match=r"unavailable for 60 s.*training goes on.*nobody answers at h:1"):
                ask()
        assert (connection.said, len(bench.machine.seen)) == ([], seen + 1)
        bench.store.failure = None
        assert await asyncio.gather(*feeding) == [True, True]
        bench.shell.check_store()
        while len(bench.machine.seen) < seen + 3:
            await asyncio.sleep(0.01)
        (back,) = [event for event, _ in bench.machine.seen if isinstance(event, StoreBack)]
        assert back.away_s == 60.0

    bench.run(main())
    assert (connection.said, bench.stored_term(), bench.failed) == ([1, 2], 3, [])


def test_stopping_does_not_wait_for_an_unavailable_store(bench: Bench) -> None:
    connection = bench.connect(1)
    bench.machine.answers.append([Persist(_record(2)), _say(1, 1)])

    async def main() -> None:
        bench.store.failure = StoreAwayError("nobody answers at h:1")
        feeding = asyncio.create_task(bench.shell.feed(Tick()))
        while bench.store.tries < 1:
            await asyncio.sleep(0.01)
        await bench.shell.stop()
        with pytest.raises(StoreAwayError):
            await feeding

    bench.run(main())
    assert connection.said == []
    assert [type(error) for error in bench.failed] == [StoreAwayError]


@pytest.mark.parametrize(("schema", "whose"), [(SCHEMA - 1, "an older version wrote"), (SCHEMA + 1, "a newer version")])
def test_a_record_of_another_schema_is_refused(schema: int, whose: str) -> None:
    store = MemoryStore()
    other = msgspec.structs.replace(_record(1), schema=schema)
    store.compare_and_swap("jobs/j/record", msgspec.msgpack.encode(other), 0)
    with pytest.raises(BadInputError, match=rf"memory:.*schema {schema}.*reads schema {SCHEMA}: {whose}"):
        RecordKeeper(store, "j")


@pytest.mark.parametrize("value", [b"", b"\xc1", msgspec.msgpack.encode({"schema": SCHEMA}), b"\x81\xa1\xb5\x01"])
def test_an_unreadable_record_is_refused(value: bytes) -> None:
    store = MemoryStore()
    store.compare_and_swap("jobs/j/record", value, 0)
    with pytest.raises(BadInputError, match="cannot be read"):
        RecordKeeper(store, "j")


def test_a_broadcast_reaches_all_connections_and_is_encoded_once(bench: Bench) -> None:
    bench.run(bench.shell.start("http://h:1", 7))
    first, second = bench.connect(1), bench.connect(2)
    bench.does(Broadcast((1, 2, 3), Committed(term=1, step=5)))
    assert first.said == second.said == [5]
    assert first.frames[0] is second.frames[0]


def test_a_message_is_handled_immediately_if_no_transaction_is_running(bench: Bench) -> None:
    connection = bench.connect(1)
    bench.machine.answers = [[_say(1, 1)], [Persist(_record(2)), _say(1, 2)], [_say(1, 3)], [_say(1, 4)]]
    seen = len(bench.machine.seen)
    beats = [Heartbeat(generation=1, applied=(step,)) for step in range(4)]

    async def main() -> None:
        assert bench.shell.on_message(1, beats[0]) is None
        assert connection.said == [1]
        bench.store.gate.clear()
        left = [bench.shell.on_message(1, beat) for beat in beats[1:3]]
        cancelled = asyncio.create_task(bench.shell.feed(Tick()))
        await asyncio.sleep(0)
        cancelled.cancel()
        assert connection.said == [1]
        bench.store.gate.set()
        await asyncio.gather(*(one for one in left if one is not None))
        assert connection.said == [1, 2, 3]
        assert bench.shell.on_message(1, beats[3]) is None

    bench.run(main())
    assert [event for event, _ in bench.machine.seen[seen:]] == [Received(1, beat) for beat in beats]
    assert (connection.said, bench.stored_term()) == ([1, 2, 3, 4], 2)


def test_an_error_while_handling_an_agent_message_stops_the_shell(bench: Bench) -> None:
    bench.connect(1)
    bench.machine.answers.append([Emit(_event(5))])

    async def main() -> None:
        with pytest.raises(JournalError):
            bench.shell.on_message(1, Heartbeat())
        assert bench.shell.on_message(1, Heartbeat()) is None

    seen = len(bench.machine.seen)
    bench.run(main())
    assert [type(error) for error in bench.failed] == [JournalError]
    assert len(bench.machine.seen) == seen + 1


def test_the_transaction_lock_is_granted_to_one_task_at_a_time_in_order() -> None:
    async def main() -> list[int]:
        turns, story = TransactionLock(), list[int]()

        async def one(number: int) -> None:
            async with turns:
                story.append(number)
                await asyncio.sleep(0)
                story.append(number)

        assert turns.try_acquire()
        tasks = [asyncio.create_task(one(number)) for number in range(4)]
        await asyncio.sleep(0)
        tasks[1].cancel()
        turns.release()
        tasks[0].cancel()  # Its turn had already begun.
        assert not turns.try_acquire()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert turns.try_acquire()
        return story

    assert asyncio.run(main()) == [2, 2, 3, 3]
