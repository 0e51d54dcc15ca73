"""Probes the nodes with which a job begins, or begins again from a checkpoint, while their workers start.

Each node that comes, and the two that came last before it on other hosts, connect to each other. So each node is tried
by two others, in both directions, with two probes for each node. A node that fails with two others is refused before
the generation begins, if those have reached some node; the one with the most failures first. A node that has failed and
has reached none tries a third one. If there is none, it is not known which node is wrong: they try again. If that fails
too, the job begins without the ones that came last, if it needs fewer nodes; else it waits, and says why, until a try
succeeds or another node shows which one is wrong. A link that fails between two nodes that both reach others is left to
the rules for failures.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import islice

from holdfast.coordination.membership import Node
from holdfast.coordination.nodes.pair_probes import PairProbe, PairProbes
from holdfast.coordination.nodes.probing import TRIES, endpoint_of, why_unreachable
from holdfast.coordination.turn import Transaction

#: Each node is probed by this many that came before it.
NEIGHBOURS = 2
#: They are looked for among this many nodes: the others may be on the same host.
_LOOK_BACK = 64
#: A node that has failed with this many tries no others.
_MOST_FAILURES = 6


class StartProbes:
    """What is known of which nodes reach each other, by the connections of their agents."""

    def __init__(self, transaction: Transaction, probes: PairProbes) -> None:
        self._transaction = transaction
        self._probes = probes
        self._under_way: dict[int, PairProbe] = {}
        self._reached: defaultdict[int, set[int]] = defaultdict(set)
        self._failed: defaultdict[int, dict[int, str]] = defaultdict(dict)
        #: the nodes that the last call of `judge` has refused
        self._refused: set[int] = set()
        #: probes have ended that `judge` does not know of
        self._has_news = False
        #: of the nodes that have failed, with no third one to tell which is wrong: how often, and since when
        self._rounds = 0
        self._unclear_since = 0.0
        #: what has failed between them, and what to do; else ""
        self.unclear = ""

    @property
    def are_open(self) -> bool:
        """Whether it is not known yet which nodes may begin."""
        return bool(self._under_way) or self._has_news or self._rounds > 0

    def begin(self, node: Node) -> None:
        """Probe a node that has come before the job trains, with the ones that came last before it."""
        if self._transaction.record.plan is not None or not _listens(node):
            return
        if len(self._reached) > 2 * len(self._transaction.members.nodes) + _LOOK_BACK:
            self._forget_departed()
        newest = islice(reversed(self._transaction.members.nodes.values()), _LOOK_BACK)
        for other in islice((other for other in newest if _can_try(node, other)), NEIGHBOURS):
            self._probe(node, other)

    def on_probed(self, probe: PairProbe) -> None:
        """Handle the end of a probe."""
        if self._under_way.pop(probe.number, None) is None:
            return
        one, other = probe.one.connection, probe.other.connection
        for here, there in ((one, other), (other, one)):
            if probe.error:
                self._failed[here][there] = probe.error
            else:
                self._reached[here].add(there)
        self._has_news = self._has_news or bool(self._failed) or self._rounds > 0

    def tick(self) -> None:
        """Forget probes of nodes that have left; all, once the job trains."""
        members = self._transaction.members
        trains = self._transaction.record.plan is not None
        for probe in list(self._under_way.values()):
            if trains or members.on(probe.one.connection) is None or members.on(probe.other.connection) is None:
                self._probes.cancel(probe)
                del self._under_way[probe.number]
                self._has_news = True
        if trains:
            self._reached.clear()
            self._failed.clear()
            self._has_news, self._rounds, self.unclear = False, 0, ""
        waits = self._rounds > 0 and not self._under_way and not self._has_news
        if waits and self._transaction.now - self._unclear_since > self._probes.timeout_s:
            self._forget_departed()
            self._try_again()
            self._has_news = True

    def judge(self, spare: int) -> list[tuple[Node, str]]:
        """Return the nodes to refuse, and why, once all probes have ended; begin others if some nodes are unclear.

        Args:
            spare: without how many nodes the job could begin; negative if it needs more than there are.
        """
        if self._under_way or not self._has_news:
            return []
        self._has_news = False
        self._refused.clear()
        self._forget_departed()
        refused: list[tuple[Node, str]] = []
        while self._failed and self._accusers(worst := max(self._failed, key=self._rank)) >= TRIES:
            refused.append(self._refuse(worst))
        unclear = self._unclear_nodes()
        if self._asks_third(unclear):
            return refused
        self._rounds, self._unclear_since = self._rounds + 1 if unclear else 0, self._transaction.now
        if self._rounds == 1:
            self._try_again()
            return refused
        last = self._last_to_come(unclear)
        if len(last) <= spare:
            refused += map(self._refuse, last)
        unclear = self._unclear_nodes()
        if not unclear:
            self._rounds = 0
        self.unclear = self._why_unclear(unclear[-1]) if unclear else ""
        return refused

    def _unclear_nodes(self) -> list[int]:
        """Return the nodes that have failed and have reached none, in the order in which they came."""
        return sorted((one for one in self._failed if not self._reached.get(one)), key=self._place)

    def _last_to_come(self, unclear: list[int]) -> list[int]:
        """Return the nodes without which no two of the others are known to have failed."""
        last: dict[int, None] = {}
        for one in reversed(unclear):
            if self._failed[one].keys() - last.keys():
                last[one] = None
        return list(last)

    def _accusers(self, one: int) -> int:
        """Return how many nodes have failed with another, and have reached some node."""
        return sum(bool(self._reached.get(other)) for other in self._failed[one])

    def _rank(self, one: int) -> tuple[int, int, int]:
        return self._accusers(one), len(self._failed[one]), self._place(one)

    def _refuse(self, one: int) -> tuple[Node, str]:
        refused = self._node(one), self._why(one)
        self._forget(one)
        self._refused.add(one)
        return refused

    def _asks_third(self, unclear: list[int]) -> bool:
        """Probe nodes with others that they have not tried; return False if there are none."""
        asked = set[int]()
        for one in unclear:
            if one not in asked and len(self._failed[one]) < _MOST_FAILURES and (third := self._third(one)) is not None:
                self._probe(self._node(one), third)
                asked |= {one, third.connection}
        return bool(self._under_way)

    def _third(self, one: int) -> Node | None:
        """Return a node that another has not tried."""
        node, tried = self._node(one), self._failed[one].keys()
        newest = islice(reversed(self._transaction.members.nodes.values()), _LOOK_BACK)
        others = (other for other in newest if other.connection not in tried | self._refused and _can_try(node, other))
        return next(others, None)

    def _try_again(self) -> None:
        """Let the unclear nodes try once more what has failed."""
        for one in self._unclear_nodes():
            for other in list(self._failed.get(one, ())):
                self._drop_failure(one, other)
                self._probe(self._node(one), self._node(other))

    def _drop_failure(self, one: int, other: int) -> None:
        for here, there in ((one, other), (other, one)):
            del self._failed[here][there]
            if not self._failed[here]:
                del self._failed[here]

    def _probe(self, node: Node, other: Node) -> None:
        probe = self._probes.begin(endpoint_of(node), endpoint_of(other))
        self._under_way[probe.number] = probe

    def _why(self, one: int) -> str:
        failed = self._failed[one].items()
        return why_unreachable(self._node(one).name, "the others", {self._node(it).name: why for it, why in failed})

    def _why_unclear(self, one: int) -> str:
        other, error = next(iter(self._failed[one].items()))
        first, last = self._node(other), self._node(one)
        return (
            f"nodes {first.name} (at {first.address}) and {last.name} (at {last.address}) cannot connect to each "
            f"other: {error}; no third node can tell which of them is wrong: start the agent of that one again with "
            f"--advertise ADDRESS, or open the ports between the nodes, or add a node"
        )

    def _node(self, connection: int) -> Node:
        node = self._transaction.members.on(connection)
        assert node is not None  # The departed are forgotten before anything is judged.
        return node

    def _place(self, connection: int) -> int:
        return self._node(connection).place

    def _forget_departed(self) -> None:
        for one in [one for one in (*self._reached, *self._failed) if self._transaction.members.on(one) is None]:
            self._forget(one)

    def _forget(self, one: int) -> None:
        for other in self._reached.pop(one, ()):
            self._reached[other].discard(one)
        for other in list(self._failed.get(one, ())):
            self._drop_failure(one, other)


def _listens(node: Node) -> bool:
    return bool(node.probe_port and node.address)


def _can_try(node: Node, other: Node) -> bool:
    """Whether a connection between two nodes would show anything: not if both are on one host."""
    return _listens(other) and other.address != node.address
