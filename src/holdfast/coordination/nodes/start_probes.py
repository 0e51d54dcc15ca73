"""Probes of the nodes with which a job starts or restarts, while their workers start.

Each node that connects is probed with the two last ones before it on other hosts. So each node is tried by two others,
in both directions, with two probes per node. A node that failed with two others is refused before the generation
begins, if those two have reached some node; the one with the most failures is refused first.

A failed node that has reached none tries a third one. Without a third one, the faulty node is unknown, and they try
again. If that also fails, the job begins without the last of them, if it needs fewer nodes. Otherwise it waits and
reports why, until a try succeeds or another node shows which one is faulty. If two nodes cannot reach each other but
both reach others, the rules for failures apply.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import islice

from holdfast.coordination.membership import Node
from holdfast.coordination.nodes.pair_probes import PairProbe, PairProbes
from holdfast.coordination.nodes.probing import TRIES, endpoint_of, why_unreachable
from holdfast.coordination.transaction import Transaction

#: Each node is probed by this many earlier nodes.
NEIGHBOURS = 2
#: They are searched among this many nodes: the others may be on the same host.
_LOOK_BACK = 64
#: After this many failures, a node tries no others.
_MOST_FAILURES = 6


class StartProbes:
    """The results of probes between nodes, by the connections of their agents."""

    def __init__(self, transaction: Transaction, probes: PairProbes) -> None:
        self._transaction = transaction
        self._probes = probes
        self._under_way: dict[int, PairProbe] = {}
        self._reached: defaultdict[int, set[int]] = defaultdict(set)
        self._failed: defaultdict[int, dict[int, str]] = defaultdict(dict)
        #: The nodes that the last call of `judge` refused.
        self._refused: set[int] = set()
        #: Whether probes have ended since the last call of `judge`.
        self._has_news = False
        #: How often the failed nodes have tried, without a third one that shows which is faulty.
        self._rounds = 0
        #: When the last of these tries began.
        self._unclear_since = 0.0
        #: The errors between unclear nodes, with the remedy; "" for none.
        self.unclear = ""

    @property
    def are_open(self) -> bool:
        """Whether it is unknown yet which nodes may begin."""
        return bool(self._under_way) or self._has_news or self._rounds > 0

    def start(self, node: Node) -> None:
        """Probe a node that connects before the job trains, with the last two nodes before it on other hosts.

        Nothing without a probe listener.
        """
        if self._transaction.record.plan is not None or not _listens(node):
            return
        if len(self._reached) > 2 * len(self._transaction.members.nodes) + _LOOK_BACK:
            self._forget_departed()
        newest = islice(reversed(self._transaction.members.nodes.values()), _LOOK_BACK)
        for other in islice((other for other in newest if _can_try(node, other)), NEIGHBOURS):
            self._probe(node, other)

    def on_probed(self, probe: PairProbe) -> None:
        """Record the result of a probe for both nodes, for the next `judge`. Other probes are ignored."""
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
        """Cancel probes of nodes that have left, and forget everything once the job trains.

        Failed probes of unclear nodes are repeated after each time-out.
        """
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
        """Return the nodes to refuse, with reasons, once all probes have ended; start others if nodes are unclear.

        Refused are nodes that failed with two nodes that have reached another one. If third nodes and a second try
        leave nodes unclear, the last ones of them are refused if the job can spare them. Otherwise `unclear` gives the
        reason for the wait.

        Args:
            spare: the number of surplus nodes; negative if there are too few.
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
        if self._probe_with_third(unclear):
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
        """Return the nodes that have failed and have reached none, in the order in which they connected."""
        return sorted((one for one in self._failed if not self._reached.get(one)), key=self._place)

    def _last_to_come(self, unclear: list[int]) -> list[int]:
        """Return the unclear nodes to leave out, newest first, so that no pair among the others has failed."""
        last: dict[int, None] = {}
        for one in reversed(unclear):
            if self._failed[one].keys() - last.keys():
                last[one] = None
        return list(last)

    def _accusers(self, one: int) -> int:
        """Return the number of nodes that have failed with this one, and have reached another one."""
        return sum(bool(self._reached.get(other)) for other in self._failed[one])

    def _rank(self, one: int) -> tuple[int, int, int]:
        return self._accusers(one), len(self._failed[one]), self._place(one)

    def _refuse(self, one: int) -> tuple[Node, str]:
        """Return the node of connection `one` and why it is refused; forget its results.

        Until the next `judge`, it is not used to probe others.
        """
        refused = self._node(one), self._why(one)
        self._forget(one)
        self._refused.add(one)
        return refused

    def _probe_with_third(self, unclear: list[int]) -> bool:
        """Probe unclear nodes with others that they have not tried; return whether any probe is in progress now.

        After 6 failures a node tries no others.
        """
        asked = set[int]()
        for one in unclear:
            if (
                one not in asked
                and len(self._failed[one]) < _MOST_FAILURES
                and (third := self._find_untried_node(one)) is not None
            ):
                self._probe(self._node(one), third)
                asked |= {one, third.connection}
        return bool(self._under_way)

    def _find_untried_node(self, one: int) -> Node | None:
        """Return the newest node on another host with which the node of connection `one` has no failed probe, or None.

        Only the nodes that connected last are considered, without refused ones.
        """
        node, tried = self._node(one), self._failed[one].keys()
        newest = islice(reversed(self._transaction.members.nodes.values()), _LOOK_BACK)
        others = (other for other in newest if other.connection not in tried | self._refused and _can_try(node, other))
        return next(others, None)

    def _try_again(self) -> None:
        """Repeat the failed probes of the unclear nodes, and forget their results."""
        for one in self._unclear_nodes():
            for other in list(self._failed.get(one, ())):
                self._drop_failure(one, other)
                self._probe(self._node(one), self._node(other))

    def _drop_failure(self, one: int, other: int) -> None:
        """Forget the failed probe of a pair of connections."""
        for here, there in ((one, other), (other, one)):
            del self._failed[here][there]
            if not self._failed[here]:
                del self._failed[here]

    def _probe(self, node: Node, other: Node) -> None:
        """Start a probe of two nodes, and remember that it is in progress."""
        probe = self._probes.start(endpoint_of(node), endpoint_of(other))
        self._under_way[probe.number] = probe

    def _why(self, one: int) -> str:
        """Return why a node is refused: all its failed probes, and the remedy."""
        failed = self._failed[one].items()
        return why_unreachable(self._node(one).name, "the others", {self._node(it).name: why for it, why in failed})

    def _why_unclear(self, one: int) -> str:
        """Return that it is unknown whether the node of connection `one` or its first failed peer is faulty, with the
        remedy.
        """
        other, error = next(iter(self._failed[one].items()))
        first, last = self._node(other), self._node(one)
        return (
            f"nodes {first.name} (at {first.address}) and {last.name} (at {last.address}) cannot connect to each "
            f"other: {error}; no third node can tell which of them is wrong: start the agent of that one again with "
            f"--advertise ADDRESS, or open the ports between the nodes, or add a node"
        )

    def _node(self, connection: int) -> Node:
        """Return the node of a connection that is still there; the caller has forgotten departed ones."""
        node = self._transaction.members.on(connection)
        assert node is not None  # Departed nodes are forgotten before.
        return node

    def _place(self, connection: int) -> int:
        return self._node(connection).place

    def _forget_departed(self) -> None:
        """Forget the results of all connections that have ended."""
        for one in [one for one in (*self._reached, *self._failed) if self._transaction.members.on(one) is None]:
            self._forget(one)

    def _forget(self, one: int) -> None:
        """Forget the probe results of a connection, and those that its peers have about it."""
        for other in self._reached.pop(one, ()):
            self._reached[other].discard(one)
        for other in list(self._failed.get(one, ())):
            self._drop_failure(one, other)


def _listens(node: Node) -> bool:
    return bool(node.probe_port and node.address)


def _can_try(node: Node, other: Node) -> bool:
    """Return whether a probe of two nodes is meaningful: the other one listens, on a different host."""
    return _listens(other) and other.address != node.address
