"""The connected nodes with their leases, and the workers with their last reports."""

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

#: At most this many failures of a node count.
_MOST_FAILURES = 100
#: At most this many disconnected nodes are remembered.
_KEPT = 4096


@dataclass(slots=True)
class WorkerInfo:
    """One live worker process."""

    attach: Attach
    #: The newest generation that it has entered.
    entered: int = 0
    #: The newest generation for which it has built the group.
    prepared: int = 0
    finished: bool = False
    #: Why its script requested the job's end; "" if another script did, None if none did.
    stopped: str | None = None
    #: Its script ended with an exception, and the process keeps the state.
    raised: bool = False
    #: Its index on its node.
    index: int = field(init=False)

    def __post_init__(self) -> None:
        self.index = index_of(self.attach.worker)

    @property
    def id(self) -> str:
        """The worker's id."""
        return self.attach.worker


@dataclass(slots=True)
class Node:
    """One connected agent."""

    name: str
    session: str
    connection: int
    agent_pid: int
    expected: int
    #: The last sign of life.
    seen: float
    lease: LearntLease
    workers: dict[str, WorkerInfo] = field(default_factory=dict[str, WorkerInfo])
    announced: tuple[int, ...] = ()
    rack: str = ""
    zone: str = ""
    failure_rate: float = 1.0
    host: str = ""
    #: The address for other nodes; "" if unknown.
    address: str = ""
    #: Whether its agent runs on the coordinator's host.
    beside_coordinator: bool = True
    #: The port of its probe listener at `address`; 0 for none.
    probe_port: int = 0
    #: When it sent Hello.
    came: float = 0.0
    #: How many nodes connected before it.
    place: int = 0
    #: The coordinator's clock minus the node's, in seconds.
    ahead_s: float = 0.0
    #: How far its wall clock is ahead of the coordinator's, in seconds; 0 if that is unknown or negligible.
    clock_off_s: float = 0.0
    #: The last reported state of its GPUs; empty without NVIDIA's driver.
    gpus: tuple[GpuFacts, ...] = ()
    #: Whether the job knew it before this connection.
    returning: bool = False
    #: Whether users were told that it joined. Nodes that connect together are reported together.
    told: bool = False
    #: Whether it had no worker reports when it connected.
    bare: bool = False
    #: Its snapshot parts, or None if it keeps none.
    snapshots: NodeSnapshots | None = None
    #: Whether it is a standby, outside the world.
    standby: bool = False
    #: Whether it has left the world but is retained, because its state may still be needed.
    owed: bool = False
    #: The digest of its script and arguments.
    digest: str = ""
    #: Workers that were lost together with another one of their replica group, whether the agent has reported them or
    #: not.
    broken: set[str] = field(default_factory=set[str])

    @property
    def pids(self) -> tuple[int, ...]:
        """Process IDs of the node's workers, by index."""
        ordered = sorted(self.workers.values(), key=lambda info: info.index)
        return tuple(info.attach.pid for info in ordered)

    @property
    def complete(self) -> bool:
        """Whether all of the node's workers run."""
        return len(self.workers) == self.expected

    @property
    def coming(self) -> bool:
        """Whether its first workers since it connected are still starting."""
        return not (self.complete or self.announced or (self.returning and not self.bare))

    @property
    def counts(self) -> bool:
        """Whether a generation may include it."""
        return self.complete and not self.aside

    @property
    def aside(self) -> bool:
        """Whether it is outside the world: a standby or a retained node."""
        return self.standby or self.owed

    def in_units(self, places: int) -> Iterable[WorkerInfo]:
        """Return this node's workers that are in complete replica groups of `places` workers each: all of them if
        `places` is 1.
        """
        if places == 1 or self.complete:
            return self.workers.values()
        here = Counter(info.index // places for info in self.workers.values())
        return [info for info in self.workers.values() if here[info.index // places] == places]

    def has_place_for(self, worker: str) -> bool:
        """Return whether a worker's local rank exists on the node and is free."""
        place = index_of(worker)
        return place < self.expected and all(info.index != place for info in self.workers.values())


class _RollCall:
    """The members of a plan that have not reached a state yet. Only changed workers are checked again.

    Args:
        far: returns whether a member has reached the state, from its ID and its info (None if it is lost).
    """

    def __init__(self, far: Callable[[str, WorkerInfo | None, GenerationPlan], bool]) -> None:
        self._far = far
        self._plan: GenerationPlan | None = None
        self._missing: set[str] = set()

    def missing(self, plan: GenerationPlan, find: Callable[[str], WorkerInfo | None]) -> set[str]:
        """Return the members of the plan that have not reached the state that this roll call is about, as `far`
        decides.

        A new plan is checked completely; the members of the same plan are not checked again, except by `update`.

        Args:
            find: returns a worker's info, or None if it is lost.
        """
        if plan is not self._plan:
            self._plan = plan
            self._missing = {worker for worker in plan.workers if not self._far(worker, find(worker), plan)}
        return self._missing

    def update(self, worker: str, info: WorkerInfo | None) -> None:
        """Check again, after a change, whether a worker has reached the state that this roll call is about.

        Ignored if the worker is not in the plan of the last `missing`. `info` is None if the worker is lost.
        """
        plan = self._plan
        if plan is None or plan.rank(worker) is None:
            return
        if self._far(worker, info, plan):
            self._missing.discard(worker)
        else:
            self._missing.add(worker)


class Membership:
    """The connected nodes, by name and by connection. Disconnected nodes are removed.

    Queries that are made for every message take constant time.
    """

    def __init__(self, left_from: Mapping[str, tuple[str, str]] = MappingProxyType({})) -> None:
        """`left_from`: the racks and zones of nodes that were connected to earlier coordinators."""
        self.nodes: dict[str, Node] = {}
        #: The number of workers in a replica group.
        self.unit_places = 1
        #: Workers that have left their loops and ended, with the last step that they applied.
        self.left: dict[str, int] = {}
        #: The number of complete nodes in the world.
        self.complete_nodes = 0
        #: The standbys. They count nowhere else.
        self.standbys: dict[str, Node] = {}
        #: Drained nodes that are retained as members until they are proven to be unneeded.
        self.owed: dict[str, Node] = {}
        #: Failed transfers of state between nodes, since this coordinator's start.
        self.transfers = TransferHistory()
        self._by_connection: dict[int, Node] = {}
        self._workers: dict[str, WorkerInfo] = {}
        self._came = 0
        #: Racks and zones of disconnected nodes, the newest last.
        self._left_from = dict(left_from)
        #: How often each node's machine has failed, since this coordinator's start.
        self._failed: dict[str, int] = {}
        self._entered = _RollCall(lambda _, info, plan: info is not None and info.entered >= plan.generation)
        self._prepared = _RollCall(lambda _, info, plan: info is not None and info.prepared >= plan.generation)
        self._finished = _RollCall(lambda id, info, _: id in self.left or (info is not None and info.finished))
        #: The workers outside a plan, with that plan.
        self._outside: tuple[GenerationPlan | None, dict[str, Node]] = (None, {})

    def add(self, hello: Hello, connection: int, now: float, *, standby: bool = False) -> Node:
        """Add the node of an admitted agent, without workers yet, and return it. Its lease begins now.

        Args:
            standby: whether it waits outside the world. Otherwise it counts as regular.
        """
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
        """Make a standby or a retained node a regular node, and return it."""
        node = self._take_out(name)
        self.complete_nodes += node.counts
        return node

    def owe(self, name: str) -> Node:
        """Retain a node that has left the world, because its state may still be needed; return it."""
        node = self._take_out(name)
        node.owed, self.owed[name] = True, node
        return node

    def demote(self, name: str) -> Node:
        """Make a node a standby, and return it. If it takes over ranks later, it is reported as joined again."""
        node = self._take_out(name)
        node.standby, self.standbys[name] = True, node
        node.announced, node.returning, node.told = (), False, False
        return node

    def _take_out(self, name: str) -> Node:
        """Remove a node's role as standby, retained or regular node, and return it; the caller sets the new role."""
        node = self.nodes[name]
        self.complete_nodes -= node.counts
        self.standbys.pop(name, None)
        self.owed.pop(name, None)
        node.standby = node.owed = False
        self._outside = (None, {})
        return node

    @property
    def regular(self) -> list[Node]:
        """The nodes that are in the world or will be: not the standbys and not the retained nodes."""
        return [node for node in self.nodes.values() if not node.aside]

    def count_failure(self, name: str) -> None:
        """Count a failure of a node's machine, which makes another one more likely.

        Kept for the newest 4096 nodes, also disconnected ones; at most 100 failures count.
        """
        self._failed[name] = min(self._failed.pop(name, 0) + 1, _MOST_FAILURES)
        if len(self._failed) > _KEPT:
            del self._failed[next(iter(self._failed))]

    def failure_rate(self, name: str) -> float:
        """Return a node's failure rate: the configured one, times one plus the number of observed failures."""
        return self.nodes[name].failure_rate * (1 + self._failed.get(name, 0))

    def place_of(self, name: str) -> tuple[str, str]:
        """Return the rack and the zone of a connected or earlier node; "" for each one that is unknown."""
        node = self.nodes.get(name)
        return (node.rack, node.zone) if node is not None else self._left_from.get(name, ("", ""))

    def remove(self, name: str) -> tuple[str, ...]:
        """Remove a node, its workers and its transfers, but remember its rack and zone; return the workers."""
        node = self.nodes[name]
        workers = tuple(node.workers)
        for worker in workers:
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
        return workers

    def attach(self, node: Node, attach: Attach) -> None:
        """Add a worker process to its node. It has entered no generation yet."""
        before = node.counts
        info = node.workers[attach.worker] = self._workers[attach.worker] = WorkerInfo(attach)
        self.complete_nodes += node.counts - before
        plan, outside = self._outside
        if plan is not None and not node.aside and plan.rank(info.id) is None:
            outside[info.id] = node
        self._update_roll_calls(info.id, info)

    def drop(self, node: Node, worker: str) -> WorkerInfo | None:
        """Remove a worker of a node and return it, or None if it was not there."""
        before, info = node.counts, node.workers.pop(worker, None)
        if info is not None:
            self.complete_nodes += node.counts - before
            self._outside[1].pop(worker, None)
            del self._workers[worker]
            self._update_roll_calls(worker, None)
        return info

    def left_loop(self, worker: str, applied: int) -> None:
        """Record that a worker's script left its loop after this step and ended."""
        self.left[worker] = applied
        self._update_roll_calls(worker, None)

    def enter(self, info: WorkerInfo, generation: int) -> None:
        """Record that a worker has entered a generation."""
        info.entered = generation
        self._update_roll_calls(info.id, info)

    def prepare(self, info: WorkerInfo, generation: int) -> None:
        """Record that a worker has built the group of a pending generation."""
        info.prepared = max(info.prepared, generation)
        self._update_roll_calls(info.id, info)

    def finish(self, info: WorkerInfo, *, finished: bool = True) -> None:
        """Record that a worker has ended its loop, or must continue it."""
        info.finished = finished
        self._update_roll_calls(info.id, info)

    def _update_roll_calls(self, worker: str, info: WorkerInfo | None) -> None:
        """Check a worker again as entered, prepared and finished; `info` is None if it is lost."""
        for roll_call in (self._entered, self._prepared, self._finished):
            roll_call.update(worker, info)

    def on(self, connection: int) -> Node | None:
        """Return the node of a connection, or None if it has none."""
        return self._by_connection.get(connection)

    def worker(self, worker: str) -> WorkerInfo | None:
        """Return a live worker, or None."""
        return self._workers.get(worker)

    def connection_of(self, worker: str) -> int | None:
        """Return the connection of a worker's node."""
        node = self.nodes.get(node_of(worker))
        return node.connection if node else None

    def workers(self) -> Iterator[WorkerInfo]:
        """Yield the live workers that a generation may include, in the order in which their nodes connected.

        They are in complete replica groups. Standbys and retained nodes are left out. So are nodes with starting
        workers, because all workers of a node join together.
        """
        for node in self.nodes.values():
            if not node.aside and not node.coming:
                yield from node.in_units(self.unit_places)

    def all_workers(self) -> Iterator[WorkerInfo]:
        """Return all live workers, including standbys."""
        return iter(self._workers.values())

    def live(self, workers: Iterable[str]) -> list[str]:
        """Return the live ones of these workers, in the same order."""
        return [worker for worker in workers if self.worker(worker) is not None]

    def entered(self, plan: GenerationPlan | None) -> bool:
        """Return whether all members of a plan have entered its generation."""
        return plan is not None and not self._entered.missing(plan, self.worker)

    def prepared(self, plan: GenerationPlan) -> bool:
        """Return whether all members of a pending plan have built its group."""
        return not self._prepared.missing(plan, self.worker)

    def unfinished(self, plan: GenerationPlan) -> int:
        """Return how many members of a plan are still in their loops, or lost without having left them."""
        return len(self._finished.missing(plan, self.worker))

    def outside(self, plan: GenerationPlan) -> list[str]:
        """Return the workers of complete regular nodes that a plan does not name, in the order in which their nodes
        connected.
        """
        if plan is not self._outside[0]:
            nodes = self.regular
            workers = {worker: node for node in nodes for worker in node.workers if plan.rank(worker) is None}
            self._outside = plan, workers
        others = self._outside[1]
        complete = [worker for worker, node in others.items() if node.complete]
        return sorted(complete, key=lambda worker: others[worker].place)

    def renew(self, connection: int, now: float) -> None:
        """Renew the lease of the node that has this connection, from `now` on. Ignored if no node has it."""
        node = self.on(connection)
        if node is not None:
            node.seen = now

    def renew_leases(self, now: float) -> None:
        """Renew all leases, because this process was paused."""
        for node in self.nodes.values():
            node.seen = now

    def expired(self, now: float, lease_s: float, least_s: float) -> list[Node]:
        """Return the nodes with expired leases, and update the learned leases.

        A node's lease is learned from its longest silences, and lasts between `least_s` and `lease_s` seconds.
        """
        silent: list[Node] = []
        # This loop runs often, over thousands of nodes: it calls no function for each.
        for node in self.nodes.values():
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
