"""A node's agent: one connection, what it keeps for a coordinator that comes back, and its workers' lives."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.protocol import messages as msg
from holdfast.simulation.network import Connection
from holdfast.simulation.process import Process
from holdfast.simulation.worker import SimWorker

if TYPE_CHECKING:
    from holdfast.simulation.cluster import Cluster

_LATEST = (
    msg.Attach,
    msg.Begun,
    msg.Entered,
    msg.Prepared,
    msg.Report,
    msg.Fault,
    msg.Finished,
    msg.CheckpointWritten,
    msg.CheckpointKept,
    msg.Loads,
)


class Kept:
    """What one worker has said that a restarted coordinator must hear again."""

    def __init__(self) -> None:
        self.latest: dict[type, msg.WorkerMessage] = {}
        self.applied: list[msg.Applied] = []

    def note(self, message: msg.WorkerMessage) -> None:
        """Keep a message if it matters later."""
        if isinstance(message, msg.Applied):
            self.applied.append(message)
        elif isinstance(message, _LATEST):
            self.latest[type(message)] = message
        if isinstance(message, msg.Entered):
            for kind in (msg.Prepared, msg.Report, msg.Fault):
                old = self.latest.get(kind)
                if old is not None and old.epoch < message.epoch:  # pyright: ignore[reportAttributeAccessIssue]
                    del self.latest[kind]

    def forget_up_to(self, step: int) -> None:
        """Steps up to here are in the journal."""
        self.applied = [message for message in self.applied if message.step > step]

    def replay(self) -> list[msg.WorkerMessage]:
        """Return all of it in an order in which it makes sense."""
        first = [self.latest[kind] for kind in (msg.Attach, msg.Begun, msg.Entered) if kind in self.latest]
        rest = [self.latest[kind] for kind in _LATEST[3:] if kind in self.latest]
        return [*first, *self.applied, *rest]


class SimAgent(Process):
    """One node's agent. Its death is its node's death."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        super().__init__()
        self.name = name
        self.workers: list[SimWorker] = []
        self.exit_code: int | None = None
        self._cluster = cluster
        self._session = cluster.nonce()
        self._term = 0
        self._kept: dict[str, Kept] = {}
        self._downs: dict[str, msg.WorkerDown] = {}
        self._connection: Connection | None = None
        self._welcomed = False
        self._pid = cluster.pid()

    # ---- life ----

    def boot(self) -> None:
        """Start the workers and look for the coordinator."""
        for index in range(self._cluster.plan.workers_per_node):
            self._start_worker(index)
        self.connect()

    def kill(self, *, seen: bool) -> None:
        """The whole node dies; `seen`: the coordinator gets a reset, else nothing."""
        if not self.alive:
            return
        self.alive = False
        for worker in self.workers:
            worker.kill()
        if self._connection is not None:
            self._connection.close_from_below(seen=seen)

    def stop(self) -> None:
        super().stop()
        for worker in self.workers:
            worker.stop()

    def resume(self) -> None:
        order = [*self.workers, None] if self._cluster.rng.random() < 0.5 else [None, *self.workers]
        for process in order:
            super().resume() if process is None else process.resume()

    def _end(self, exit_code: int) -> None:
        self.exit_code = exit_code
        self.kill(seen=True)

    # ---- workers ----

    def _start_worker(self, index: int) -> None:
        if not self.alive or any(msg.index_of(worker.id) == index for worker in self.workers):
            return  # (all were replaced since the one was lost in whose place this one was to come)
        worker = SimWorker(
            self._cluster, self, msg.worker_id(self.name, index, self._cluster.nonce()), self._cluster.pid()
        )
        self.workers.append(worker)
        self._cluster.add_worker(worker)
        self._cluster.after("start", worker, worker.attach)

    def relay(self, worker: SimWorker, message: msg.WorkerMessage) -> None:
        """Keep and pass on what a worker says."""
        if worker not in self.workers:
            return
        self._kept.setdefault(worker.id, Kept()).note(message)
        if isinstance(message, msg.Attach):
            index = msg.index_of(worker.id)
            self._downs = {name: down for name, down in self._downs.items() if msg.index_of(name) != index}
        self._cluster.trace(worker.id, message)
        self._send(msg.FromWorker(message=message))

    def worker_ended(self, worker: SimWorker, code: int, kind: str) -> None:
        """A worker process ended; replace it unless the job is over."""
        if worker not in self.workers:
            return
        self.workers.remove(worker)
        self._kept.pop(worker.id, None)
        if code == 0:
            if not self.workers:
                self._send(msg.Leave(reason="finished"))
                self._end(0)
            return
        self._cluster.trace(worker.id, "ended", kind)
        down = msg.WorkerDown(worker=worker.id, kind=kind, detail=kind, exit_code=code)
        self._downs[worker.id] = down
        self._send(down)
        self._cluster.after("restart", self, self._start_worker, msg.index_of(worker.id))

    def watch_stopped(self, worker: SimWorker) -> None:
        """A worker process is stopped: kill it if it still is after the lease."""
        self._cluster.timeline.after(self._cluster.config.lease_s, self.deliver, self._still_stopped, worker)

    def _still_stopped(self, worker: SimWorker) -> None:
        if worker.alive and worker.stopped:
            worker.kill()
            self.worker_ended(worker, -9, "hang")

    # ---- the connection ----

    def connect(self) -> None:
        """Connect, or wait for a coordinator to come up."""
        if self._connection is not None or not self.alive:
            return
        connection = self._cluster.connect(self)
        if connection is None:
            return
        self._connection, self._welcomed = connection, False
        kept = [
            message for worker in self.workers if worker.id in self._kept for message in self._kept[worker.id].replay()
        ]
        self._send(
            msg.Hello(
                protocol=msg.PROTOCOL,
                job="sim",
                node=self.name,
                session=self._session,
                term=self._term,
                agent_pid=self._pid,
                workers=self._cluster.plan.workers_per_node,
                digest="script",
                kept=tuple(kept),
            )
        )

    def disconnected(self, connection: Connection) -> None:
        """The connection is gone: connect again, for ever."""
        if connection is self._connection:
            self._connection = None
            self._reconnect_later()

    def reconnect_to_new(self) -> None:
        """The connection leads to a coordinator that another one has replaced."""
        if self._connection is not None:
            self._connection.close_from_below()
            self._connection = None
        self._reconnect_later()

    def cut(self, *, lose: bool, above_s: float, below_s: float) -> None:
        """The network breaks between this node and the coordinator."""
        if self._connection is not None:
            self._connection.cut(lose=lose, above_s=above_s, below_s=below_s)

    def _reconnect_later(self) -> None:
        self._cluster.after("reconnect", self, self.connect)

    def _send(self, message: msg.AgentMessage) -> None:
        if self._connection is not None:
            self._connection.send_up(message)

    def hear(self, connection: Connection, message: msg.CoordinatorMessage) -> None:
        """Take a message from the coordinator."""
        if connection is not self._connection:
            return
        match message:
            case msg.ToWorker(worker=name, order=order):
                for worker in self.workers:
                    if worker.id == name:
                        worker.deliver(worker.order, order)
            case msg.Welcome():
                self._welcome(connection, message)
            case msg.Committed(step=step):
                self._forget_up_to(step)
            case msg.Refused():
                self._refused(message)
            case msg.EndNode(exit_code=exit_code):
                self._end(exit_code)
            case _:
                pass

    def _welcome(self, connection: Connection, welcome: msg.Welcome) -> None:
        if welcome.term < self._term:
            self.reconnect_to_new()
            return
        self._term = welcome.term
        self._forget_up_to(welcome.committed)
        for down in self._downs.values():
            self._send(down)
        self._heartbeat(connection)

    def _heartbeat(self, connection: Connection) -> None:
        if connection is self._connection:
            connection.send_up(msg.Heartbeat())
            self._cluster.timeline.after(self._cluster.config.heartbeat_s, self.deliver, self._heartbeat, connection)

    def _forget_up_to(self, step: int) -> None:
        for kept in self._kept.values():
            kept.forget_up_to(step)

    def _refused(self, refused: msg.Refused) -> None:
        if not refused.retry:
            self._cluster.checker.refused_for_good(self, refused)
            self._end(refused.exit_code)
            return
        for worker in self.workers:
            worker.kill()
        self.workers.clear()
        self._kept.clear()
        self._downs.clear()
        self._session = self._cluster.nonce()
        for index in range(self._cluster.plan.workers_per_node):
            self._start_worker(index)
