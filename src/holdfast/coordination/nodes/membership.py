"""Who is there: nodes with their connections and leases, workers with what they last said."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from holdfast.protocol.messages.agent import Hello
from holdfast.protocol.messages.worker import Attach
from holdfast.protocol.names import node_of
from holdfast.protocol.plan import GenerationPlan


@dataclass(slots=True)
class WorkerInfo:
    """One live worker process; `entered` is the newest generation whose group it stands in."""

    attach: Attach
    entered: int = 0
    prepared: int = 0
    finished: bool = False

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
    workers: dict[str, WorkerInfo] = field(default_factory=dict[str, WorkerInfo])
    announced: tuple[int, ...] = ()
    rack: str = ""
    #: the coordinator's clock less the node's, in seconds
    ahead_s: float = 0.0
    #: known from before this coordinator's start
    returning: bool = False

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the node's workers, by index on the node."""
        ordered = sorted(self.workers.values(), key=lambda info: int(info.id.split("/")[1]))
        return tuple(info.attach.pid for info in ordered)

    @property
    def complete(self) -> bool:
        """True when all of the node's workers run."""
        return len(self.workers) == self.expected


class Membership:
    """Nodes by name and by connection. What has left is forgotten: its messages find no addressee."""

    def __init__(self) -> None:
        self.nodes: dict[str, Node] = {}
        self._by_connection: dict[int, Node] = {}

    def add(self, hello: Hello, connection: int, now: float) -> Node:
        """Take in an agent that was let in."""
        node = Node(
            name=hello.node,
            session=hello.session,
            connection=connection,
            agent_pid=hello.agent_pid,
            expected=hello.workers,
            rack=hello.rack,
            ahead_s=now - hello.clock,
            seen=now,
        )
        self.nodes[node.name] = node
        self._by_connection[connection] = node
        return node

    def remove(self, name: str) -> None:
        """Forget a node and its workers."""
        node = self.nodes.pop(name)
        self._by_connection.pop(node.connection, None)

    def on(self, connection: int) -> Node | None:
        """Return the node behind a connection, None where it has none (any more)."""
        return self._by_connection.get(connection)

    def worker(self, worker: str) -> WorkerInfo | None:
        """Return a live worker, None where it is gone or was never there."""
        node = self.nodes.get(node_of(worker))
        return node.workers.get(worker) if node else None

    def connection_of(self, worker: str) -> int | None:
        """Return the connection of a worker's node."""
        node = self.nodes.get(node_of(worker))
        return node.connection if node else None

    def workers(self) -> Iterator[WorkerInfo]:
        """All live workers, in the order in which their nodes came."""
        for node in self.nodes.values():
            yield from node.workers.values()

    def live(self, workers: Iterable[str]) -> list[str]:
        """Return those workers that are still there, in the same order."""
        return [worker for worker in workers if self.worker(worker) is not None]

    def entered(self, plan: GenerationPlan | None) -> bool:
        """Tell whether all members of a plan stand in its group."""
        if plan is None:
            return False
        infos = [self.worker(worker) for worker in plan.workers]
        return all(info is not None and info.entered >= plan.generation for info in infos)

    def renew_leases(self, now: float) -> None:
        """Renew every lease: the coordinator itself was away."""
        for node in self.nodes.values():
            node.seen = now

    def expired(self, now: float, lease_s: float) -> list[Node]:
        """Return the nodes whose lease has run out."""
        return [node for node in self.nodes.values() if now - node.seen > lease_s]
