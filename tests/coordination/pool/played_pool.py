"""A driver for a pool's state machine: tests send messages of nodes and jobs, and the results are recorded."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from holdfast.coordination.inputs import Tick
from holdfast.coordination.pool.inputs import (
    JobMessage,
    NextPlansSolved,
    NodeDisconnected,
    NodeMessage,
    PoolInput,
    SubmitJob,
)
from holdfast.coordination.pool.instructions import (
    DisconnectNode,
    EmitPool,
    PersistPool,
    PoolInstruction,
    SendToJob,
    SendToNode,
    SolveNextPlans,
)
from holdfast.coordination.pool.pool import Pool
from holdfast.coordination.pool.share.achieving import Waf
from holdfast.coordination.pool.share.next_plans import NextPlansQuestion
from holdfast.coordination.pool.share.policies import POLICIES
from holdfast.coordination.pool.state import PoolConfig
from holdfast.protocol.job_spec import CheckpointSpec, JobSpec
from holdfast.protocol.messages.pool import NodeAlive, NodeGrant, NodeState, PoolHello
from holdfast.protocol.pool.events import AnyPoolEvent
from holdfast.protocol.pool.record import PoolRecord
from holdfast.protocol.pool.sharing import JobPace, JobShares, JobStanding, JobState, NodeUnfit

E = TypeVar("E", bound=AnyPoolEvent)


def a_job(name: str, least: int = 1, most: int = 8, *, saves: bool = True, **keys: object) -> JobSpec:
    checkpoint = CheckpointSpec(dir="/kept" if saves else "")
    return JobSpec(name=name, min_nodes=least, max_nodes=most, checkpoint=checkpoint, **keys)  # pyright: ignore


class PlayedPool:
    """A pool with a store, journal, nodes and jobs that the test controls."""

    def __init__(
        self,
        nodes: int = 0,
        *,
        policy: str = "equal",
        reserve: int = 0,
        starves: bool = False,
        **settings: float | bool,
    ) -> None:
        shared = Waf(starves=True) if starves else POLICIES[policy]
        self.config = PoolConfig(name="p", policy=shared, reserve=reserve, **settings)  # pyright: ignore
        self.now = 1000.0
        self.stored: bytes | None = None
        self.events: list[AnyPoolEvent] = []
        #: the last message to each node and job
        self.node_told: dict[int, NodeGrant] = {}
        self.job_told: dict[str, JobShares] = {}
        self.closed: list[int] = []
        #: the last question about next plans
        self.question: NextPlansQuestion | None = None
        self.connections: dict[str, int] = {}
        self.sessions: dict[str, str] = {}
        #: the nodes that each job refuses
        self.refuses: dict[str, dict[str, NodeUnfit]] = {}
        self._last_connection = 0
        self._opened()
        for number in range(1, nodes + 1):
            self.come(f"n{number}")

    # ---- the shell ----

    def _opened(self) -> list[PoolInstruction]:
        record = msgspec.json.decode(self.stored, type=PoolRecord) if self.stored else None
        self.pool = Pool(self.config, record, len(self.events))
        return self._carry_out(self.pool.start(self.now, "http://here", 1))

    def restart(self) -> list[PoolInstruction]:
        """Start another server after the first one dies."""
        self.connections.clear()
        return self._opened()

    def feed(self, event: PoolInput, after: float = 0.0) -> list[PoolInstruction]:
        self.now += after
        return self._carry_out(self.pool.handle(event, self.now))

    def tick(self, after: float = 0.5) -> None:
        self.feed(Tick(), after)

    def _carry_out(self, instructions: list[PoolInstruction]) -> list[PoolInstruction]:
        kinds = [type(one) for one in instructions]
        assert PersistPool not in kinds or not {SendToNode, SendToJob} & set(kinds[: kinds.index(PersistPool)])
        for one in instructions:
            match one:
                case PersistPool(record):
                    self.stored = msgspec.json.encode(record)
                case EmitPool(event):
                    assert event.seq == len(self.events) + 1
                    self.events.append(event)
                case SendToNode(connection, NodeGrant() as grant):
                    self.node_told[connection] = grant
                case SendToJob(job, shares):
                    self.job_told[job] = shares
                case DisconnectNode(connection):
                    self.closed.append(connection)
                case SolveNextPlans(question):
                    self.question = question
                case _:
                    pass
        return instructions

    # ---- nodes ----

    def come(
        self,
        node: str,
        *,
        session: str = "",
        stands: NodeState | None = None,
        rack: str = "",
        passing: bool = False,
    ) -> None:
        """Connect a node; another session than before means another process of its agent."""
        self._last_connection += 1
        self.connections[node] = self._last_connection
        self.sessions[node] = session or self.sessions.get(node, "a")
        hello = PoolHello(
            node=node, session=self.sessions[node], stands=stands or NodeState(), rack=rack, passing=passing
        )
        self.feed(NodeMessage(self._last_connection, hello))

    def go(self, node: str) -> None:
        """Disconnect a node."""
        self.feed(NodeDisconnected(self.connections.pop(node)))

    def says(self, node: str, *, runs: int = 0, ended: int = 0, changes: int = 0) -> None:
        self.feed(NodeMessage(self.connections[node], NodeState(runs=runs, ended=ended, changes=changes)))

    def lives(self, seconds: float, *away: str) -> None:
        """Advance the time while all nodes but these send heartbeats."""
        for _ in range(int(seconds)):
            for node, connection in self.connections.items():
                if node not in away:
                    self.feed(NodeMessage(connection, NodeAlive()))
            self.tick(1.0)

    def whose(self, node: str) -> str:
        """Return the job that a node was last granted to."""
        return self.node_told[self.connections[node]].job

    # ---- jobs ----

    def submit(self, name: str, least: int = 1, most: int = 8, **keys: object) -> None:
        self.feed(SubmitJob(a_job(name, least, most, **keys)))  # pyright: ignore

    def stands(
        self,
        job: str,
        *,
        without: frozenset[str] | set[str] = frozenset(),
        standing: JobStanding = "going",
        why: str = "",
        taken: frozenset[str] | set[str] = frozenset(),
        waiting: frozenset[str] | set[str] = frozenset(),
        pace: JobPace | None = None,
        unfit: frozenset[str] | set[str] = frozenset(),
    ) -> None:
        """Make a job report that it has received all messages and holds its nodes, all of which train.

        It does not hold `without` and the nodes that it must return. taken: standbys that have become members.
        waiting: nodes that have become standbys. unfit: nodes that it refuses from now on, by its known grants.
        """
        told = self.job_told[job]
        refuses = self.refuses.setdefault(job, {})
        refuses.update({node: NodeUnfit(grant=told.grants[node], why="no script") for node in unfit})
        without = {*without, *unfit}
        held = {number for node, number in told.grants.items() if node not in without and number not in told.leaving}
        waits = {*told.standbys, *(told.grants[node] for node in waiting)} - {told.grants[node] for node in taken}
        stands = JobState(
            submission=told.submission,
            heard=told.version,
            held=frozenset(held),
            standbys=frozenset(waits & held),
            trains=frozenset(held - waits),
            standing=standing,
            why=why,
            pace=pace,
            refuses=dict(refuses),
        )
        self.feed(JobMessage(job, stands))

    def foresee(self) -> None:
        """Answer the last question about next plans."""
        assert self.question is not None
        assert self.feed(NextPlansSolved(self.question.number, self.question.solve())) == []

    @property
    def record(self) -> PoolRecord:
        assert self.stored
        return msgspec.json.decode(self.stored, type=PoolRecord)

    def nodes_of(self, job: str) -> set[str]:
        """Return the nodes that a job has by the record and will keep."""
        grants = self.record.grants.items()
        return {node for node, grant in grants if grant.job == job and not (grant.recalled or grant.standby)}

    def standbys_of(self, job: str) -> set[str]:
        """Return the standbys that a job has by the record and will keep."""
        grants = self.record.grants.items()
        return {node for node, grant in grants if grant.job == job and grant.standby and not grant.recalled}

    def leaving(self, job: str) -> set[str]:
        return {node for node, grant in self.record.grants.items() if grant.job == job and grant.recalled}

    def state_of(self, job: str) -> str:
        return self.record.jobs[job].state

    def of_kind(self, kind: type[E]) -> list[E]:
        return [event for event in self.events if isinstance(event, kind)]
