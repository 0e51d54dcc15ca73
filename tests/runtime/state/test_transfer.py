from __future__ import annotations

import contextlib
import queue
import socket
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast.control.link.wire import AUTHENTICATION_S, MAX_PENDING_PEERS, TransferError, Wire
from holdfast.protocol.commit import Commit
from holdfast.protocol.plan import GenerationPlan, Member, PassedStep
from holdfast.protocol.state import LiveSource
from holdfast.runtime.generation.resources import Resources
from holdfast.runtime.groups.rendezvous import Board
from holdfast.runtime.state import receive as inbox
from holdfast.runtime.state import wire
from holdfast.runtime.state.receive import StateInbox, StateReceiver
from holdfast.runtime.state.state import Manifest, TrainingState, state_hash
from holdfast.runtime.state.transfer import StateSender
from holdfast.runtime.state.wire import FlatState, Ticket, stream_chunks

SENDER, RECEIVER = "n1/0/a", "n2/0/b"
PASSED = PassedStep(step=7, commit=Commit(grad_square=1.0, loss_sum=2.0, samples=3, nonfinite=0))
DEADLINE_S = 60.0


def make(steps: int, width: int = 300) -> TrainingState:
    torch.manual_seed(steps)
    model = torch.nn.Linear(width, width)
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(steps):
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    return TrainingState(model, optimizer)


@dataclass
class Side:
    """A receiver with a session made of lambdas."""

    state: TrainingState
    secret: bytes = b"k" * 32
    generation: int = 4
    receipts: list[StateReceiver] = field(default_factory=list)
    opened: threading.Event = field(default_factory=threading.Event)
    ended: threading.Event = field(default_factory=threading.Event)
    midway: Callable[[], None] = lambda: None
    late: bool = False
    chunk_bytes: int = wire.CHUNK_BYTES
    #: The clock that limits unauthenticated connections.
    now: float = 0.0
    #: Set once the plan of the generation is known.
    decided: threading.Event = field(default_factory=threading.Event)
    #: Whether the current state stays unchanged until the incoming one is adopted.
    aside: bool = False
    senders: tuple[str, ...] = (SENDER,)

    def __post_init__(self) -> None:
        self.lock = threading.Lock()
        self.decided.set()
        #: Released once per offer of this generation, and once per offer that waits for its plan.
        self.offered = threading.Semaphore(0)
        self.waited = threading.Semaphore(0)
        self.inbox = StateInbox("127.0.0.1", admit=self.admit, open_receiver=self.open, monotonic=lambda: self.now)
        self.port = self.inbox.start()

    def plan(self, secret: bytes | None = None, generation: int | None = None) -> GenerationPlan:
        members = tuple(
            Member(worker=worker, host="127.0.0.1", state_port=self.port) for worker in (*self.senders, RECEIVER)
        )
        return GenerationPlan(
            term=1,
            generation=self.generation if generation is None else generation,
            members=members,
            sources={RECEIVER: LiveSource(members=self.senders)},
            secret=self.secret if secret is None else secret,
        )

    def admit(self, offer: wire.Offer, wait_s: float) -> Ticket | None:
        generation = offer.generation
        if not wait_s and generation == self.generation:
            self.offered.release()
        if wait_s:
            self.waited.release()
            self.decided.wait(DEADLINE_S)
        if generation != self.generation or not self.decided.is_set():
            return None
        return Ticket(plan=self.plan(), sender=self.senders[offer.stream % len(self.senders)], receiver=RECEIVER)

    def open(self, ticket: Ticket) -> StateReceiver | None:
        if self.late:
            return None
        with self.lock:
            if not self.receipts:
                self.receipts.append(
                    StateReceiver(
                        ticket=ticket,
                        prepare=partial(self.state.prepare, separate=self.aside),
                        on_end=self.on_end,
                        midway=self.midway,
                        chunk_bytes=self.chunk_bytes,
                    )
                )
                self.opened.set()
            return self.receipts[0]

    def on_end(self) -> None:
        if self.receipts[0].has_ended:
            self.ended.set()


@pytest.fixture
def sides() -> Iterator[Callable[..., Side]]:
    made: list[Side] = []

    def make_side(**options: Any) -> Side:
        made.append(Side(state=make(0, width=options.pop("width", 300)), **options))
        return made[-1]

    before = set(threading.enumerate())
    yield make_side
    for side in made:
        side.decided.set()
        side.inbox.close()
        for receipt in side.receipts:
            receipt.abort()
            assert receipt.wait_inactive(DEADLINE_S)
    ours = [thread for thread in threading.enumerate() if thread not in before]
    for thread in ours:
        thread.join(DEADLINE_S)
    assert not any(thread.is_alive() for thread in ours)


def push(
    plan: GenerationPlan, state: TrainingState, sender: str = SENDER, step: int = 7, **options: object
) -> tuple[StateSender, queue.Queue[str]]:
    outcome: queue.Queue[str] = queue.Queue()
    pushed = StateSender(
        plan=plan,
        sender=sender,
        receivers=(RECEIVER,),
        view=state.capture(),
        step=step,
        passed=(PASSED,),
        on_end=lambda error, _receiver: outcome.put(error),
        **options,  # type: ignore[arg-type]
    )
    pushed.start()
    return pushed, outcome


OTHERS = ("n2/0/c", "n3/0/d", "n4/0/e")


@pytest.mark.parametrize("others", [1, 2, 3])
def test_a_state_sent_in_parts_by_several_senders_is_received(sides: Callable[..., Side], others: int) -> None:
    side, source = sides(chunk_bytes=4096, senders=(SENDER, *OTHERS[:others])), make(3)
    sent = [push(side.plan(), source, sender, chunk_bytes=4096) for sender in reversed(side.senders)]
    assert [outcome.get(timeout=DEADLINE_S) for _, outcome in sent] == [""] * len(sent)
    assert side.ended.wait(DEADLINE_S)
    header = side.receipts[0].result()
    side.state.adopt(header.manifest, side.receipts[0].tensors)
    assert header.step == 7
    assert all(map(torch.equal, side.state.capture().tensors, source.capture().tensors))


def test_a_transfer_is_incomplete_until_every_sender_has_sent_its_part(sides: Callable[..., Side]) -> None:
    side, source = sides(chunk_bytes=4096, senders=(SENDER, OTHERS[0])), make(3)
    pushed, outcome = push(side.plan(), source, chunk_bytes=4096)
    assert outcome.get(timeout=DEADLINE_S) == ""
    assert pushed.sent
    assert not side.receipts[0].has_ended
    _, outcome = push(side.plan(), source, OTHERS[0], chunk_bytes=4096)
    assert outcome.get(timeout=DEADLINE_S) == ""
    assert side.ended.wait(DEADLINE_S)


@pytest.mark.parametrize(("step", "width"), [(8, 300), (7, 301)])
def test_senders_with_inconsistent_steps_or_tensors_are_refused(
    sides: Callable[..., Side], step: int, width: int
) -> None:
    side = sides(chunk_bytes=4096, senders=(SENDER, OTHERS[0]))
    _, first = push(side.plan(), make(3), chunk_bytes=4096)
    assert first.get(timeout=DEADLINE_S) == ""
    _, second = push(side.plan(), make(3, width=width), OTHERS[0], step, chunk_bytes=4096)
    assert second.get(timeout=DEADLINE_S)
    assert side.ended.wait(DEADLINE_S)
    with pytest.raises(TransferError, match="does not belong to this transfer"):
        side.receipts[0].result()


def test_a_sender_cannot_send_the_streams_of_another_sender(sides: Callable[..., Side]) -> None:
    side = sides(senders=(SENDER, OTHERS[0]))
    swapped = msgspec.structs.replace(side.plan(), sources={RECEIVER: LiveSource(members=(OTHERS[0], SENDER))})
    _, outcome = push(swapped, make(3), connect_attempts=1)
    assert "could not be authenticated" in outcome.get(timeout=DEADLINE_S)
    assert not side.receipts


@pytest.mark.parametrize("chunk", [wire.CHUNK_BYTES, 4096])
def test_a_state_is_received_completely_from_one_sender(sides: Callable[..., Side], chunk: int) -> None:
    side, source = sides(chunk_bytes=chunk), make(3)
    pushed, outcome = push(side.plan(), source, chunk_bytes=chunk)
    assert outcome.get(timeout=DEADLINE_S) == ""
    assert pushed.sent
    assert side.ended.wait(DEADLINE_S)
    header = side.receipts[0].result()
    assert (header.step, header.passed) == (7, (PASSED,))
    side.state.adopt(header.manifest, side.receipts[0].tensors)
    assert state_hash(side.state.capture()) == state_hash(source.capture())
    assert side.receipts[0].nbytes == source.capture().nbytes


def test_neither_side_keeps_transferred_tensors_after_adoption(sides: Callable[..., Side]) -> None:
    side, source = sides(aside=True), make(3)
    pushed, outcome = push(side.plan(), source)
    sent = [weakref.ref(tensor) for tensor in pushed._tensors]  # pyright: ignore[reportPrivateUsage]
    assert outcome.get(timeout=DEADLINE_S) == ""
    assert pushed.join(DEADLINE_S)
    assert side.ended.wait(DEADLINE_S)
    (receipt,) = side.receipts
    received = [weakref.ref(tensor) for tensor in receipt.tensors[: len(list(side.state.model.parameters()))]]
    side.state.adopt(receipt.result().manifest, receipt.tensors)
    receipt.release_tensors()
    assert [ref() for ref in (*sent, *received)] == [None] * (len(sent) + len(received))
    assert receipt.nbytes == source.capture().nbytes, "the size must still be known"


@pytest.mark.parametrize("whole", [True, False])
def test_tensors_received_for_an_abandoned_generation_are_freed(sides: Callable[..., Side], *, whole: bool) -> None:
    """If its group lacks the newer state, a local rank continues with the old one, and has no room for both."""
    midway, go_on = threading.Event(), threading.Event()

    def stand_still() -> None:
        midway.set()
        assert go_on.wait(DEADLINE_S)

    side, source = sides(aside=True), make(3)
    if not whole:
        side.midway = stand_still
    _, outcome = push(side.plan(), source)
    assert (side.ended if whole else midway).wait(DEADLINE_S)
    (receipt,) = side.receipts
    received = [weakref.ref(tensor) for tensor in receipt.tensors[: len(list(side.state.model.parameters()))]]
    assert all(ref() is not None for ref in received)
    left = Resources(generation=4, board=Board(4, lambda _: None), receipt=receipt)
    left.interrupt()
    left.retire()
    go_on.set()
    assert outcome.get(timeout=DEADLINE_S) == "" or not whole
    assert receipt.wait_inactive(DEADLINE_S)
    assert [ref() for ref in received] == [None] * len(received)
    with pytest.raises(TransferError, match="broken off"):
        receipt.result()


def test_an_aborted_transfer_allocates_no_tensors(sides: Callable[..., Side]) -> None:
    side, preparing, go_on = sides(aside=True), threading.Event(), threading.Event()
    prepare = side.state.prepare

    def slowly(manifest: Manifest, *, separate: bool) -> list[torch.Tensor]:
        preparing.set()
        assert go_on.wait(DEADLINE_S)
        return prepare(manifest, separate=separate)

    side.state.prepare = slowly  # pyright: ignore[reportAttributeAccessIssue]
    _, outcome = push(side.plan(), make(3))
    assert preparing.wait(DEADLINE_S)
    (receipt,) = side.receipts
    receipt.abort()
    receipt.release_tensors()
    go_on.set()
    assert outcome.get(timeout=DEADLINE_S)
    assert receipt.wait_inactive(DEADLINE_S)
    assert not receipt.tensors


def test_a_separately_received_state_changes_nothing_before_adoption(sides: Callable[..., Side]) -> None:
    side, source = sides(aside=True), make(3)
    side.state = make(2)
    own = state_hash(side.state.capture())
    _, outcome = push(side.plan(), source)
    assert outcome.get(timeout=DEADLINE_S) == ""
    assert side.ended.wait(DEADLINE_S)
    assert state_hash(side.state.capture()) == own
    side.state.adopt(side.receipts[0].result().manifest, side.receipts[0].tensors)
    assert state_hash(side.state.capture()) == state_hash(source.capture())


@given(st.integers(0, 10_000), st.integers(1, 3000))
def test_the_streams_together_carry_every_byte_once(nbytes: int, chunk: int) -> None:
    parts = sorted(part for stream in range(wire.STREAMS) for part in stream_chunks(nbytes, stream, chunk))
    assert [start for start, _ in parts] == list(range(0, nbytes, chunk))
    assert sum(length for _, length in parts) == nbytes


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.data())
def test_pieces_of_a_flat_state_are_the_bytes_of_the_range(sizes: list[int], data: st.DataObject) -> None:
    tensors = [torch.randint(0, 255, (size,), dtype=torch.uint8) for size in sizes]
    flat = FlatState(tensors)
    whole = b"".join(bytes(tensor.tolist()) for tensor in tensors)
    assert flat.nbytes == len(whole)
    start = data.draw(st.integers(0, len(whole)))
    length = data.draw(st.integers(0, len(whole) - start))
    assert b"".join(flat.pieces(start, length)) == whole[start : start + length]


def test_a_sender_with_a_wrong_secret_is_refused(sides: Callable[..., Side]) -> None:
    side = sides()
    before = state_hash(side.state.capture())
    _, outcome = push(side.plan(secret=b"x" * 32), make(3))
    assert "could not be authenticated" in outcome.get(timeout=DEADLINE_S)
    assert side.receipts == []
    assert state_hash(side.state.capture()) == before


def test_stale_generations_and_late_offers_are_refused(sides: Callable[..., Side]) -> None:
    side = sides()
    _, outcome = push(side.plan(generation=3), make(1), connect_attempts=2)
    assert outcome.get(timeout=DEADLINE_S) != ""
    late = sides(late=True)
    _, outcome = push(late.plan(), make(1))
    assert outcome.get(timeout=DEADLINE_S) != ""
    assert side.receipts == late.receipts == []


class Corrupting(Wire):
    """Flips a bit of each chunk."""

    def write(self, *buffers: bytes | memoryview) -> None:
        if len(buffers) > 2:
            flipped = bytearray(buffers[1])
            flipped[len(flipped) // 2] ^= 1
            buffers = (buffers[0], bytes(flipped), *buffers[2:])
        super().write(*buffers)


def test_corrupted_bytes_are_refused(sides: Callable[..., Side]) -> None:
    side = sides()
    pushed, outcome = push(side.plan(), make(3), make_wire=Corrupting)
    assert outcome.get(timeout=DEADLINE_S) != ""
    assert not pushed.sent
    assert side.ended.wait(DEADLINE_S)
    with pytest.raises(TransferError, match=r"corrupted|closed"):
        side.receipts[0].result()


def test_a_state_of_another_model_is_refused(sides: Callable[..., Side]) -> None:
    side = sides()
    _, outcome = push(side.plan(), make(1, width=20))
    assert outcome.get(timeout=DEADLINE_S) != ""
    assert side.ended.wait(DEADLINE_S)
    with pytest.raises(TransferError, match="weight"):
        side.receipts[0].result()


@pytest.mark.parametrize("who", ["sender", "receiver"])
def test_both_sides_end_immediately_if_one_side_aborts(sides: Callable[..., Side], who: str) -> None:
    reached, release = threading.Event(), threading.Event()

    def hold() -> None:
        reached.set()
        assert release.wait(DEADLINE_S)

    # This is more than the sockets' buffers hold, so neither side can have finished.
    side = sides(midway=hold if who == "sender" else lambda: None, width=3000)
    pushed, outcome = push(side.plan(), make(0, width=3000), midway=hold if who == "receiver" else lambda: None)
    assert reached.wait(DEADLINE_S)
    assert side.opened.wait(DEADLINE_S)  # The sender's first chunk may still be in flight.
    pushed.abort() if who == "sender" else side.receipts[0].abort()
    release.set()
    assert outcome.get(timeout=DEADLINE_S) != ""
    assert not pushed.sent
    assert pushed.join(DEADLINE_S)
    assert side.receipts[0].wait_inactive(DEADLINE_S)
    assert side.receipts[0].has_ended
    with pytest.raises(TransferError):
        side.receipts[0].result()


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(garbage=st.binary(min_size=1, max_size=300), framed=st.booleans())
def test_unauthenticated_garbage_is_never_parsed(sides: Callable[..., Side], garbage: bytes, framed: bool) -> None:
    side = sides()
    try:
        with socket.create_connection(("127.0.0.1", side.port), timeout=DEADLINE_S) as connection:
            preamble = wire.PREAMBLE.pack(wire.STATE, side.generation, 0, 0, b"n" * 32)
            connection.sendall((preamble if framed else b"") + garbage)
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(4096):
                pass
    except ConnectionError:
        pass  # The peer refused with bytes unread, which resets the connection.
    assert side.receipts == []
    side.inbox.close()


@pytest.fixture
def strangers() -> Iterator[Callable[[Side, int, bytes], list[socket.socket]]]:
    """Open connections that send something, or nothing, and stay."""
    with contextlib.ExitStack() as stack:

        def come(side: Side, count: int, words: bytes = b"") -> list[socket.socket]:
            came = []
            for _ in range(count):
                connection = socket.create_connection(("127.0.0.1", side.port), timeout=DEADLINE_S)
                came.append(stack.enter_context(connection))
                connection.sendall(words)
            return came

        yield come


Come = Callable[..., list[socket.socket]]
HALF = wire.PREAMBLE.pack(wire.STATE, 4, 0, 0, b"n" * 32)


@pytest.mark.parametrize("words", [b"", b"holdf", HALF, HALF + b"x" * 40], ids=["silent", "slow", "unproven", "half"])
def test_unauthenticated_connections_do_not_block_a_sender(
    sides: Callable[..., Side], strangers: Come, words: bytes
) -> None:
    side, source = sides(), make(3)
    strangers(side, 3 * MAX_PENDING_PEERS, words)
    pushed, outcome = push(side.plan(), source)
    assert outcome.get(timeout=DEADLINE_S) == ""
    assert pushed.sent
    assert side.ended.wait(DEADLINE_S)


def test_unauthenticated_connections_are_dropped_oldest_first_or_on_timeout(
    sides: Callable[..., Side], strangers: Come, caplog: pytest.LogCaptureFixture
) -> None:
    side = sides()
    first, *others = strangers(side, MAX_PENDING_PEERS + 1)
    assert first.recv(1) == b""
    side.now += AUTHENTICATION_S
    for connection in others:
        assert connection.recv(1) == b""
    side.inbox.close()
    assert len(caplog.messages) == 2
    assert "a sender at 127.0.0.1 is rejected" in caplog.messages[0]
    assert f"{MAX_PENDING_PEERS} more like this" in caplog.messages[1]


UNPLANNED = wire.PREAMBLE.pack(wire.STATE, 9, 0, 0, b"n" * 32)


def test_a_sender_waiting_for_its_plan_is_not_displaced_by_others(sides: Callable[..., Side], strangers: Come) -> None:
    side, source = sides(), make(3)
    side.decided.clear()
    _, early = push(side.plan(), source)
    for _ in range(wire.STREAMS):
        assert side.waited.acquire(timeout=DEADLINE_S)
    strangers(side, 2 * inbox.MAX_WAITING, UNPLANNED)
    strangers(side, 2 * MAX_PENDING_PEERS)
    side.decided.set()
    assert early.get(timeout=DEADLINE_S) == ""
    assert side.ended.wait(DEADLINE_S)


def test_a_sender_retries_while_others_occupy_all_waiting_slots(sides: Callable[..., Side], strangers: Come) -> None:
    side, source = sides(), make(3)
    side.decided.clear()
    strangers(side, inbox.MAX_WAITING, UNPLANNED)
    for _ in range(inbox.MAX_WAITING):
        assert side.waited.acquire(timeout=DEADLINE_S)
    _, kept_out = push(side.plan(), source)
    for _ in range(8 * wire.STREAMS):
        assert side.offered.acquire(timeout=DEADLINE_S)
    side.decided.set()
    assert kept_out.get(timeout=DEADLINE_S) == ""
    assert side.ended.wait(DEADLINE_S)
