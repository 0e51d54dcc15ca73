"""Nodes allocated by the pool's own state machine (`coordination.pool`), with jobs and nodes that answer at once.

A pool's server runs the same machine. The jobs' side of their grants (`coordination.grants`) and the nodes' side
(`fence`) are also the same code. Here their actions take no time: the simulation accounts for the jobs' costs. Plans
for possible next events are not prepared. Each is solved when it is needed, with the same result
(`tests/coordination/pool/test_foreseen_plans.py`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import count
from math import inf

from holdfast.coordination.grants import apply_shares, describe_state, give_back, mark_connected
from holdfast.coordination.pool.fence import Fence, FenceInstruction, ReapGrant, ReportState
from holdfast.coordination.pool.inputs import (
    JobConnected,
    JobMessage,
    NodeDisconnected,
    NodeMessage,
    PoolInput,
    SubmitJob,
)
from holdfast.coordination.pool.instructions import PoolInstruction, SendToJob, SendToNode, StartCoordinator
from holdfast.coordination.pool.pool import Pool
from holdfast.coordination.pool.share.policies import POLICIES
from holdfast.coordination.pool.state import PoolConfig
from holdfast.planner.fleet.pool.tasks import FleetTask
from holdfast.protocol.messages.pool import NodeGrant, PoolHello
from holdfast.protocol.pool.grants import Held
from holdfast.protocol.pool.record import POOL_SCHEMA, PooledJob, PoolNode, PoolRecord
from holdfast.protocol.pool.sharing import JobShares

#: start of the pool's clock; not 0, because 0 means "not yet" in its record
BEGIN = 1_000_000.0


class MachineShares:
    """A pool's state machine, its jobs and its nodes."""

    def __init__(
        self,
        policy: str,
        tasks: Sequence[FleetTask],
        nodes: Sequence[str],
        change_s: Callable[[int], float],
    ) -> None:
        """Start with all nodes up and all jobs submitted, and make the first plan.

        Args:
            change_s: returns the seconds that a planned change costs a job of this many nodes, as jobs report them.
        """
        self._change_s = change_s
        known = {node: PoolNode(name=node, session="0") for node in nodes}
        record = PoolRecord(schema=POOL_SCHEMA, pool="fleet", nodes=known)
        config = PoolConfig(name="fleet", policy=POLICIES[policy], expected=len(nodes), lease_s=inf, settle_s=inf)
        self.pool = Pool(config, record)
        self._held: dict[str, Held] = {}
        self._numbers: dict[str, int] = {}
        self._names: dict[int, str] = {}
        self._fences: dict[str, Fence] = {}
        self._inputs: deque[PoolInput] = deque()
        self._connections = count(1)
        self._changed: set[str] = set()
        self._now = BEGIN
        self._execute(self.pool.start(self._now, "", 1))
        for task in tasks:
            self._handle_input(SubmitJob(task.spec))
        for node in nodes:
            self._connect_node(node)

    def owner_of(self, node: str) -> str | None:
        """Return the job that trains on a node, or None."""
        return next((job for job, held in self._held.items() if node in held.grants), None)

    def size_of(self, job: str) -> int:
        """Return how many nodes a job trains on."""
        held = self._held.get(job)
        return len(held.grants) if held is not None else 0

    def remove_node(self, node: str, now: float) -> frozenset[str]:
        """Disconnect a node's agent, remove its fence, and let its job give the node back to the pool.

        Return the jobs whose nodes changed. Time moves to `now`.
        """
        self._now, self._changed = BEGIN + now, set()
        connection = self._numbers.pop(node)
        del self._names[connection], self._fences[node]
        self._handle_input(NodeDisconnected(connection))
        if (job := self.owner_of(node)) is not None:
            self._update_held(job, give_back(self._held[job], [node]))
            self._handle_inputs()
        return frozenset(self._changed)

    def add_node(self, node: str, now: float) -> frozenset[str]:
        """Connect a node's agent as a new process. Return the jobs with other nodes than before."""
        self._now, self._changed = BEGIN + now, set()
        self._connect_node(node)
        return frozenset(self._changed)

    # ---- inside ----

    def _connect_node(self, node: str) -> None:
        """Give a node the next connection number and a new fence, and send its hello to the pool's state machine."""
        number = next(self._connections)
        self._numbers[node], self._names[number] = number, node
        fence = self._fences[node] = Fence()
        self._handle_input(NodeMessage(number, PoolHello(node=node, session=f"{number:x}", stands=fence.state)))

    def _handle_input(self, event: PoolInput) -> None:
        """Let the pool handle an input, and all inputs that follow from it."""
        self._inputs.append(event)
        self._handle_inputs()

    def _handle_inputs(self) -> None:
        """Let the pool handle the queued inputs, and execute its instructions, until the queue is empty."""
        while self._inputs:
            self._execute(self.pool.handle(self._inputs.popleft(), self._now))

    def _execute(self, instructions: Sequence[PoolInstruction]) -> None:
        """Execute the pool's instructions: start a job, deliver its shares, or let a node's fence handle a grant.

        Messages to nodes without a connection, and all other instructions, are ignored.
        """
        for instruction in instructions:
            match instruction:
                case StartCoordinator(job):
                    self._start_job(job)
                case SendToJob(name, shares):
                    self._deliver_shares(name, shares)
                case SendToNode(connection, message) if isinstance(message, NodeGrant):
                    node = self._names.get(connection)
                    if node is not None:
                        self._execute_fence(node, self._fences[node].on_grant(message))
                case _:
                    pass

    def _start_job(self, job: PooledJob) -> None:
        """Start a job that holds no nodes, unless it has started before, and queue its connection for the pool."""
        self._held.setdefault(job.name, Held(submission=job.submission))
        self._inputs.append(JobConnected(job.name))

    def _deliver_shares(self, job: str, shares: JobShares) -> None:
        """Deliver a job's share: new nodes join at once, and nodes that must leave are given back at once.

        If this changes what the job holds, its new state is queued for the pool.
        """
        held = apply_shares(self._held[job], shares, self._now)
        for node, grant in held.grants.items():
            held = mark_connected(held, node, grant.number) or held
        self._update_held(job, give_back(held, held.to_leave))

    def _update_held(self, job: str, held: Held) -> None:
        """Store the nodes that a job holds and their grants. If either changed, queue the job's new state for the pool.

        The job counts as changed only if it holds other nodes, not if only their grants differ.
        """
        before, self._held[job] = self._held[job], held
        if held == before:
            return
        if held.grants.keys() != before.grants.keys():
            self._changed.add(job)
        change_s = self._change_s(len(held.grants))
        self._inputs.append(JobMessage(job, describe_state(held, members=held.grants, move_s=change_s)))

    def _execute_fence(self, node: str, instructions: Sequence[FenceInstruction]) -> None:
        """Execute the fence's instructions: end a grant's processes at once, or queue the node's state for the pool."""
        for one in instructions:
            if isinstance(one, ReapGrant):
                self._execute_fence(node, self._fences[node].on_reaped(one.grant))
            elif isinstance(one, ReportState):
                self._inputs.append(NodeMessage(self._numbers[node], one.state))
