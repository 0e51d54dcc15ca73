"""Who is there: nodes with their connections and leases, workers with what they last said."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from holdfast.coordination.timing.lease import WINDOW_S, LearntLease
from holdfast.coordination.transfers import TransferHistory
from holdfast.protocol.messages.agent import Hello, NodeSnapshots
from holdfast.protocol.messages.gpus import GpuFacts
from holdfast.protocol.messages.worker import Attach
from holdfast.protocol.names import index_of, node_of
from holdfast.protocol.plan import GenerationPlan

#: of a node's failures, so many count
_MOST_FAILURES = 100
#: of the nodes that are gone, so many are remembered
_KEPT = 4096


@dataclass(slots=True)
class WorkerInfo:
    """One live worker process; `entered` is the newest generation whose group it stands in."""

    attach: Attach
    entered: int = 0
    prepared: int = 0
    finished: bool = False
    #: why its script has asked for the end, "" where another one has; None: nobody has
    stopped: str | None = None
    #: its script has ended with an exception, and its process keeps the state
    raised: bool = False
    #: on its node
    index: int = field(init=False)

    def __post_init__(self) -> None:
        self.index = index_of(self.attach.worker)

    @property
    def id(self) -> str:
        """The worker's id."""
        return self.attach.worker


@dataclass(slots=True)
class Node:
    """One connected agent; `seen` is its last sign of life."""

    name: str
    session: str
    connection: int
    agent_pid: int
    expected: int
    seen: float
    lease: LearntLease
    workers: dict[str, WorkerInfo] = field(default_factory=dict[str, WorkerInfo])
    announced: tuple[int, ...] = ()
    rack: str = ""
    zone: str = ""
    failure_rate: float = 1.0
    host: str = ""
    #: at which the other nodes reach it; "": not known
    address: str = ""
    #: its agent runs on the coordinator's host
    beside_coordinator: bool = True
    #: of `address`: where others can try to connect; 0: nowhere
    probe_port: int = 0
    #: when it said Hello
    came: float = 0.0
    #: how many nodes had come before it
    place: int = 0
    #: the coordinator's clock less the node's, in seconds
    ahead_s: float = 0.0
    #: how far its wall clock is ahead of the coordinator's, in seconds; 0 if that is not known, or as good as nothing
    clock_off_s: float = 0.0
    #: the last reported state of its GPUs; empty without NVIDIA's driver
    gpus: tuple[GpuFacts, ...] = ()
    #: known from before this coordinator's start
    returning: bool = False
    #: users were told that it has come (who comes beside others waits for them a little)
    told: bool = False
    #: when it came, it had no word of any worker of its own
    bare: bool = False
    #: which parts it holds; None: it keeps none
    snapshots: NodeSnapshots | None = None
    #: waits to take another's place, and counts in no world
    standby: bool = False
    #: has left the world in good order; what it has counts until it is proven that nobody needs it
    owed: bool = False
    #: of the script and arguments that it has
    digest: str = ""
    #: workers that are gone with another one of their unit, whether its agent has told of each or not
    broken: set[str] = field(default_factory=set[str])

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the node's workers, by index on the node."""
        ordered = sorted(self.workers.values(), key=lambda info: info.index)
        return tuple(info.attach.pid for info in ordered)

    @property
    def complete(self) -> bool:
        """True when all of the node's workers run."""
        return len(self.workers) == self.expected

    @property
    def coming(self) -> bool:
        """True where its agent is here, its workers are not, and never were since it came."""
        return not (self.complete or self.announced or (self.returning and not self.bare))

    @property
    def counts(self) -> bool:
        """True where a generation may name it."""
        return self.complete and not self.aside

    @property
    def aside(self) -> bool:
        """True where it counts in no world."""
        return self.standby or self.owed

    def in_units(self, places: int) -> Iterable[WorkerInfo]:
        """Return its workers that run with all of their unit, where a unit has so many places."""
        if places == 1 or self.complete:
            return self.workers.values()
        here = Counter(info.index // places for info in self.workers.values())
        return [info for info in self.workers.values() if here[info.index // places] == places]

    def has_place_for(self, worker: str) -> bool:
        """Tell whether the place that a worker's id names is there, and nobody's."""
        place = index_of(worker)
        return place < self.expected and all(info.index != place for info in self.workers.values())


class _RollCall:
    """Which members of a plan have not come so far yet: all are looked at once for a plan, then who changes.

    Args:
        far: tells of a member, by its id and what is known of it (None: it is not there), whether it has come so far.
    """

    def __init__(self, far: Callable[[str, WorkerInfo | None, GenerationPlan], bool]) -> None:
        self._far = far
        self._plan: GenerationPlan | None = None
        self._missing: set[str] = set()

    def missing(self, plan: GenerationPlan, find: Callable[[str], WorkerInfo | None]) -> set[str]:
        """Return the members that have not come so far."""
        if plan is not self._plan:
            self._plan = plan
            self._missing = {worker for worker in plan.workers if not self._far(worker, find(worker), plan)}
        return self._missing

    def look(self, worker: str, info: WorkerInfo | None) -> None:
        """A worker is another than before; None: it is gone."""
        plan = self._plan
        if plan is None or plan.rank(worker) is None:
            return
        if self._far(worker, info, plan):
            self._missing.discard(worker)
        else:
            self._missing.add(worker)


class Membership:
    """Nodes by name and by connection. What has left is forgotten: its messages find no addressee.

    What is asked after every message takes the same time, however many members there are.
    """

    def __init__(self, left_from: Mapping[str, tuple[str, str]] = MappingProxyType({})) -> None:
        """`left_from`: the racks and zones of nodes that were here before this coordinator's start."""
        self.nodes: dict[str, Node] = {}
        #: how many workers of a node have a replica of the model between them: a unit
        self.unit_places = 1
        #: workers whose scripts have left their loops and ended, with the step that they had applied
        self.left: dict[str, int] = {}
        #: how many nodes run all of their workers, and how many wait to take others' places: these count nowhere else
        self.complete_nodes = 0
        self.standbys: dict[str, Node] = {}
        #: those that have left in good order, and count as members until that is proven to have lost nothing
        self.owed: dict[str, Node] = {}
        #: failed transfers of state between nodes, since this coordinator's start
        self.transfers = TransferHistory()
        self._by_connection: dict[int, Node] = {}
        self._workers: dict[str, WorkerInfo] = {}
        self._came = 0
        #: the racks and zones of those that were here and are not, the newest last
        self._left_from = dict(left_from)
        #: how often the machine of a node has failed, since this coordinator's start
        self._failed: dict[str, int] = {}
        self._entered = _RollCall(lambda _, info, plan: info is not None and info.entered >= plan.generation)
        self._prepared = _RollCall(lambda _, info, plan: info is not None and info.prepared >= plan.generation)
        self._finished = _RollCall(lambda id, info, _: id in self.left or (info is not None and info.finished))
        #: the workers that are in no plan, and the plan that this was looked up for
        self._outside: tuple[GenerationPlan | None, dict[str, Node]] = (None, {})

    def add(self, hello: Hello, connection: int, now: float, *, standby: bool = False) -> Node:
        """Take in an agent that was let in."""
        node = Node(
            name=hello.node,
            session=hello.session,
            connection=connection,
            agent_pid=hello.agent_pid,
            expected=hello.workers,
            rack=hello.rack,
            zone=hello.zone,
            failure_rate=hello.failure_rate,
            host=hello.host,
            address=hello.address,
            beside_coordinator=hello.beside_coordinator,
            probe_port=hello.probe_port,
            came=now,
            ahead_s=now - hello.clock,
            seen=now,
            lease=LearntLease(word=now, began=now),
            place=self._came,
            standby=standby,
            digest=hello.digest,
            bare=not hello.kept,
        )
        self._came += 1
        if standby:
            self.standbys[node.name] = node
        self.nodes[node.name] = node
        self._by_connection[connection] = node
        return node

    def promote(self, name: str) -> Node:
        """A standby, or a node that has left the world, is one like any other from here on."""
        node = self._take_out(name)
        self.complete_nodes += node.counts
        return node

    def owe(self, name: str) -> Node:
        """A node has left the world, and what it has counts still."""
        node = self._take_out(name)
        node.owed, self.owed[name] = True, node
        return node

    def demote(self, name: str) -> Node:
        """A node is a standby from here on; it is told of as one that has come where it takes another's place."""
        node = self._take_out(name)
        node.standby, self.standbys[name] = True, node
        node.announced, node.returning, node.told = (), False, False
        return node

    def _take_out(self, name: str) -> Node:
        """Let a node be none of the world's, nor a standby, nor owed; its caller says what it is."""
        node = self.nodes[name]
        self.complete_nodes -= node.counts
        self.standbys.pop(name, None)
        self.owed.pop(name, None)
        node.standby = node.owed = False
        self._outside = (None, {})
        return node

    @property
    def regular(self) -> list[Node]:
        """The nodes that are of the world, or are to be: no standbys, and none that has left."""
        return [node for node in self.nodes.values() if not node.aside]

    def failed(self, name: str) -> None:
        """The machine of a node has failed: what has, may again, also where it stays or comes back."""
        self._failed[name] = min(self._failed.pop(name, 0) + 1, _MOST_FAILURES)
        if len(self._failed) > _KEPT:
            del self._failed[next(iter(self._failed))]

    def failure_rate(self, name: str) -> float:
        """Return how often a node fails: as it has said, and as much again for each failure that was seen."""
        return self.nodes[name].failure_rate * (1 + self._failed.get(name, 0))

    def place_of(self, name: str) -> tuple[str, str]:
        """Return the rack and the zone of a node that is here or was; "" for what it did not name."""
        node = self.nodes.get(name)
        return (node.rack, node.zone) if node is not None else self._left_from.get(name, ("", ""))

    def remove(self, name: str) -> tuple[str, ...]:
        """Forget a node and its workers; return these."""
        node = self.nodes[name]
        gone = tuple(node.workers)
        for worker in gone:
            self.drop(node, worker)
        del self.nodes[name]
        self._left_from.pop(name, None)
        self._left_from[name] = node.rack, node.zone
        if len(self._left_from) > _KEPT:
            del self._left_from[next(iter(self._left_from))]
        self.standbys.pop(name, None)
        self.owed.pop(name, None)
        self._by_connection.pop(node.connection, None)
        self.transfers.forget(name)
        return gone

    def attach(self, node: Node, attach: Attach) -> None:
        """A worker of a node runs."""
        before = node.counts
        info = node.workers[attach.worker] = self._workers[attach.worker] = WorkerInfo(attach)
        self.complete_nodes += node.counts - before
        plan, outside = self._outside
        if plan is not None and not node.aside and plan.rank(info.id) is None:
            outside[info.id] = node
        self._look(info.id, info)

    def drop(self, node: Node, worker: str) -> WorkerInfo | None:
        """A worker of a node is there no more; return what was known of it, None where it was not there."""
        before, info = node.counts, node.workers.pop(worker, None)
        if info is not None:
            self.complete_nodes += node.counts - before
            self._outside[1].pop(worker, None)
            del self._workers[worker]
            self._look(worker, None)
        return info

    def left_loop(self, worker: str, applied: int) -> None:
        """The script of a worker, which is there no more, had left its loop after this step."""
        self.left[worker] = applied
        self._look(worker, None)

    def enter(self, info: WorkerInfo, generation: int) -> None:
        """A worker stands in the group of a generation."""
        info.entered = generation
        self._look(info.id, info)

    def prepare(self, info: WorkerInfo, generation: int) -> None:
        """A worker has built the group of a pending generation."""
        info.prepared = max(info.prepared, generation)
        self._look(info.id, info)

    def finish(self, info: WorkerInfo, *, finished: bool = True) -> None:
        """A worker has ended its loop, or is to go on."""
        info.finished = finished
        self._look(info.id, info)

    def _look(self, worker: str, info: WorkerInfo | None) -> None:
        for roll_call in (self._entered, self._prepared, self._finished):
            roll_call.look(worker, info)

    def on(self, connection: int) -> Node | None:
        """Return the node behind a connection, None where it has none (any more)."""
        return self._by_connection.get(connection)

    def worker(self, worker: str) -> WorkerInfo | None:
        """Return a live worker, None where it is gone or was never there."""
        return self._workers.get(worker)

    def connection_of(self, worker: str) -> int | None:
        """Return the connection of a worker's node."""
        node = self.nodes.get(node_of(worker))
        return node.connection if node else None

    def workers(self) -> Iterator[WorkerInfo]:
        """All live workers that a generation may name, in the order in which their nodes came: those of whole units.

        Not those of standbys, of who has left, and of nodes that have come only now, before all of theirs run: these
        are told of and named together.
        """
        for node in self.nodes.values():
            if not node.aside and not node.coming:
                yield from node.in_units(self.unit_places)

    def everybody(self) -> Iterator[WorkerInfo]:
        """All live workers, those of standbys too."""
        return iter(self._workers.values())

    def live(self, workers: Iterable[str]) -> list[str]:
        """Return those workers that are still there, in the same order."""
        return [worker for worker in workers if self.worker(worker) is not None]

    def entered(self, plan: GenerationPlan | None) -> bool:
        """Tell whether all members of a plan stand in its group."""
        return plan is not None and not self._entered.missing(plan, self.worker)

    def prepared(self, plan: GenerationPlan) -> bool:
        """Tell whether all members of a pending plan have built its group."""
        return not self._prepared.missing(plan, self.worker)

    def unfinished(self, plan: GenerationPlan) -> int:
        """Return how many members of a plan have neither ended nor left their loops."""
        return len(self._finished.missing(plan, self.worker))

    def outside(self, plan: GenerationPlan) -> list[str]:
        """Return the workers of complete nodes that a plan does not name, in the order in which their nodes came."""
        if plan is not self._outside[0]:
            nodes = self.regular
            workers = {worker: node for node in nodes for worker in node.workers if plan.rank(worker) is None}
            self._outside = plan, workers
        others = self._outside[1]
        complete = [worker for worker, node in others.items() if node.complete]
        return sorted(complete, key=lambda worker: others[worker].place)

    def renew(self, connection: int, now: float) -> None:
        """The node behind a connection lives."""
        node = self.on(connection)
        if node is not None:
            node.seen = now

    def renew_leases(self, now: float) -> None:
        """Renew every lease: the coordinator itself was away."""
        for node in self.nodes.values():
            node.seen = now

    def expired(self, now: float, lease_s: float, least_s: float) -> list[Node]:
        """Return the nodes whose lease has run out: no longer than `lease_s`, and no shorter than `least_s` seconds."""
        silent: list[Node] = []
        for node in self.nodes.values():  # (often, and there may be thousands: nothing is called for each)
            lease = node.lease
            if node.seen > lease.word:
                if node.seen - lease.word > lease.longest_s:
                    lease.longest_s = node.seen - lease.word
                lease.word = node.seen
            if now - lease.began >= WINDOW_S:
                lease.roll(now)
            if now - node.seen > least_s:
                silent.append(node)
        return [node for node in silent if now - node.seen > min(lease_s, node.lease.lasts_s)]
