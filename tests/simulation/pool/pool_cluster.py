"""A complete simulated pool: server, jobs, nodes, users and faults."""

from __future__ import annotations

from collections.abc import Collection

from holdfast.coordination.pool.inputs import (
    DrainNodes,
    MoveJobs,
    PoolRequest,
    ResumeJob,
    StopPooled,
    SubmitJob,
    SuspendJob,
    UndrainNodes,
    UpdateJob,
)
from holdfast.coordination.pool.node_selection.compacting import RACK_WORTH_S, compact
from holdfast.coordination.pool.node_selection.moving import build_occupancy
from holdfast.coordination.pool.share.achieving import Waf
from holdfast.coordination.pool.share.policies import POLICIES
from holdfast.coordination.pool.state import PoolConfig
from holdfast.protocol.pool.grants import Held
from holdfast.protocol.pool.record import OVER, PooledJob
from tests.simulation.pool.pool_around import CoordinatorSeen, PoolParts
from tests.simulation.pool.pool_checker import PoolChecker
from tests.simulation.pool.pool_job import SimJobCoordinator
from tests.simulation.pool.pool_node import JOBS, POOL, SimPoolNode
from tests.simulation.pool.pool_plans import QUIET_S, PlannedJob, PoolFault, PoolFaultKind, PoolPlan
from tests.simulation.pool.pool_server import SimPoolServer
from tests.simulation.pool.pool_world import BEGIN, JobDisk, LineEnd, PoolWorld

#: The time within which all jobs must end after the last fault.
MOST_S = 4000.0


class PoolCluster:
    """One run of a pool."""

    def __init__(self, plan: PoolPlan, parts: PoolParts | None = None) -> None:
        self.plan = plan
        self.parts = parts or PoolParts()
        self.world = PoolWorld(plan)
        policy = Waf(starves=True) if plan.starves else POLICIES[plan.policy]
        self.config = PoolConfig(name="pool", policy=policy, reserve=plan.reserve, expected=plan.nodes)
        self.checker = PoolChecker(self)
        self.server: SimPoolServer | None = None
        self.nodes: dict[str, SimPoolNode] = {}
        self.coordinators: dict[tuple[str, int], SimJobCoordinator] = {}
        self._lives = 0
        self._closed: set[tuple[str, int]] = set()
        self._submitted: set[str] = set()
        self._refused: set[str] = set()
        self._planned = {job.spec.name: job for job in plan.jobs}

    def run(self) -> None:
        """Run the schedule to its end.

        Raises:
            InvariantError: An invariant is violated.
        """
        timeline, plan = self.world.timeline, self.plan
        self._start_server()
        for number in range(1, plan.nodes + 1):
            self.world.later(0.0, 3.0, self._start_node, f"n{number}")
        for job in plan.jobs:
            timeline.at(BEGIN + job.at, self._submit, job)
            for visit in job.visits:
                timeline.at(BEGIN + visit.at, self._visit, job.spec.name, visit.what)
        for fault in plan.faults:
            timeline.at(BEGIN + fault.at, self._strike, fault)
        timeline.at(BEGIN + QUIET_S, self._calm)
        while not self._over and timeline.now < BEGIN + QUIET_S + MOST_S and timeline.step():
            self.checker.after_event()
        self.checker.at_the_end()

    @property
    def _over(self) -> bool:
        record = self.world.disk.record
        if not self.world.quiet or record is None or record.grants:
            return False
        busy = any(node.processes for node in self.nodes.values())
        all_in = len(self._submitted) == len(self.plan.jobs)
        return all_in and not busy and all(job.state in OVER for job in record.jobs.values())

    def work_s(self, job: str) -> float:
        """Return the amount of work of a job."""
        return self._planned[job].work_s

    def unfit(self, job: str) -> Collection[str]:
        """Return the nodes that are unfit for a job."""
        return self._planned[job].unfit

    # ---- processes ----

    def _start_server(self) -> None:
        if self.server is None:
            self.world.note("a server starts")
            self.server = SimPoolServer(self)
            self.server.start()

    def server_died(self, server: LineEnd) -> None:
        """Start another server after one has died; coordinators in its process die with it."""
        if self.server is not server:
            return
        self.server = None
        if self.plan.together:
            for key in list(self.coordinators):
                self.coordinators.pop(key).die()
        self.world.later(0.2, 5.0, self._start_server)

    def start_coordinator(self, job: PooledJob) -> None:
        """Start a coordinator for a job, if it has none."""
        key = (job.name, job.submission)
        self._closed.discard(key)
        if key not in self.coordinators:
            disk = self.world.job_disks.get(key)
            if disk is None:
                disk = self.world.job_disks[key] = JobDisk(job.spec, Held(submission=job.submission))
            self.coordinators[key] = SimJobCoordinator(self, job.name, job.submission, disk)

    def stop_coordinator(self, job: str, submission: int) -> None:
        """Stop the coordinator of a job that needs none."""
        self._closed.add((job, submission))
        coordinator = self.coordinators.pop((job, submission), None)
        if coordinator is not None:
            coordinator.die()

    def job_died(self, job: CoordinatorSeen) -> None:
        """Restart a job's coordinator after it has died alone."""
        key = (job.name, job.submission)
        if self.coordinators.get(key) is job:
            del self.coordinators[key]
            self.world.later(0.1, 3.0, self._again, key)

    def _again(self, key: tuple[str, int]) -> None:
        server_has_it = self.server is not None or not self.plan.together
        if key not in self.coordinators and key not in self._closed and server_has_it:
            self.coordinators[key] = SimJobCoordinator(self, *key, self.world.job_disks[key])

    def _start_node(self, name: str) -> None:
        if name not in self.nodes:
            self._lives += 1
            self.world.note(f"{name} starts")
            self.nodes[name] = SimPoolNode(self, name, self._lives)

    # ---- users ----

    def _submit(self, job: PlannedJob) -> None:
        if self.server is None:
            self.world.later(0.5, 1.0, self._submit, job)
            return
        refusal = self.server.feed(SubmitJob(job.spec))
        record = self.world.disk.record
        if record is None or job.spec.name not in record.jobs:
            assert not refusal or self.server is None, refusal
            self.world.later(0.5, 1.0, self._submit, job)  # The server died before its write.
            return
        self._submitted.add(job.spec.name)

    def _visit(self, job: str, what: str) -> None:
        if what == "move":
            for (name, _), coordinator in list(self.coordinators.items()):
                if name == job:
                    coordinator.move()
            return
        if what == "compact":
            if self.server is not None:
                found = compact(build_occupancy(self.server.pool.state), RACK_WORTH_S)
                self.world.note(f"a user requests {found.moves}")
                self.server.feed(MoveJobs(found.moves))
            return
        requests: dict[str, PoolRequest] = {
            "suspend": SuspendJob(job),
            "resume": ResumeJob(job),
            "stop": StopPooled(job),
            "stop_now": StopPooled(job, now=True),
            "weight": UpdateJob(job, {"weight": self.world.rng.uniform(0.5, 2.0)}),
        }
        if self.server is not None:
            refusal = self.server.feed(requests[what])
            self.world.note(f"{what} {job}: {refusal or 'done'}")

    # ---- faults ----

    def _strike(self, fault: PoolFault) -> None:
        if self.world.quiet:
            return
        names = sorted(self.nodes)
        jobs = sorted(self.coordinators)
        node = names[fault.who % len(names)] if names else ""
        job = jobs[fault.who % len(jobs)] if jobs else None
        self.world.note(f"{fault.kind} strikes {node if 'node' in fault.kind else job or ''} for {fault.lasts_s:.1f} s")
        match fault.kind:
            case PoolFaultKind.NODE_DIES if node:
                self.nodes.pop(node).die()
                self.world.timeline.after(fault.lasts_s, self._start_node, node)
            case PoolFaultKind.NODE_CUT_FROM_POOL if node:
                self._cut(node, POOL, fault.lasts_s)
            case PoolFaultKind.NODE_CUT_FROM_JOBS if node:
                self._cut(node, JOBS, fault.lasts_s)
            case PoolFaultKind.NODE_DRAINED if node and self.server is not None:
                self.server.feed(DrainNodes((node,)))
                self.world.timeline.after(fault.lasts_s, self._undrain, node)
            case PoolFaultKind.JOB_CUT_FROM_POOL if job:
                self._cut(job[0], POOL, fault.lasts_s)
            case PoolFaultKind.JOB_DIES if job:
                coordinator = self.coordinators[job]
                coordinator.die()
                self.job_died(coordinator)
            case PoolFaultKind.SERVER_DIES if self.server is not None:
                self.server.die()
            case PoolFaultKind.SERVER_USURPED if self.server is not None:
                # The old server still believes that it is active.
                before, self.server = self.server, None
                self.world.timeline.after(fault.lasts_s, before.die)
                self._start_server()
            case _:
                pass

    def _undrain(self, node: str) -> None:
        """Undrain a node; repeat until the record shows it."""
        record = self.world.disk.record
        if record is not None and node in record.nodes and record.nodes[node].drained:
            if self.server is not None:
                self.server.feed(UndrainNodes((node,)))
            self.world.later(0.5, 1.0, self._undrain, node)

    def _cut(self, one: str, other: str, lasts_s: float) -> None:
        self.world.block(one, other)
        self.world.timeline.after(lasts_s, self.world.block, one, other, -1)

    def _calm(self) -> None:
        """Stop all faults and resume suspended jobs."""
        self.world.quiet = True
        self._resume_all()

    def _resume_all(self) -> None:
        record = self.world.disk.record
        for job in record.jobs.values() if record is not None else ():
            if self.server is not None and (
                job.state == "suspended" or (job.state == "suspending" and not job.preempted)
            ):
                self.server.feed(ResumeJob(job.name))
        if self.world.now < BEGIN + QUIET_S + 60.0:
            self.world.timeline.after(5.0, self._resume_all)
