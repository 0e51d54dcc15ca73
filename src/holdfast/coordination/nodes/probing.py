"""Probes of newcomers before admission: a member connects to the newcomer, and the newcomer to the member.

A failed probe is repeated by a member on another node, if there is one. If it fails again, the newcomer is refused: it
never becomes part of a plan. Its messages in the meantime are kept, and handled after admission. Nodes that connect
before a job trains are admitted at once, and probed by `start_probes`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from holdfast.coordination.membership import Node
from holdfast.coordination.nodes.pair_probes import Endpoint, PairProbe, PairProbes
from holdfast.coordination.transaction import Transaction
from holdfast.protocol.messages.agent import AgentMessage, Hello
from holdfast.protocol.names import PROTOCOL

#: A node is refused after this many failed probes, of different other nodes if there are several.
TRIES = 2
#: A newcomer with more messages before admission must reconnect.
MAX_BACKLOG = 1024
#: Newcomers that were probed are remembered by their sessions, at most this many.
_KEPT = 4096


class ProbeVerdict(Enum):
    """The result of probing a node that wants to join."""

    ADMITTED = auto()
    REFUSED = auto()


@dataclass(slots=True)
class Newcomer:
    """A connection with an agent that has sent Hello and is being probed."""

    connection: int
    hello: Hello
    #: The messages of its agent since Hello.
    backlog: list[AgentMessage] = field(default_factory=list[AgentMessage])
    #: The errors of failed probes, by member.
    failed: dict[str, str] = field(default_factory=dict[str, str])
    tries: int = 0
    #: The current probe.
    probe: PairProbe | None = None
    #: The member of the current probe.
    member: str = ""

    @property
    def endpoint(self) -> Endpoint:
        """The endpoint to which members connect."""
        return Endpoint(self.hello.node, self.connection, self.hello.address, self.hello.probe_port)

    @property
    def why(self) -> str:
        """Why it is refused: the errors, and the remedy."""
        return why_unreachable(self.hello.node, "the members", self.failed)


class NewcomerProbes:
    """The newcomers that are being probed, by their connections."""

    def __init__(self, transaction: Transaction, probes: PairProbes) -> None:
        self._transaction = transaction
        self._probes = probes
        self._newcomers: dict[int, Newcomer] = {}
        #: How often a member was selected.
        self._chosen = 0
        #: (node, session) of admitted newcomers.
        self._proven: dict[tuple[str, str], None] = {}

    def start(self, connection: int, hello: Hello) -> bool:
        """Begin to probe a newcomer; return False if no probe is needed or possible.

        None is needed for a planned or already probed node, or for an agent that will be refused; none is possible
        without a listener or a member. An older connection of the same agent is closed.
        """
        self._forget_lost(hello)
        newcomer = Newcomer(connection, hello)
        foreign = hello.protocol != PROTOCOL or hello.job != self._transaction.record.job
        known = (hello.node, hello.session) in self._proven or self._transaction.planned_on(hello.node)
        if foreign or known or not (hello.probe_port and hello.address) or not self._probe(newcomer):
            return False
        self._newcomers[connection] = newcomer
        return True

    def _forget_lost(self, hello: Hello) -> None:
        """Forget and close older connections of an agent that reconnects before their end is noticed."""
        for connection, other in list(self._newcomers.items()):
            if (other.hello.node, other.hello.session) == (hello.node, hello.session):
                self.forget(connection)
                self._transaction.close(connection)

    def keep(self, connection: int, message: AgentMessage) -> bool:
        """Store a message of a newcomer until its admission; return False for any other connection.

        After too many messages, the connection is closed, and the newcomer must reconnect.
        """
        newcomer = self._newcomers.get(connection)
        if newcomer is None:
            return False
        newcomer.backlog.append(message)
        if len(newcomer.backlog) > MAX_BACKLOG:
            self.forget(connection)
            self._transaction.close(connection)
        return True

    def forget(self, connection: int) -> None:
        """Forget a newcomer's connection that has ended, and cancel its probe."""
        newcomer = self._newcomers.pop(connection, None)
        if newcomer is not None and newcomer.probe is not None:
            self._probes.cancel(newcomer.probe)

    def on_probed(self, probe: PairProbe) -> tuple[Newcomer, ProbeVerdict] | None:
        """Handle the end of a probe; return the newcomer and its result, or None if it is still open.

        The first failed probe is repeated by another member. After the second one the newcomer is refused; if no member
        is left, it is admitted.
        """
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
        """Repeat the probes of members that have left meanwhile: they do not count as failed.

        Returns:
            The newcomers that are admitted, because no member is left to probe them.
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
        """Admit all newcomers, because the job is over and they must be told."""
        return [self._conclude(newcomer, ProbeVerdict.ADMITTED) for newcomer in list(self._newcomers.values())]

    def _conclude(self, newcomer: Newcomer, outcome: ProbeVerdict) -> tuple[Newcomer, ProbeVerdict]:
        """End a newcomer's probe and return both arguments. An admitted newcomer is not probed again when it
        reconnects.
        """
        self.forget(newcomer.connection)
        if outcome is ProbeVerdict.ADMITTED:
            self._proven[newcomer.hello.node, newcomer.hello.session] = None
            while len(self._proven) > _KEPT:
                del self._proven[next(iter(self._proven))]
        return newcomer, outcome

    def _probe(self, newcomer: Newcomer) -> bool:
        """Start a probe of a newcomer with the next member that has a probe listener, preferably one that has not
        failed with it.

        Return False if there is no such member.
        """
        member = self._select_member(newcomer)
        if member is None:
            return False
        newcomer.member = member.name
        newcomer.probe = self._probes.start(newcomer.endpoint, endpoint_of(member))
        return True

    def _select_member(self, newcomer: Newcomer) -> Node | None:
        """Return the next member, in turn, that has a probe listener and has not failed with a newcomer.

        If all have failed, one of them; None if no connected member has a listener.
        """
        plan, nodes = self._transaction.record.plan, self._transaction.members.nodes
        names = dict.fromkeys(member.node for member in plan.members) if plan is not None else {}
        members = [nodes[name] for name in names if name in nodes and name != newcomer.hello.node]
        members = [member for member in members if member.probe_port and member.address]
        untried = [member for member in members if member.name not in newcomer.failed] or members
        self._chosen += 1
        return untried[self._chosen % len(untried)] if untried else None


def endpoint_of(node: Node) -> Endpoint:
    """Return the endpoint of a node."""
    return Endpoint(node.name, node.connection, node.address, node.probe_port)


def why_unreachable(node: str, others: str, failed: dict[str, str]) -> str:
    """Return why a node is refused, with the remedy.

    Args:
        others: the other nodes, in words.
        failed: the errors, by the nodes' names.
    """
    tried = "; ".join(f"{error} ({name})" for name, error in failed.items())
    return (
        f"node {node} and {others} cannot connect to each other: {tried}; give its agent with "
        f"--advertise an address that they reach, and open the ports between the nodes"
    )
