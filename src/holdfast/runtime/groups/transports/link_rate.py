"""Measures how fast a worker's data reaches its peers, from the kernel's counters of normal traffic.

For each connection the kernel counts the acknowledged bytes, and the time in which data was in flight. Waits for peers
that compute do not count. A worker with a slow link is slow to all peers, and they are slow only to it. So the median
of its connections shows which link is slow.
"""

from __future__ import annotations

import socket
import statistics
import struct
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from holdfast.runtime.groups.severing import GroupSockets, open_duplicate

#: seconds between two measurements; one takes microseconds for each connection
MEASURE_S = 5.0
#: below this, the rate shows how long the peer took to acknowledge, not the speed of the link
LEAST_BYTES = 1 << 20

_BYTES_ACKED_AT, _BUSY_AT, _LONG_ENOUGH = 120, 168, 184
_TCP_INFO_BYTES = 256
_TWO = struct.Struct("<QQ")
_ONE = struct.Struct("<Q")
_MAX_PACING = 47  # SO_MAX_PACING_RATE


@dataclass(frozen=True, slots=True)
class SentBytes:
    """The traffic that a TCP connection has sent so far."""

    #: acknowledged bytes
    bytes: int
    #: seconds in which data was in flight, without the time in which the peer's receive window was full
    busy_s: float

    def rate(self, before: SentBytes) -> float | None:
        """Return bytes per second with data in flight since an earlier count; None if less than `LEAST_BYTES` were
        sent.
        """
        sent, busy_s = self.bytes - before.bytes, self.busy_s - before.busy_s
        return sent / busy_s if sent >= LEAST_BYTES and busy_s > 0.0 else None


class LinkRate:
    """One worker's link, over any number of groups. For the training thread."""

    def __init__(self) -> None:
        self._known: dict[int, SentBytes] = {}
        self._limited: set[int] = set()
        self._looked_at = 0.0

    def measure(self, groups: Iterable[GroupSockets]) -> float | None:
        """Return how fast data reached peers since the last measurement, in bytes per second with data in flight
        (median of the connections).

        Return None at the first measurement, if the last one was less than `MEASURE_S` ago, or if too little was sent.
        """
        now = time.monotonic()
        if now - self._looked_at < MEASURE_S:
            return None
        self._looked_at, known = now, self._known
        self._known = {inode: traffic for inode, traffic, _ in _traffic(groups)}
        new = (traffic.rate(known[inode]) for inode, traffic in self._known.items() if inode in known)
        rates = [rate for rate in new if rate is not None]
        return statistics.median(rates) if rates else None

    def slow_down(self, groups: Iterable[GroupSockets], times: float) -> None:
        """Limit each connection to its mean rate so far, divided by `times`, from now on: fault injection. Connections
        that this object has limited already, or that have sent less than `LEAST_BYTES`, are left alone.
        """
        for inode, traffic, connection in _traffic(groups):
            rate = traffic.rate(SentBytes(0, 0.0))
            if inode not in self._limited and rate is not None:
                self._limited.add(inode)
                connection.setsockopt(socket.SOL_SOCKET, _MAX_PACING, max(1, int(rate / times)))


def _traffic(groups: Iterable[GroupSockets]) -> Iterator[tuple[int, SentBytes, socket.socket]]:
    """Yield each connection's inode, the traffic it has sent since it was opened, and the connection, which is valid
    until the next iteration. Closed connections are left out, and all of them if the kernel does not count these bytes.
    """
    for sockets in groups:
        for handle in sockets.handles:
            with open_duplicate(handle) as connection:
                if connection is None:
                    continue
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
                if len(info) >= _LONG_ENOUGH:  # older kernels report less
                    (sent,) = _ONE.unpack_from(info, _BYTES_ACKED_AT)
                    busy_us, no_room_us = _TWO.unpack_from(info, _BUSY_AT)
                    yield handle.inode, SentBytes(sent, max(0, busy_us - no_room_us) / 1e6), connection
