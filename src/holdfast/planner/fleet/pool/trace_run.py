"""Simulate a pool's jobs on a trace: the weighted FLOP that they achieve, in total and over time."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from holdfast.planner.fleet.pool.outages import FleetTrace, Outage
from holdfast.planner.fleet.pool.shares import NodeShares
from holdfast.planner.fleet.pool.systems import System
from holdfast.planner.fleet.pool.tasks import FleetTask
from holdfast.planner.fleet.timeline import FIRST, URGENT, Timeline


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolResult:
    """The result of one run."""

    #: weighted FLOP, by job
    achieved: Mapping[str, float]
    #: (seconds, weighted FLOP/s of all jobs from then on)
    steps: tuple[tuple[float, float], ...]
    #: seconds that each job was stopped although it had enough nodes
    stopped_s: Mapping[str, float]
    #: seconds that each job was stopped for lack of nodes
    short_s: Mapping[str, float]
    #: failures that struck a job
    hits: int

    @property
    def total(self) -> float:
        """Accumulated WAF: weighted FLOP of all jobs."""
        return sum(self.achieved.values())


@dataclass(slots=True)
class SimulatedJob:
    """The state of one job during a run."""

    task: FleetTask
    #: nodes that it trains on
    size: int
    #: nodes at the start
    full: int
    #: nodes that it was given, but that do not train yet
    coming: int = 0
    #: time at which training continues, in seconds
    stopped_until: float = 0.0
    #: weighted FLOP/s since `since`
    rate: float = 0.0
    since: float = 0.0
    achieved: float = 0.0
    stopped_s: float = 0.0
    short_s: float = 0.0
    #: whether it has enough nodes
    enough: bool = True


@dataclass(slots=True)
class PoolSimulation:
    """One run of one system."""

    system: System
    trace: FleetTrace
    shares: NodeShares
    tasks: Sequence[FleetTask]
    _timeline: Timeline = field(default_factory=Timeline)
    _jobs: dict[str, SimulatedJob] = field(default_factory=dict[str, SimulatedJob])
    _steps: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])
    #: lost nodes that the system has not noticed yet
    _unseen: set[str] = field(default_factory=set[str])
    _hits: int = 0

    def run(self) -> PoolResult:
        """Simulate the trace to its end. Return for each job its work and the seconds stopped or short of nodes.

        The result also has the total throughput over time, and the number of failures that hit jobs.
        """
        timeline, end = self._timeline, self.trace.seconds
        for task in self.tasks:
            size = self.shares.size_of(task.name)
            self._jobs[task.name] = SimulatedJob(task, size, size)
        self._update_throughput(self._jobs)
        for outage in self.trace.outages:
            timeline.at(outage.at, self._on_outage, outage, priority=URGENT)
        # Later events are ignored: a job that is stopped beyond the end achieves nothing until then.
        timeline.at(end, self._update_throughput, self._jobs, priority=FIRST)
        while timeline.now < end and timeline.step():
            pass
        return PoolResult(
            achieved={name: job.achieved for name, job in self._jobs.items()},
            steps=tuple(self._steps),
            stopped_s={name: job.stopped_s for name, job in self._jobs.items()},
            short_s={name: job.short_s for name, job in self._jobs.items()},
            hits=self._hits,
        )

    # ---- events ----

    def _on_outage(self, outage: Outage) -> None:
        """Handle an event of the trace: a node is back, its job's processes fail ("fault"), or the node is lost.

        A fault stops the job on the node if it can train. A lost node stops its job in any case, and is removed from
        the shares when the system has noticed the loss. A returned node is added to the shares.
        """
        if outage.what == "back":
            self._on_loss_noticed(outage.node)
            self._apply_allocation(self.shares.add_node(outage.node, self._timeline.now))
            return
        owner = self.shares.owner_of(outage.node)
        job = self._jobs[owner] if owner is not None else None
        if outage.what == "fault":
            if job is not None and self._can_train(job):
                self._hits += 1
                stop = self.system.times.fault_cost(job.size, outage.marks)
                self._stop_job(job, stop.seen_s + stop.resume_s)
            return
        seen_s = 0.0
        if job is not None:
            self._hits += 1
            stop = self.system.times.loss_cost(job.size, outage.marks)
            seen_s = stop.seen_s
            self._stop_job(job, stop.seen_s + stop.resume_s)
        self._unseen.add(outage.node)
        self._timeline.after(seen_s, self._on_loss_noticed, outage.node)

    def _on_loss_noticed(self, node: str) -> None:
        """Remove a lost node from the shares, and apply the new allocation: its job loses the node, or gets a spare.

        Nothing happens for a node that is not lost, or whose loss was noticed before.
        """
        if node not in self._unseen:
            return
        self._unseen.discard(node)
        owner = self.shares.owner_of(node)
        self._apply_allocation(self.shares.remove_node(node, self._timeline.now), hit=owner)

    def _apply_allocation(self, changed: Iterable[str], hit: str | None = None) -> None:
        """Apply the allocations of the `changed` jobs. `hit` is the job that lost the node, if a loss is the cause.

        A job that loses nodes by a plan stops for a change at once. A job that gains nodes stops when they arrive. In
        systems that do not plan, a spare replaces the node as part of the recovery, without another stop.
        """
        names = sorted(changed)
        for name in names:
            job, struck = self._jobs[name], name == hit
            if struck:
                job.size, job.coming = (job.size - 1, job.coming) if job.size else (0, max(0, job.coming - 1))
            more = self.shares.size_of(name) - job.size - job.coming
            if struck and self.system.shares != "pool":
                job.size += more  # A spare replaces the node as part of the recovery.
            elif more < 0:
                leave = min(job.size, -more)
                job.size, job.coming = job.size - leave, job.coming + more + leave
                self._stop_for_change(job, also=struck)
            elif more > 0:
                job.coming += more
                if self.system.times.arrives_s:
                    self._timeline.after(self.system.times.arrives_s, self._add_arrived_nodes, name, more)
                else:
                    self._add_arrived_nodes(name, more, also=struck)
        self._update_throughput(names)

    def _add_arrived_nodes(self, name: str, nodes: int, *, also: bool = False) -> None:
        """Add nodes that have arrived to a job, at most as many as are still on their way, and stop it for the change.

        With `also`, this stop follows the one under way.
        """
        job = self._jobs[name]
        nodes = min(nodes, job.coming)
        if nodes:
            job.size, job.coming = job.size + nodes, job.coming - nodes
            self._stop_for_change(job, also=also)

    def _stop_for_change(self, job: SimulatedJob, *, also: bool) -> None:
        """Stop a job for a planned change; do nothing for a job without nodes.

        With `also`, the change begins when the present stop ends, otherwise now, in parallel with it.
        """
        if job.size:
            already_s = max(0.0, job.stopped_until - self._timeline.now) if also else 0.0
            self._stop_job(job, already_s + self.system.times.change_s(job.size))

    # ---- throughput ----

    def _stop_job(self, job: SimulatedJob, seconds: float) -> None:
        """Stop a job for this many seconds from now, or until a present stop ends if later. Then it trains again."""
        job.stopped_until = max(job.stopped_until, self._timeline.now + seconds)
        self._update_throughput((job.task.name,))
        self._timeline.at(job.stopped_until, self._update_throughput, (job.task.name,))

    def _can_train(self, job: SimulatedJob) -> bool:
        return job.task.waf(job.size) > 0 and (self.system.shares != "waits" or job.size >= job.full)

    def _update_throughput(self, names: Collection[str]) -> None:
        """Count the jobs' work, and time stopped or short of nodes, up to now. Then set their present throughput.

        It is 0 while a job is stopped or short. A changed total of all jobs is recorded as a step.
        """
        now = self._timeline.now
        for name in names:
            job = self._jobs[name]
            passed = now - job.since
            job.achieved += job.rate * passed
            if not job.enough:
                job.short_s += passed
            elif not job.rate:
                job.stopped_s += passed
            job.since, job.enough = now, self._can_train(job)
            goes = job.enough and now >= job.stopped_until
            job.rate = self.system.efficiency * job.task.waf(job.size) if goes else 0.0
        rate = sum(job.rate for job in self._jobs.values())
        if not self._steps or self._steps[-1][1] != rate:
            self._steps.append((now, rate))
