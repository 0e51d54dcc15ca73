"""A pool's jobs live through a trace: what they achieve, weighted, in all and over time."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from holdfast.planner.fleet.pool.outages import FleetTrace, Outage
from holdfast.planner.fleet.pool.shares import NodeShares
from holdfast.planner.fleet.pool.systems import System
from holdfast.planner.fleet.pool.tasks import FleetTask
from holdfast.planner.fleet.timeline import FIRST, URGENT, Timeline


@dataclass(frozen=True, kw_only=True, slots=True)
class Lived:
    """What came of it.

    achieved: weighted FLOP by job. steps: weighted FLOP/s of all from a time on, in seconds. stopped_s: for how long
    each job did nothing though it had nodes enough; short_s: because it had not. hits: failures that struck a job.
    """

    achieved: Mapping[str, float]
    steps: tuple[tuple[float, float], ...]
    stopped_s: Mapping[str, float]
    short_s: Mapping[str, float]
    hits: int

    @property
    def total(self) -> float:
        """Accumulated WAF: weighted FLOP of all jobs."""
        return sum(self.achieved.values())


@dataclass(slots=True)
class LivingTask:
    """One job as it lives: with so many nodes and others still to come, doing nothing until a time."""

    task: FleetTask
    size: int
    full: int
    coming: int = 0
    stopped_until: float = 0.0
    rate: float = 0.0
    since: float = 0.0
    achieved: float = 0.0
    stopped_s: float = 0.0
    short_s: float = 0.0
    enough: bool = True


@dataclass(slots=True)
class Months:
    """One run of one system."""

    system: System
    trace: FleetTrace
    shares: NodeShares
    tasks: Sequence[FleetTask]
    _timeline: Timeline = field(default_factory=Timeline)
    _jobs: dict[str, LivingTask] = field(default_factory=dict[str, LivingTask])
    _steps: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])
    #: nodes that are lost, and not seen to be
    _unseen: set[str] = field(default_factory=set[str])
    _hits: int = 0

    def run(self) -> Lived:
        """Live through the trace."""
        timeline, end = self._timeline, self.trace.seconds
        for task in self.tasks:
            size = self.shares.size(task.name)
            self._jobs[task.name] = LivingTask(task, size, size)
        self._reckon(self._jobs)
        for outage in self.trace.outages:
            timeline.at(outage.at, self._strike, outage, priority=URGENT)
        # (nothing that comes later is looked at: whoever is stopped beyond the end achieves nothing until then)
        timeline.at(end, self._reckon, self._jobs, priority=FIRST)
        while timeline.now < end and timeline.step():
            pass
        return Lived(
            achieved={name: job.achieved for name, job in self._jobs.items()},
            steps=tuple(self._steps),
            stopped_s={name: job.stopped_s for name, job in self._jobs.items()},
            short_s={name: job.short_s for name, job in self._jobs.items()},
            hits=self._hits,
        )

    # ---- what happens ----

    def _strike(self, outage: Outage) -> None:
        if outage.what == "back":
            self._see(outage.node)
            self._apply(self.shares.back(outage.node, self._timeline.now))
            return
        owner = self.shares.owner(outage.node)
        job = self._jobs[owner] if owner is not None else None
        if outage.what == "fault":
            if job is not None and self._could_train(job):
                self._hits += 1
                stop = self.system.times.fault(job.size, outage.marks)
                self._stop(job, stop.seen_s + stop.resume_s)
            return
        seen_s = 0.0
        if job is not None:
            self._hits += 1
            stop = self.system.times.lost(job.size, outage.marks)
            seen_s = stop.seen_s
            self._stop(job, stop.seen_s + stop.resume_s)
        self._unseen.add(outage.node)
        self._timeline.after(seen_s, self._see, outage.node)

    def _see(self, node: str) -> None:
        """A node is seen to be lost: its job goes on without it, and a plan may follow."""
        if node not in self._unseen:
            return
        self._unseen.discard(node)
        owner = self.shares.owner(node)
        self._apply(self.shares.lose(node, self._timeline.now), hit=owner)

    def _apply(self, changed: Iterable[str], hit: str | None = None) -> None:
        """Jobs have other nodes: whoever has fewer by a plan stops for a change, who has more once these arrive."""
        names = sorted(changed)
        for name in names:
            job, struck = self._jobs[name], name == hit
            if struck:
                job.size, job.coming = (job.size - 1, job.coming) if job.size else (0, max(0, job.coming - 1))
            more = self.shares.size(name) - job.size - job.coming
            if struck and self.system.shares != "pool":
                job.size += more  # (a spare takes the place: that is part of the recovery)
            elif more < 0:
                leave = min(job.size, -more)
                job.size, job.coming = job.size - leave, job.coming + more + leave
                self._change(job, also=struck)
            elif more > 0:
                job.coming += more
                if self.system.times.arrives_s:
                    self._timeline.after(self.system.times.arrives_s, self._arrive, name, more)
                else:
                    self._arrive(name, more, also=struck)
        self._reckon(names)

    def _arrive(self, name: str, nodes: int, *, also: bool = False) -> None:
        """Nodes that a job was given train in it, those of them that are still to come."""
        job = self._jobs[name]
        nodes = min(nodes, job.coming)
        if nodes:
            job.size, job.coming = job.size + nodes, job.coming - nodes
            self._change(job, also=also)

    def _change(self, job: LivingTask, *, also: bool) -> None:
        """A job stops for a planned change; `also`: after what it stops for already."""
        if job.size:
            already_s = max(0.0, job.stopped_until - self._timeline.now) if also else 0.0
            self._stop(job, already_s + self.system.times.change_s(job.size))

    # ---- what is achieved ----

    def _stop(self, job: LivingTask, seconds: float) -> None:
        job.stopped_until = max(job.stopped_until, self._timeline.now + seconds)
        self._reckon((job.task.name,))
        self._timeline.at(job.stopped_until, self._reckon, (job.task.name,))

    def _could_train(self, job: LivingTask) -> bool:
        return job.task.waf(job.size) > 0 and (self.system.shares != "waits" or job.size >= job.full)

    def _reckon(self, names: Collection[str]) -> None:
        """Count what jobs have achieved, and how fast they go from here on."""
        now = self._timeline.now
        for name in names:
            job = self._jobs[name]
            passed = now - job.since
            job.achieved += job.rate * passed
            if not job.enough:
                job.short_s += passed
            elif not job.rate:
                job.stopped_s += passed
            job.since, job.enough = now, self._could_train(job)
            goes = job.enough and now >= job.stopped_until
            job.rate = self.system.efficiency * job.task.waf(job.size) if goes else 0.0
        rate = sum(job.rate for job in self._jobs.values())
        if not self._steps or self._steps[-1][1] != rate:
            self._steps.append((now, rate))
