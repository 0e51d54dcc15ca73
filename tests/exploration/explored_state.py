"""One state of the explored protocol, and the rules that a variant explores. `README.md` says what stands for what."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

#: whether the leaver is still a member like others: nobody has asked it to go, it was asked, it is owed, it has gone
STAYS, MARKED, OWED, GONE = range(4)
#: a node's process
DEAD, ALIVE, EXPELLED = range(3)


class Unsafe(Exception):
    """Something that must never happen did."""


@dataclass(frozen=True)
class Rules:
    """A variant of the protocol, and which faults befall it; the defaults are what is built.

    Nodes are numbered: those that stay, the leaver, the joiner.
    """

    name: str
    #: how the joiner comes: "beside" the leaver by a swap, "joined" before all begins, "instead" by the Stop, "": never
    joins: str = "beside"
    stayers: int = 1
    steps: int = 3
    #: an expert lives on the leaver alone at first
    expert: bool = False
    #: nodes that die or are expelled alive, or collectives that fail; of these, the latter; and coordinators that die
    failures: int = 0
    blips: int = 1
    crashes: int = 0
    #: the leaver is owed until a step has "passed" beyond the decided one, until somebody has "entered", or "never"
    owed: str = "passed"
    #: the owed leaver is stopped with the others, and its report awaited
    counted: bool = True
    #: no step is announced that the owed leaver has not applied
    holds_up: bool = True
    #: of an owed leaver no step of the others proves anything
    proves_members: bool = True
    #: what an owed leaver has reduced counts only where the others were to finish that step
    drops_stale: bool = True
    #: who stood beyond the decided step counts as having it only once it has come
    takes_back: bool = True
    #: a joiner's loss after Arm has the flags lowered, and the pending plan given up once a member has said that its
    #: own is; or "at once"; or (False) all are stopped
    disarms: bool | str = True
    #: a member whose flag others may have seen says so only if the step did not swap
    waits_for_step: bool = True
    #: a member that lacks the decided state keeps its own until that has come (dense models)
    keeps: bool = True

    @property
    def leaver(self) -> int:
        return self.stayers

    @property
    def joiner(self) -> int:
        """The joiner's number, -1 where there is none."""
        return self.stayers + 1 if self.joins else -1

    def but(self, name: str, **changes: Any) -> Rules:
        """Return these rules with others in place."""
        return replace(self, name=name, **changes)


class Record(NamedTuple):
    """What the coordinator writes down: record and journal."""

    newest: int  # generation that was ever planned
    plan: int  # the generation in force
    members: int  # its members, as bits
    forward: int  # v of the step that the plan began with, where that was FORWARD; else 0
    step: int  # with whose state the plan began
    journal: tuple[int, ...]  # v of the announced steps
    pending: tuple[int, int] | None  # generation and members
    known: tuple[tuple[int, int], ...]  # v of steps that a decision rests on
    leaver: int  # STAYS, MARKED, OWED or GONE
    owed: int  # the step from which on the others go on without it
    over: str  # how the job ended


class Mind(NamedTuple):
    """What dies with a coordinator."""

    here: int  # nodes that are connected, as bits
    away: int  # nodes that may come back as they were
    stopping: int
    reports: tuple[Report, ...]
    stands: tuple[int, ...]  # the newest step that each node is known to hold
    known: tuple[tuple[int, int], ...]  # v by step, of those that are not announced
    entered: tuple[int, ...]  # the newest generation that each node has entered
    proven: int  # the newest step that a later one of the generation in force proves
    finished: int
    armed: int  # 1: Arm was said in this term; 2: then that flags are to be down again


class Report(NamedTuple):
    """What a worker answers to Stop."""

    node: int
    steps: tuple[int, ...] | None
    ready: int
    passed: int
    expert: int


class Node(NamedTuple):
    """A node with its one worker.

    Its phase: I idle, E entering without the state, R reducing, V voted, X stopped or broken, D done, G gone.
    """

    life: int
    linked: int
    gen: int
    members: int
    stop: int  # the generation of the Stop that it has answered, 0 where it may go on
    steps: tuple[int, ...] | None  # v of the steps that its state has gone through; None: it has no state
    ready: int  # v of the next step, where its reduced gradients are here
    passed: int  # the next step has passed here
    phase: str
    pending: tuple[int, int] | None
    armed: int  # the flag goes up; 2: for this step only, then that is said; 3: the coordinator that wanted it is dead
    kept: tuple[int, ...] | None  # the state that it keeps while it is sent a newer one
    expert: int

    @property
    def state(self) -> tuple[int, ...] | None:
        """The state that it could go on from."""
        return self.steps if self.steps is not None else self.kept


#: a generation's operations on one step: who has given its gradients, who has voted, who has raised the swap flag
Op = tuple
NOBODY = Node(DEAD, 0, 0, 0, 0, None, 0, 0, "-", None, 0, None, 0)


def bits(mask: int) -> Iterator[int]:
    """Yield the numbers of the bits that are set."""
    number = 0
    while mask:
        if mask & 1:
            yield number
        mask >>= 1
        number += 1


class World:
    """A state that can be changed; `frozen` is what it is told apart by."""

    __slots__ = ("budget", "downs", "mind", "nodes", "ops", "record", "rules", "ups")

    def __init__(self, rules: Rules, frozen: tuple[Any, ...]) -> None:
        self.rules = rules
        self.record: Record = frozen[0]
        self.mind: Mind | None = frozen[1]
        self.nodes: list[Node] = list(frozen[2])
        #: messages under way, to the coordinator and to the nodes
        self.ups: list[tuple[Any, ...]] = list(frozen[3])
        self.downs: list[tuple[Any, ...]] = list(frozen[4])
        self.ops: dict[tuple[int, int], Op] = dict(frozen[5])
        #: failures, coordinators' deaths and failing collectives that may still come
        self.budget: list[int] = list(frozen[6])

    def frozen(self) -> tuple[Any, ...]:
        """Return the state, without what can have no effect any more."""
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
        """Tell whether an expelled node may come back, or be in a collective with somebody."""
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
        """The members of the plan, of the pending one, and who is owed."""
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
        """A node says something to the coordinator."""
        node = self.nodes[number]
        if node.life == ALIVE and node.linked:
            self.ups[number] += (message,)

    def order(self, mask: int, *message: Any) -> None:
        """The coordinator says something to those of these nodes that are there."""
        assert self.mind is not None
        for number in bits(mask & self.mind.here):
            if self.nodes[number].linked:
                self.downs[number] += (message,)


def initial(rules: Rules) -> tuple[Any, ...]:
    """Return the state that all begins with: the first step is being reduced, and the leaver was asked to go.

    Where the joiner comes beside it, all have built the pending group, and Arm is on its way.
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
