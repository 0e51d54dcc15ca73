"""The outgoing data rate of connections as counted by the kernel, and its artificial limit."""

from __future__ import annotations

import os
import socket
import statistics
import threading
import time
from collections.abc import Iterator

import pytest

from holdfast.runtime.groups.severing import GroupSockets, SocketHandle
from holdfast.runtime.groups.transports import link_rate
from holdfast.runtime.groups.transports.link_rate import LinkRate, SentBytes

SENT = 4 << 20


class Pair:
    """A connection with a thread that reads all incoming data."""

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            self.out = socket.create_connection(server.getsockname())
            self._far, _ = server.accept()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        with self._far:
            while self._far.recv(1 << 20):
                pass

    def close(self) -> None:
        self.out.close()
        self._reader.join()

    def send(self, size: int = SENT) -> None:
        self.out.sendall(bytes(size))

    @property
    def handle(self) -> SocketHandle:
        return SocketHandle(descriptor=self.out.fileno(), inode=os.fstat(self.out.fileno()).st_ino)


@pytest.fixture
def pairs() -> Iterator[list[Pair]]:
    made = [Pair() for _ in range(3)]
    yield made
    for pair in made:
        pair.close()


def sockets(pairs: list[Pair]) -> GroupSockets:
    return GroupSockets(generation=1, handles=tuple(pair.handle for pair in pairs))


def acknowledged(pairs: list[Pair], size: int) -> None:
    """Wait until this many bytes are acknowledged on each connection."""
    while min(traffic.bytes for _, traffic, _ in link_rate._traffic([sockets(pairs)])) < size:
        time.sleep(0.001)


def test_a_rate_is_measured_once_enough_data_is_sent(pairs: list[Pair], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_rate, "MEASURE_S", 0.0)
    link, groups = LinkRate(), (sockets(pairs),)
    assert link.measure(groups) is None, "the first measurement has no earlier one to compare with"
    assert link.measure(groups) is None, "no data was sent"
    rate, sent = None, 0
    # On a busy machine, the peer's receive window may be full all the time, which allows no measurement.
    while rate is None:
        for pair in pairs:
            pair.send()
        sent += SENT
        acknowledged(pairs, sent)
        rate = link.measure(groups)
    assert rate > 1e5
    for pair in pairs:
        pair.send(100)
    assert link.measure(groups) is None, "too little data allows no measurement"


def test_the_link_is_measured_only_at_intervals(pairs: list[Pair], monkeypatch: pytest.MonkeyPatch) -> None:
    link = LinkRate()
    link.measure((sockets(pairs),))
    monkeypatch.setattr(link_rate, "_traffic", None)
    assert link.measure((sockets(pairs),)) is None


def test_the_rate_is_the_median_of_all_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_rate, "MEASURE_S", 0.0)
    at = [SentBytes(0, 0.0)] * 3
    monkeypatch.setattr(link_rate, "_traffic", lambda _: [(n, traffic, None) for n, traffic in enumerate(at)])
    link = LinkRate()
    link.measure(())
    at = [SentBytes(10 << 20, 1.0), SentBytes(10 << 20, 4.0), SentBytes(10 << 20, 2.0)]
    assert link.measure(()) == (10 << 20) / 2.0


def test_a_link_is_slowed_down_once_its_rate_is_known(pairs: list[Pair], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_rate, "MEASURE_S", 0.0)
    link, groups = LinkRate(), (sockets(pairs),)
    link.slow_down(groups, 100.0)
    for pair in pairs:
        pair.send(16 << 20)
    acknowledged(pairs, 16 << 20)
    known = [traffic.rate(SentBytes(0, 0.0)) or 0.0 for _, traffic, _ in link_rate._traffic(groups)]
    for _ in range(2):  # The second call has no effect.
        link.slow_down(groups, 100.0)
    link.measure(groups)
    for pair in pairs:
        pair.send(4 << 20)
    acknowledged(pairs, 20 << 20)
    rate = link.measure(groups)
    assert rate is not None
    assert rate < statistics.median(known) / 5


def test_a_closed_connection_yields_no_traffic(pairs: list[Pair]) -> None:
    groups = (sockets(pairs),)
    for pair in pairs:
        pair.out.close()
    assert list(link_rate._traffic(groups)) == []
