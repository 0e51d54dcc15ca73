"""The link between a worker process and its agent."""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.control.link.framing import (
    Crashed,
    FrameDecoder,
    FrameError,
    FromWorkerProcess,
    ToWorkerProcess,
    encode_frame,
)
from holdfast.control.link.worker_link import WorkerLink
from holdfast.protocol.failures import FailureKind
from holdfast.protocol.layouts.group_messages import UnitAnswer, UnitAwaits
from holdfast.protocol.messages.orders import JobDone, Order, Posted, Stop
from holdfast.protocol.messages.worker import Finished, WorkerMessage
from holdfast.protocol.names import MAX_MESSAGE_BYTES

DEADLINE = 30.0
WORKER = "node-0/0/abcdef"


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        server.bind(str(tmp_path / "agent.sock"))
        server.listen()
        server.settimeout(DEADLINE)
        yield server


class Records:
    """Records the calls of a link's callbacks."""

    def __init__(self) -> None:
        self.orders: list[Order] = []
        self.changed = threading.Condition()
        self.lost = threading.Event()

    def on_order(self, order: Order) -> None:
        with self.changed:
            self.orders.append(order)
            self.changed.notify_all()

    def wait_for(self, count: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.orders) >= count, DEADLINE)


def test_orders_arrive_in_order_however_the_stream_is_split(listener: socket.socket) -> None:
    link = WorkerLink(listener.getsockname())
    records = Records()
    link.start(records.on_order, records.lost.set)
    peer, _ = listener.accept()
    orders: list[Order] = [Stop(term=1, generation=generation) for generation in range(50)]
    orders.append(Posted(generation=1, keys={"k": b"x" * 60000}))
    stream = b"".join(encode_frame(order) for order in orders)
    with peer:
        for start in range(0, len(stream), 777):
            peer.sendall(stream[start : start + 777])
        records.wait_for(len(orders))
        assert records.orders == orders
        link.close()
    assert not records.lost.is_set()


def test_the_loss_of_the_agent_is_reported_once(listener: socket.socket) -> None:
    link = WorkerLink(listener.getsockname())
    losses: list[int] = []
    lost = threading.Event()

    def on_lost() -> None:
        losses.append(1)
        lost.set()

    link.start(lambda order: None, on_lost)
    peer, _ = listener.accept()
    peer.close()
    assert lost.wait(DEADLINE)
    # The link is closed; sending is not an error, because the owner already knows.
    link.send(Finished(worker=WORKER, generation=1, step=1))
    link.close()
    assert losses == [1]


@pytest.mark.parametrize("garbage", [b"\xff\xff\xff\xff", struct.pack(">I", 3) + b"abc", struct.pack(">I", 0)])
def test_garbage_ends_the_link(listener: socket.socket, garbage: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    link = WorkerLink(listener.getsockname())
    records = Records()
    link.start(records.on_order, records.lost.set)
    peer, _ = listener.accept()
    with peer:
        peer.sendall(garbage)
        assert records.lost.wait(DEADLINE)
    link.close()
    assert records.orders == []
    assert "the agent's connection is broken" in capsys.readouterr().err


def test_threads_send_whole_frames(listener: socket.socket) -> None:
    link = WorkerLink(listener.getsockname())
    peer, _ = listener.accept()
    peer.settimeout(DEADLINE)

    def many(step: int) -> None:
        for _ in range(100):
            link.send(Finished(worker=WORKER, generation=1, step=step))

    threads = [threading.Thread(target=many, args=(step,)) for step in range(1, 5)]
    for thread in threads:
        thread.start()
    decoder: FrameDecoder[WorkerMessage] = FrameDecoder(FromWorkerProcess)
    got: list[WorkerMessage] = []
    with peer:
        while len(got) < 400:
            got += decoder.feed(peer.recv(1 << 16))
    for thread in threads:
        thread.join()
    link.close()
    steps = [message.step for message in got if isinstance(message, Finished)]
    assert sorted(steps) == sorted([1, 2, 3, 4] * 100)


def test_the_link_reads_the_pid_of_the_agent(listener: socket.socket) -> None:
    link = WorkerLink(listener.getsockname())
    assert link.agent_pid == os.getpid()
    link.close()


def test_connecting_without_an_agent_raises_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        WorkerLink(str(tmp_path / "nobody.sock"))


def test_a_frame_that_is_too_large_is_not_sent() -> None:
    message = Crashed(worker=WORKER, kind=FailureKind.EXCEPTION, detail="x" * (MAX_MESSAGE_BYTES + 1), exit_code=1)
    with pytest.raises(FrameError, match="at most"):
        encode_frame(message)


@given(st.binary(max_size=200))
def test_random_bytes_decode_or_raise_a_frame_error(data: bytes) -> None:
    decoder: FrameDecoder[Order] = FrameDecoder(ToWorkerProcess)
    try:
        messages = decoder.feed(data)
    except FrameError:
        return
    assert all(isinstance(message, msgspec.Struct) for message in messages)


@given(st.data())
def test_a_mutated_message_is_refused_or_valid(data: st.DataObject) -> None:
    frame = bytearray(encode_frame(JobDone()) + encode_frame(Posted(generation=3, keys={"a": b"12345"})))
    at = data.draw(st.integers(0, len(frame) - 1))
    frame[at] = data.draw(st.integers(0, 255))
    decoder: FrameDecoder[Order] = FrameDecoder(ToWorkerProcess)
    try:
        messages = decoder.feed(bytes(frame))
    except FrameError:
        return
    assert all(isinstance(message, JobDone | Posted) for message in messages)


def test_replica_group_answers_arrive_before_orders_on_the_same_connection(
    listener: socket.socket, tmp_path: Path
) -> None:
    records, met, unit_lost = Records(), list[UnitAnswer](), threading.Event()
    link = WorkerLink(str(tmp_path / "agent.sock"))
    agent, _ = listener.accept()
    with agent:
        link.listen_for_unit(met.append, unit_lost.set)
        awaits = UnitAwaits(missing=(1,))
        agent.sendall(encode_frame(awaits))
        link.start(records.on_order, records.lost.set)
        agent.sendall(encode_frame(awaits) + encode_frame(JobDone()))
        records.wait_for(1)
        assert met == [awaits, awaits]
        assert records.orders == [JobDone()]
    assert records.lost.wait(DEADLINE)
    assert not unit_lost.is_set()
    link.close()


def test_an_agent_lost_before_the_link_starts_is_reported_as_lost(listener: socket.socket, tmp_path: Path) -> None:
    records, unit_lost = Records(), threading.Event()
    link = WorkerLink(str(tmp_path / "agent.sock"))
    listener.accept()[0].close()
    link.listen_for_unit(lambda _: None, unit_lost.set)
    assert unit_lost.wait(DEADLINE)
    link.start(records.on_order, records.lost.set)
    assert records.lost.wait(DEADLINE)
    link.close()
