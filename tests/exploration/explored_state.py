"""One state of the explored protocol, and the rules of a variant. `README.md` describes the model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

#: the draining node (`leaver`): not asked to leave, asked, retained, released
STAYS, MARKED, OWED, GONE = range(4)
#: the process of a node
DEAD, ALIVE, EXPELLED = range(3)


class Unsafe(Exception):
    """A move broke an invariant."""


@dataclass(frozen=True)
class Rules:
    """A variant of the protocol, and its faults. The defaults are the rules that holdfast follows.

    The nodes are numbered in this order: the nodes that stay, the draining node, the joining node.
    """

    name: str
    #: when the joining node joins: by a swap before the other leaves ("beside"), before the start ("joined"), at the
    #: Stop ("instead"), or never ("")
    joins: str = "beside"
    stayers: int = 1
    steps: int = 3
    #: at first, only the draining node has an expert
    expert: bool = False
    #: maximum number of failures: nodes that die or are expelled alive, and collectives that fail
    failures: int = 0
    #: maximum number of failed collectives among them
    blips: int = 1
    #: maximum number of coordinator crashes
    crashes: int = 0
    #: the draining node is retained until a step after the decided one has "passed", until a member has "entered", or
    #: "never"
    owed: str = "passed"
    #: the retained node is stopped with the others, and must report
    counted: bool = True
    #: a step is announced only after the retained node has applied it
    holds_up: bool = True
    #: steps of the members prove nothing about a retained node
    proves_members: bool = True
    #: gradients that a retained node has reduced count only if the others had to finish that step
    drops_stale: bool = True
    #: a node beyond the decided step counts as having that step only after it has received the state
    takes_back: bool = True
    #: If a joining node is lost after Arm, members lower their swap flags, and the pending plan is given up after a
    #: member reports that. "at once": it is given up before that. False: all are stopped.
    disarms: bool | str = True
    #: a member reports a lowered flag that others may have seen only after a step without a swap
    waits_for_step: bool = True
    #: a member that lacks the decided state keeps its own until it has received that (dense models)
    keeps: bool = True

    @property
    def leaver(self) -> int:
        return self.stayers

    @property
    def joiner(self) -> int:
        """The number of the joining node, or -1 if no node joins."""
        return self.stayers + 1 if self.joins else -1

    def but(self, name: str, **changes: Any) -> Rules:
        """Return these rules with some changes."""
        return replace(self, name=name, **changes)


class Record(NamedTuple):
    """The durable data of the coordinator: record and journal."""

    newest: int  # the newest planned generation
    plan: int  # the current generation
    members: int  # its members, as bits
    forward: int  # the result of the step with which the plan began, if that was FORWARD; otherwise 0
    step: int  # the step with which the plan began
    journal: tuple[int, ...]  # results of the announced steps
    pending: tuple[int, int] | None  # generation and members
    known: tuple[tuple[int, int], ...]  # step and result, if a decision depends on it
    leaver: int  # STAYS, MARKED, OWED or GONE
    owed: int  # the step from which the others continue without it
    over: str  # how the job ended


class Mind(NamedTuple):
    """The volatile state of a coordinator."""

    here: int  # connected nodes, as bits
    away: int  # disconnected nodes that may reconnect with their state
    stopping: int
    reports: tuple[Report, ...]
    stands: tuple[int, ...]  # the newest step that each node is known to hold
    known: tuple[tuple[int, int], ...]  # step and result of each step that is not announced
    entered: tuple[int, ...]  # the newest generation that each node has entered
    proven: int  # the newest step that is proven by a later one of the current generation
    finished: int
    armed: int  # 1: Arm was sent in this term; 2: then the order to lower the flags


class Report(NamedTuple):
    """The answer of a worker to Stop."""

    node: int
    steps: tuple[int, ...] | None
    ready: int
    passed: int
    expert: int


class Node(NamedTuple):
    """A node with its one worker.

    The phases are: I idle, E entering without the state, R reducing, V voted, X stopped or broken, D done, G released.
    """

    life: int
    linked: int
    gen: int
    members: int
    stop: int  # the generation of the Stop that it answered, or 0 if it may continue
    steps: tuple[int, ...] | None  # the results of the applied steps; None: it has no state
    ready: int  # the result of the next step, if its reduced gradients are here
    passed: int  # whether the next step has passed here
    phase: str
    pending: tuple[int, int] | None
    # 1: it raises its swap flag; 2: for this step only, then it reports that; 3: the ordering coordinator is dead
    armed: int
    kept: tuple[int, ...] | None  # the old state, kept until it has received the decided one
    expert: int

    @property
    def state(self) -> tuple[int, ...] | None:
        """The state from which it can continue."""
        return self.steps if self.steps is not None else self.kept


#: the collectives of a generation for one step: nodes that gave gradients, that voted, and that raised the swap flag
Op = tuple
NOBODY = Node(DEAD, 0, 0, 0, 0, None, 0, 0, "-", None, 0, None, 0)


def bits(mask: int) -> Iterator[int]:
    """Yield the numbers of the set bits."""
    number = 0
    while mask:
        if mask & 1:
            yield number
        mask >>= 1
        number += 1


class World:
    """A mutable state. `frozen` returns it as an immutable value."""

    __slots__ = ("budget", "downs", "mind", "nodes", "ops", "record", "rules", "ups")

    def __init__(self, rules: Rules, frozen: tuple[Any, ...]) -> None:
        self.rules = rules
        self.record: Record = frozen[0]
        self.mind: Mind | None = frozen[1]
        self.nodes: list[Node] = list(frozen[2])
        #: messages in flight, to the coordinator and to the nodes
        self.ups: list[tuple[Any, ...]] = list(frozen[3])
        self.downs: list[tuple[Any, ...]] = list(frozen[4])
        self.ops: dict[tuple[int, int], Op] = dict(frozen[5])
        #: the remaining failures, coordinator crashes and failing collectives
        self.budget: list[int] = list(frozen[6])

    def frozen(self) -> tuple[Any, ...]:
        """Return the state without the parts that can no longer have an effect."""
        nodes = self.nodes
        for number, node in enumerate(nodes):
            if node.life == EXPELLED and not self._matters(number):
                nodes[number] = NOBODY
        ops = tuple(sorted((key, op) for key, op in self.ops.items() if self._goes_on(*key)))
        rest = (tuple(nodes), tuple(self.ups), tuple(self.downs), ops, tuple(self.budget))
        return (self.record, self.mind, *rest)

    def copy(self) -> World:
        rest = (self.nodes, self.ups, self.downs, self.ops, self.budget)
        return World(self.rules, (self.record, self.mind, *rest))

    def _matters(self, number: int) -> bool:
        """Return whether an expelled node may reconnect, or take part in a collective."""
        node = self.nodes[number]
        back = self.mind is None or self.mind.away >> number & 1 or self.budget[1]
        if back and self.planned >> number & 1:
            return True
        return any(other.life == ALIVE and other.gen <= node.gen for other in self.nodes)

    def _goes_on(self, gen: int, step: int) -> bool:
        for node in self.nodes:
            if node.life and node.phase != "G":
                if node.gen == gen and (node.steps is None or len(node.steps) < step):
                    return True
                if node.life == ALIVE and node.gen < gen:
                    return True
        return False

    @property
    def planned(self) -> int:
        """The members of the plan and of the pending plan, and the retained node."""
        record, mask = self.record, self.record.members
        if record.pending:
            mask |= record.pending[1]
        if record.leaver == OWED and self.rules.counted:
            mask |= 1 << self.rules.leaver
        return mask

    def put(self, number: int, **changes: Any) -> None:
        self.nodes[number] = self.nodes[number]._replace(**changes)

    def write(self, **changes: Any) -> None:
        self.record = self.record._replace(**changes)

    def note(self, **changes: Any) -> None:
        assert self.mind is not None
        self.mind = self.mind._replace(**changes)

    def tell(self, number: int, *message: Any) -> None:
        """Send a message from a node to the coordinator."""
        node = self.nodes[number]
        if node.life == ALIVE and node.linked:
            self.ups[number] += (message,)

    def order(self, mask: int, *message: Any) -> None:
        """Send a message from the coordinator to these nodes, as far as they are connected."""
        assert self.mind is not None
        for number in bits(mask & self.mind.here):
            if self.nodes[number].linked:
                self.downs[number] += (message,)


def initial(rules: Rules) -> tuple[Any, ...]:
    """Return the initial state: the first step is being reduced, and a node was asked to leave.

    If the joining node joins next to it, all nodes have built the pending group, and Arm is in flight.
    """
    count = rules.stayers + (2 if rules.joins else 1)
    beside, joined = rules.joins == "beside", rules.joins == "joined"
    members = (1 << rules.stayers + (2 if joined else 1)) - 1
    pending = (2, members | 1 << rules.joiner) if beside else None
    nodes = [
        Node(ALIVE, 1, 1, members, 0, (), 0, 0, "R", pending, 0, None, int(rules.expert and number >= rules.leaver))
        for number in bits(members)
    ]
    if len(nodes) < count:
        nodes.append(Node(ALIVE, 1, 0, 0, 0, None, 0, 0, "I", pending, 0, None, 0))
    record = Record(2 if beside else 1, 1, members, 0, 0, (), pending, (), MARKED, 0, "")
    none = (0,) * count
    entered = tuple(int(members >> number & 1) for number in range(count))
    mind = Mind((1 << count) - 1, 0, 0, (), none, (), entered, 0, 0, 1)
    downs = tuple((("arm", 2),) if beside and members >> number & 1 else () for number in range(count))
    ops = (((1, 1), (members, 0, 0)),)
    return (record, mind, tuple(nodes), ((),) * count, downs, ops, (rules.failures, rules.crashes, rules.blips))
