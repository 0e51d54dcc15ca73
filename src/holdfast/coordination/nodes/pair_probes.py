"""Probes of pairs of nodes: each node is asked to connect to the other one's listener, and reports the result."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.coordination.transaction import Transaction
from holdfast.protocol.messages.agent import AddressProbed, ProbeAddress


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A node with a probe listener, and the connection of its agent."""

    node: str
    connection: int
    address: str
    port: int


@dataclass(slots=True)
class PairProbe:
    """A probe of two nodes. It fails if one of them cannot connect to the other, or does not answer in time."""

    number: int
    one: Endpoint
    other: Endpoint
    since: float
    #: The connections that have not answered.
    awaited: set[int]
    #: The node that could not connect, with the reason; "" if both could.
    error: str = ""


class PairProbes:
    """The probes between pairs of nodes that are in progress."""

    def __init__(self, transaction: Transaction, timeout_s: float) -> None:
        self._transaction = transaction
        self.timeout_s = timeout_s
        #: By number, the oldest first.
        self._under_way: dict[int, PairProbe] = {}
        self._number = 0

    def start(self, one: Endpoint, other: Endpoint) -> PairProbe:
        """Ask two nodes to connect to each other's probe listeners; return the probe, which has just begun."""
        self._number += 1
        awaited = {one.connection, other.connection}
        probe = PairProbe(self._number, one, other, self._transaction.now, awaited)
        self._under_way[self._number] = probe
        for here, there in ((one, other), (other, one)):
            ask = ProbeAddress(number=self._number, host=there.address, port=there.port)
            self._transaction.send(here.connection, ask)
        return probe

    def cancel(self, probe: PairProbe) -> None:
        """Ignore the answers of a probe from now on."""
        self._under_way.pop(probe.number, None)

    def on_probed(self, connection: int, answer: AddressProbed) -> PairProbe | None:
        """Handle an answer. Return its probe if it has ended, by an error or because both have connected, else None.

        Answers to unknown or ended probes are ignored.
        """
        probe = self._under_way.get(answer.number)
        if probe is None or connection not in probe.awaited:
            return None
        probe.awaited.discard(connection)
        if answer.error:
            here = probe.one if connection == probe.one.connection else probe.other
            probe.error = f"{here.node}: {answer.error}"
        elif probe.awaited:
            return None
        self.cancel(probe)
        return probe

    def tick(self) -> list[PairProbe]:
        """Remove the probes that took longer than the time-out, and return them with an error."""
        late: list[PairProbe] = []
        for probe in self._under_way.values():
            if self._transaction.now - probe.since <= self.timeout_s:
                break
            late.append(probe)
        for probe in late:
            self.cancel(probe)
            probe.error = f"no connection within {self.timeout_s:g} s"
        return late

    def pause_over(self) -> None:
        """Give all probes their full time again, because this process was paused."""
        for probe in self._under_way.values():
            probe.since = self._transaction.now
