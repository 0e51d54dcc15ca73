"""Probes newcomers before they are let in: a member connects to the newcomer, and the newcomer to the member.

A failed probe is repeated by a member on another node, if there is one. If it fails again the newcomer is refused: it
never becomes part of a plan. What a newcomer says meanwhile is kept, and handled once it is let in. Nodes that come
before a job trains are let in at once, and probed by `start_probes`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from holdfast.coordination.membership import Node
from holdfast.coordination.nodes.pair_probes import Endpoint, PairProbe, PairProbes
from holdfast.coordination.turn import Transaction
from holdfast.protocol.messages.agent import AgentMessage, Hello
from holdfast.protocol.names import PROTOCOL

#: A node is refused after this many failed probes, of different other nodes if there are several.
TRIES = 2
#: A newcomer that says more before it is let in comes again.
MAX_BACKLOG = 1024
#: Newcomers that were probed are remembered by their sessions, at most this many.
_KEPT = 4096


class ProbeVerdict(Enum):
    """What becomes of a newcomer."""

    ADMITTED = auto()
    REFUSED = auto()


@dataclass(slots=True)
class Newcomer:
    """A connection whose agent has said Hello and is being probed."""

    connection: int
    hello: Hello
    #: what its agent has said since
    backlog: list[AgentMessage] = field(default_factory=list[AgentMessage])
    #: the failed probes: by which members, and what went wrong
    failed: dict[str, str] = field(default_factory=dict[str, str])
    tries: int = 0
    #: the probe under way, and of which member
    probe: PairProbe | None = None
    member: str = ""

    @property
    def endpoint(self) -> Endpoint:
        """Where members connect to it."""
        return Endpoint(self.hello.node, self.connection, self.hello.address, self.hello.probe_port)

    @property
    def why(self) -> str:
        """Why it is refused: what failed, and what to do."""
        return why_unreachable(self.hello.node, "the members", self.failed)


class Probing:
    """The newcomers that are being probed, by their connections."""

    def __init__(self, transaction: Transaction, probes: PairProbes) -> None:
        self._transaction = transaction
        self._probes = probes
        self._newcomers: dict[int, Newcomer] = {}
        #: how often a member was chosen
        self._chosen = 0
        #: (node, session) of the newcomers that were let in
        self._proven: dict[tuple[str, str], None] = {}

    def begin(self, connection: int, hello: Hello) -> bool:
        """Begin to probe a newcomer; return False if there is no need, or no member that can."""
        self._forget_lost(hello)
        newcomer = Newcomer(connection, hello)
        foreign = hello.protocol != PROTOCOL or hello.job != self._transaction.record.job
        known = (hello.node, hello.session) in self._proven or self._transaction.planned_on(hello.node)
        if foreign or known or not (hello.probe_port and hello.address) or not self._probe(newcomer):
            return False
        self._newcomers[connection] = newcomer
        return True

    def _forget_lost(self, hello: Hello) -> None:
        """An agent has lost its connection and comes again, before the end of the lost one is known here."""
        for connection, other in list(self._newcomers.items()):
            if (other.hello.node, other.hello.session) == (hello.node, hello.session):
                self.forget(connection)
                self._transaction.close(connection)

    def keep(self, connection: int, message: AgentMessage) -> bool:
        """Keep what a newcomer says until it is let in; False if the connection is of no newcomer."""
        newcomer = self._newcomers.get(connection)
        if newcomer is None:
            return False
        newcomer.backlog.append(message)
        if len(newcomer.backlog) > MAX_BACKLOG:
            self.forget(connection)
            self._transaction.close(connection)
        return True

    def forget(self, connection: int) -> None:
        """A connection has ended."""
        newcomer = self._newcomers.pop(connection, None)
        if newcomer is not None and newcomer.probe is not None:
            self._probes.cancel(newcomer.probe)

    def on_probed(self, probe: PairProbe) -> tuple[Newcomer, ProbeVerdict] | None:
        """Handle the end of a probe; return the newcomer and what becomes of it, None as long as that is open."""
        newcomer = self._newcomers.get(probe.one.connection)
        if newcomer is None or newcomer.probe is not probe:
            return None
        if not probe.error:
            return self._conclude(newcomer, ProbeVerdict.ADMITTED)
        newcomer.failed[newcomer.member] = probe.error
        newcomer.tries += 1
        if newcomer.tries >= TRIES:
            return self._conclude(newcomer, ProbeVerdict.REFUSED)
        return None if self._probe(newcomer) else self._conclude(newcomer, ProbeVerdict.ADMITTED)

    def tick(self) -> list[tuple[Newcomer, ProbeVerdict]]:
        """Probe newcomers again whose member has left meanwhile: that is not a failed probe.

        Returns:
            The newcomers that are let in, because no member can probe them any more.
        """
        admitted: list[tuple[Newcomer, ProbeVerdict]] = []
        for newcomer in list(self._newcomers.values()):
            probe = newcomer.probe
            if probe is not None and self._transaction.members.on(probe.other.connection) is None:
                self._probes.cancel(probe)
                if not self._probe(newcomer):
                    admitted.append(self._conclude(newcomer, ProbeVerdict.ADMITTED))
        return admitted

    def end(self) -> list[tuple[Newcomer, ProbeVerdict]]:
        """Admit all newcomers: the job is over, and they must hear of that."""
        return [self._conclude(newcomer, ProbeVerdict.ADMITTED) for newcomer in list(self._newcomers.values())]

    def _conclude(self, newcomer: Newcomer, outcome: ProbeVerdict) -> tuple[Newcomer, ProbeVerdict]:
        self.forget(newcomer.connection)
        if outcome is ProbeVerdict.ADMITTED:
            self._proven[newcomer.hello.node, newcomer.hello.session] = None
            while len(self._proven) > _KEPT:
                del self._proven[next(iter(self._proven))]
        return newcomer, outcome

    def _probe(self, newcomer: Newcomer) -> bool:
        """Have a member and a newcomer connect to each other; False if no member can."""
        member = self._select_member(newcomer)
        if member is None:
            return False
        newcomer.member = member.name
        newcomer.probe = self._probes.begin(newcomer.endpoint, endpoint_of(member))
        return True

    def _select_member(self, newcomer: Newcomer) -> Node | None:
        """Return the next member that has not failed with a newcomer; if all have, the one that did."""
        plan, nodes = self._transaction.record.plan, self._transaction.members.nodes
        names = dict.fromkeys(member.node for member in plan.members) if plan is not None else {}
        members = [nodes[name] for name in names if name in nodes and name != newcomer.hello.node]
        members = [member for member in members if member.probe_port and member.address]
        untried = [member for member in members if member.name not in newcomer.failed] or members
        self._chosen += 1
        return untried[self._chosen % len(untried)] if untried else None


def endpoint_of(node: Node) -> Endpoint:
    """Return where others connect to a node."""
    return Endpoint(node.name, node.connection, node.address, node.probe_port)


def why_unreachable(node: str, others: str, failed: dict[str, str]) -> str:
    """Say why a node is refused, and what to do.

    Args:
        others: which nodes. failed: what went wrong, by their names.
    """
    tried = "; ".join(f"{error} ({name})" for name, error in failed.items())
    return (
        f"node {node} and {others} cannot connect to each other: {tried}; give its agent with "
        f"--advertise an address that they reach, and open the ports between the nodes"
    )
