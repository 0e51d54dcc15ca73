"""Probes newcomers before they are let in: a member connects to the newcomer, and the newcomer to the member.

A failed probe is repeated by a member on another node, if there is one. If it fails again the newcomer is refused: it
never becomes part of a plan. What a newcomer says meanwhile is kept, and handled once it is let in. Only nodes that
come while others train are probed: where a job begins, no node has anything to lose.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from holdfast.coordination.config import CoordinatorConfig
from holdfast.coordination.nodes.membership import Node
from holdfast.coordination.turn import Turn
from holdfast.protocol.messages.agent import AddressProbed, AgentMessage, Hello, ProbeAddress
from holdfast.protocol.names import PROTOCOL

#: A newcomer is refused after this many failed probes, of different members if there are several.
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
    #: of the probe under way: its number, the member, since when, and the connections that have not answered
    number: int = 0
    member: str = ""
    since: float = 0.0
    awaited: set[int] = field(default_factory=set[int])
    error: str = ""

    @property
    def why(self) -> str:
        """Why it is refused: what failed, and what to do."""
        tried = "; ".join(f"{error} ({member})" for member, error in self.failed.items())
        return (
            f"node {self.hello.node} and the members cannot connect to each other: {tried}; give its agent with "
            f"--advertise an address that they reach, and open the ports between the nodes"
        )


class Probing:
    """The newcomers that are being probed, by their connections."""

    def __init__(self, turn: Turn, config: CoordinatorConfig) -> None:
        self._turn = turn
        self._config = config
        self._newcomers: dict[int, Newcomer] = {}
        self._by_number: dict[int, Newcomer] = {}
        self._number = 0
        #: (node, session) of the newcomers that were let in
        self._proven: dict[tuple[str, str], None] = {}

    def begin(self, connection: int, hello: Hello) -> bool:
        """Begin to probe a newcomer; return False if there is no need, or no member that can."""
        newcomer = Newcomer(connection, hello)
        foreign = hello.protocol != PROTOCOL or hello.job != self._turn.record.job
        known = (hello.node, hello.session) in self._proven or self._turn.planned_on(hello.node)
        if foreign or known or not (hello.probe_port and hello.address) or not self._probe(newcomer):
            return False
        self._newcomers[connection] = newcomer
        return True

    def keep(self, connection: int, message: AgentMessage) -> bool:
        """Keep what a newcomer says until it is let in; False if the connection is of no newcomer."""
        newcomer = self._newcomers.get(connection)
        if newcomer is None:
            return False
        newcomer.backlog.append(message)
        if len(newcomer.backlog) > MAX_BACKLOG:
            self.forget(connection)
            self._turn.close(connection)
        return True

    def forget(self, connection: int) -> None:
        """A connection has ended."""
        newcomer = self._newcomers.pop(connection, None)
        if newcomer is not None:
            self._by_number.pop(newcomer.number, None)

    def on_probed(self, connection: int, probed: AddressProbed) -> tuple[Newcomer, ProbeVerdict] | None:
        """Handle an answer; return the newcomer and what becomes of it, None as long as that is open."""
        newcomer = self._by_number.get(probed.number)
        if newcomer is None or connection not in newcomer.awaited:
            return None
        newcomer.awaited.discard(connection)
        if probed.error:
            there = newcomer.hello.node if connection == newcomer.connection else newcomer.member
            newcomer.error = newcomer.error or f"{there}: {probed.error}"
            return self._fail(newcomer)
        return None if newcomer.awaited else self._conclude(newcomer, ProbeVerdict.ADMITTED)

    def tick(self) -> list[tuple[Newcomer, ProbeVerdict]]:
        """Return the newcomers whose last probe took too long, or that no member is left to probe."""
        limit_s = self._config.probe_timeout_s
        late = [one for one in self._newcomers.values() if self._turn.now - one.since > limit_s]
        for newcomer in late:
            newcomer.error = newcomer.error or f"no connection within {limit_s:g} s"
        return [done for newcomer in late if (done := self._fail(newcomer)) is not None]

    def pause_over(self) -> None:
        """The coordinator itself was away: the probes under way have their full time again."""
        for newcomer in self._newcomers.values():
            newcomer.since = self._turn.now

    def end(self) -> list[tuple[Newcomer, ProbeVerdict]]:
        """Admit all newcomers: the job is over, and they must hear of that."""
        return [self._conclude(newcomer, ProbeVerdict.ADMITTED) for newcomer in list(self._newcomers.values())]

    def _fail(self, newcomer: Newcomer) -> tuple[Newcomer, ProbeVerdict] | None:
        newcomer.failed[newcomer.member] = newcomer.error
        newcomer.tries += 1
        if newcomer.tries >= TRIES:
            return self._conclude(newcomer, ProbeVerdict.REFUSED)
        return None if self._probe(newcomer) else self._conclude(newcomer, ProbeVerdict.ADMITTED)

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
        self._by_number.pop(newcomer.number, None)
        self._number += 1
        newcomer.number, newcomer.member, newcomer.error = self._number, member.name, ""
        newcomer.since, newcomer.awaited = self._turn.now, {member.connection, newcomer.connection}
        self._by_number[newcomer.number] = newcomer
        hello = newcomer.hello
        self._turn.send(member.connection, ProbeAddress(number=self._number, host=hello.address, port=hello.probe_port))
        back = ProbeAddress(number=self._number, host=member.address, port=member.probe_port)
        self._turn.send(newcomer.connection, back)
        return True

    def _select_member(self, newcomer: Newcomer) -> Node | None:
        """Return the next member that has not failed with a newcomer; if all have, the one that did."""
        plan, nodes = self._turn.record.plan, self._turn.members.nodes
        names = dict.fromkeys(member.node for member in plan.members) if plan is not None else {}
        members = [nodes[name] for name in names if name in nodes and name != newcomer.hello.node]
        members = [member for member in members if member.probe_port and member.address]
        untried = [member for member in members if member.name not in newcomer.failed] or members
        return untried[self._number % len(untried)] if untried else None
