"""A recording of a pool's real run, and the simulator's prediction for the same trace.

The recording contains the failures of the nodes, their jobs at the start, and the jobs' steps and generations. From
these the simulation gets the time of a step with each number of nodes, the delay of a loss and of a planned change (the
first step after it, less a usual one), and the time until a node is detected as lost, has returned, and trains once it
is granted to a job. It computes the assignment of nodes after each change itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import fmean, median
from typing import Literal

from msgspec import Struct

from holdfast.planner.fleet.pool.divided_shares import DividedShares
from holdfast.planner.fleet.pool.outages import FleetTrace, Outage
from holdfast.planner.fleet.pool.shares import HitShares, NodeShares
from holdfast.planner.fleet.pool.systems import FixedTimes, LostTime, System
from holdfast.planner.fleet.pool.tasks import FleetTask
from holdfast.planner.fleet.pool.trace_run import PoolResult, PoolSimulation
from holdfast.planning.waf.pace import StepTimes

#: A node that is not granted to a job within this many seconds after its return was not needed.
_NEEDED_S = 20.0


class RealStep(Struct, frozen=True, array_like=True):
    """A committed step, or with negative samples a roll-back. Times are seconds from the start."""

    at: float
    step_s: float
    nodes: int
    samples: int
    generation: int


class RealGeneration(Struct, frozen=True, array_like=True):
    """A configuration of a job, from its event `generation_started`."""

    number: int
    at: float
    reason: str
    members: tuple[str, ...]


class RealJob(Struct, frozen=True, kw_only=True):
    """A job of the pool."""

    name: str
    weight: float
    #: Largest number of nodes.
    most: int
    #: Micro-batches per step.
    micro_batches: int
    #: Samples per step.
    samples: int
    flop_per_sample: float
    steps: tuple[RealStep, ...]
    generations: tuple[RealGeneration, ...]

    def samples_done(self, seconds: float) -> float:
        """Return the samples trained since the start; a step that crosses an end counts in part."""
        return sum(_share_inside(step, seconds) * step.samples for step in self.steps)

    def usual_step_s(self) -> dict[int, float]:
        """Return the median step by number of nodes, without the first step of each generation."""
        found: dict[int, list[float]] = {}
        for before, step in zip(self.steps, self.steps[1:], strict=False):
            if before.generation == step.generation and step.samples > 0:
                found.setdefault(step.nodes, []).append(step.step_s)
        return {nodes: median(seconds) for nodes, seconds in found.items()}


class NodeAssignment(Struct, frozen=True, array_like=True):
    """A node is granted to a job or released by it, according to the pool."""

    at: float
    node: str
    job: str
    what: Literal["granted", "released"]


class NodeChange(Struct, frozen=True, array_like=True):
    """A node is killed or started again."""

    at: float
    node: str
    what: Literal["lost", "back"]


class RealRun(Struct, frozen=True, kw_only=True):
    """The results of a pool under a policy."""

    policy: str
    #: Duration of the run.
    seconds: float
    nodes: tuple[str, ...]
    #: The job of each node at the start; nodes without a job are missing.
    first: dict[str, str]
    struck: tuple[NodeChange, ...]
    words: tuple[NodeAssignment, ...]
    jobs: tuple[RealJob, ...]

    @property
    def total(self) -> float:
        """Accumulated WAF: weighted FLOP of all jobs."""
        return sum(job.weight * job.flop_per_sample * job.samples_done(self.seconds) for job in self.jobs)


class Durations(Struct, frozen=True, kw_only=True):
    """Measured durations of a run, in seconds."""

    #: From a node's loss until its job reports it.
    seen: float
    #: The delay of the job by the loss, including `seen`.
    stop: float
    #: The delay of the job by a planned change.
    change: float
    #: From a node's start until it is granted to a job.
    back: float
    #: From the grant of a node until it trains.
    arrives: float

    @property
    def times(self) -> FixedTimes:
        """The durations in the form that the simulation needs."""
        loss = LostTime(self.seen, max(0.0, self.stop - self.seen))
        return FixedTimes(loss=loss, process=loss, changed_s=self.change, arrives_s=self.arrives)


def measure_durations(run: RealRun) -> Durations:
    """Return the durations of a run's changes."""
    stops: dict[bool, list[float]] = {True: [], False: []}
    for job in run.jobs:
        usual, started = job.usual_step_s(), {one.number: one for one in job.generations}
        for before, step in zip(job.steps, job.steps[1:], strict=False):
            generation = started.get(step.generation)
            if generation is None or before.generation == step.generation or generation.at < 0:
                continue
            if step.nodes in usual and generation.reason not in ("start", "rollback"):
                stops[generation.reason == "failure"].append(step.step_s - usual[step.nodes])
    lost, back = ([one for one in run.struck if one.what == what] for what in ("lost", "back"))
    granted = [word for word in run.words if word.what == "granted" and word.at >= 0]
    return Durations(
        seen=_mean(_first_after(run.words, one, "released") for one in lost),
        stop=max(0.0, _mean(stops[True])),
        change=max(0.0, _mean(stops[False])),
        back=_mean(_first_after(run.words, one, "granted") for one in back),
        arrives=_mean(_trains_after(run, word) for word in granted),
    )


def predict(run: RealRun, policy: str = "", measured: Durations | None = None) -> PoolResult:
    """Return the simulator's prediction for a run's trace.

    Args:
        policy: one of the pool's policies or `hit-only`; "" for the policy of the run.
    """
    found = measured or measure_durations(run)
    name = policy or run.policy
    system = System(name=name, shares="hit" if name == "hit-only" else "pool", policy=name, times=found.times)
    tasks = [_task(job, len(run.nodes)) for job in run.jobs]
    return PoolSimulation(system, _trace(run, found.back), _shares(run, system, tasks), tasks).run()


def _shares(run: RealRun, system: System, tasks: Sequence[FleetTask]) -> NodeShares:
    if system.shares == "hit":
        return HitShares(tasks, run.first, [node for node in run.nodes if node not in run.first])
    return DividedShares(system.policy, tasks, run.nodes, system.times.change_s, first=run.first)


def _task(job: RealJob, nodes: int) -> FleetTask:
    flop = job.samples * job.flop_per_sample
    times = StepTimes(step_s=job.usual_step_s(), micro_batches=job.micro_batches, workers=1, flop=flop)
    step_s = tuple((flop / times.throughput(nodes)[1:]).tolist())
    return FleetTask(name=job.name, step_s=step_s, flop=flop, weight=job.weight, most=job.most)


def _trace(run: RealRun, back_s: float) -> FleetTrace:
    outages = [Outage(at=one.at + back_s * (one.what == "back"), node=one.node, what=one.what) for one in run.struck]
    outages = sorted((one for one in outages if one.at < run.seconds), key=lambda one: one.at)
    return FleetTrace(name="recorded", nodes=run.nodes, outages=tuple(outages), seconds=run.seconds)


def _share_inside(step: RealStep, seconds: float) -> float:
    """Return the share of a step between the start and the end of the run."""
    if not step.step_s:
        return float(0 <= step.at < seconds)
    begun = step.at - step.step_s
    return max(0.0, min(step.at, seconds) - max(begun, 0.0)) / step.step_s


def _first_after(words: Sequence[NodeAssignment], struck: NodeChange, what: str) -> float | None:
    later = (word.at - struck.at for word in words if word.node == struck.node and word.what == what)
    return min((after for after in later if 0 <= after <= _NEEDED_S), default=None)


def _trains_after(run: RealRun, granted: NodeAssignment) -> float | None:
    """Return the seconds from a node's grant until it trains in its job."""
    job = next((job for job in run.jobs if job.name == granted.job), None)
    later = (one.at - granted.at for one in (job.generations if job else ()) if granted.node in one.members)
    return min((after for after in later if 0 <= after <= _NEEDED_S), default=None)


def _mean(found: Iterable[float | None]) -> float:
    known = [one for one in found if one is not None]
    return fmean(known) if known else 0.0
