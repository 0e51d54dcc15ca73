"""The speed of each job by its number of nodes, measured and fitted (`planning.waf`), as plans use it.

A plan is made when nodes or jobs come and go. Most measurements do not change it: otherwise two similar jobs would
exchange a node after every measurement. Exceptions are the first measurement of a job, and one that differs by a
quarter.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from msgspec.structs import replace

from holdfast.coordination.pool.plans.remeasuring import Remeasurements
from holdfast.coordination.pool.state import PoolState
from holdfast.planning.waf.pace import StepTimes
from holdfast.planning.waf.survival import lost_with_all, lost_with_experts
from holdfast.protocol.job_spec import LEAST_STEP_S, MOST, JobSpec
from holdfast.protocol.layouts.layout import WHOLE, Layout
from holdfast.protocol.layouts.layout_list import MAX_LAYOUTS, Layouts, ListedLayout, places_by_nodes
from holdfast.protocol.pool.record import PooledJob
from holdfast.protocol.pool.sharing import JobPace

#: failures of a node per second; seconds until lost copies exist again; seconds that a roll-back costs
FailureRisk = tuple[float, float, float]
#: relative difference of a step time from which a new plan is made
_OFF_BY = 0.25
#: longest plausible step, seconds
_LONGEST_STEP_S = 1e9


def round_up_nodes(nodes: int) -> int:
    """Return the largest number of nodes of a table; rounded up, so that few different tables are needed."""
    return 1 << (nodes + 1).bit_length()


def declared_pace(spec: JobSpec) -> JobPace | None:
    """Return the pace that the job's own specification declares, or None if it declares no step times."""
    if not spec.pace.known:
        return None
    return JobPace(
        step_s=spec.pace.known,
        micro_batches=spec.pace.micro_batches,
        samples=spec.pace.samples,
        workers=spec.workers_per_node,
        flop_per_sample=spec.output.flop_per_sample,
        layouts=_layouts_with_places(spec.pace.places),
    )


def _layouts_with_places(places: Sequence[int]) -> Layouts:
    """Return layouts with `places[i]` local ranks for `i + 1` nodes, one for each change of that number, at most
    `MAX_LAYOUTS`.

    All are sharded: plans ignore by which dimension. Empty if the number is always 1.
    """
    before = (1, *places)
    new = [nodes for nodes, count in enumerate(places, 1) if count != before[nodes - 1]]
    found = [ListedLayout(layout=Layout(shard=places[nodes - 1]), nodes=nodes) for nodes in new]
    first = [ListedLayout(layout=WHOLE, nodes=1)] if found and new[0] > 1 else []
    return (*first, *found)[:MAX_LAYOUTS]


def merge_pace(before: JobPace | None, now: JobPace, reported: JobPace | None) -> JobPace:
    """Return all measurements of a job: the newest for each number of nodes.

    Measurements under another layout are dropped. Older measurements of other sizes are scaled: if steps of one size
    take k times as long now, so do steps of the other sizes. Otherwise a job that is slow for a while would seem faster
    with other numbers of nodes, and would try them one after the other.

    Args:
        before: all measurements so far
        now: the job's newest report
        reported: the job's previous report, or None if unknown
    """
    if before is None or _step_shape(before) != _step_shape(now):
        return now
    news = {
        size: seconds
        for size, seconds in now.step_s.items()
        if reported is None or reported.step_s.get(size) != seconds
    }
    times = [seconds / before.step_s[size] for size, seconds in news.items() if seconds and before.step_s.get(size)]
    as_long = median(times) if times else 1.0
    then, here = places_by_nodes(before.layouts), places_by_nodes(now.layouts)
    alike = {
        size: seconds for size, seconds in before.step_s.items() if _places_at(then, size) == _places_at(here, size)
    }
    others = {size: min(seconds * as_long, _LONGEST_STEP_S) for size, seconds in alike.items()}
    return replace(now, step_s={**others, **news})


def _places_at(places: Sequence[int], nodes: int) -> int:
    """Return the local ranks of a model replica with this many nodes."""
    return places[min(nodes, len(places)) - 1] if places else 1


def _step_shape(pace: JobPace) -> tuple[int, int, int]:
    """Return micro-batches, samples and workers: paces are comparable if these are equal."""
    return pace.micro_batches, pace.samples, pace.workers


class Paces:
    """The paces with which the current plan was made."""

    def __init__(self, state: PoolState) -> None:
        self._state = state
        self._planned: dict[str, JobPace] = {}
        self._remeasurements = Remeasurements(state, _compute_throughput)
        #: by job, a pace and its FLOP/s by number of nodes
        self._achieved: dict[str, tuple[JobPace, tuple[float, ...]]] = {}
        #: by job, inputs and result of `lost_share`
        self._lost: dict[str, tuple[object, tuple[float, ...]]] = {}

    def refresh(self, *, force: bool) -> bool:
        """Forget measurements that are due to be repeated. Then use the newest ones for plans, if there is a reason.

        The reasons are `force`, a measurement that was forgotten, and one that differs too much from the used one.
        Return whether one of the latter two holds.
        """
        again = self._remeasurements.forget_due()
        known = {job.name: job.pace for job in self._state.jobs.values() if job.pace is not None}
        off = again or any(_is_off(self._planned.get(name), pace) for name, pace in known.items())
        if force or off:
            self._planned = known
            self._achieved = {name: kept for name, kept in self._achieved.items() if name in known}
            self._lost = {name: kept for name, kept in self._lost.items() if name in self._state.jobs}
        return off

    def achieved_flops(self, job: PooledJob, nodes: int) -> tuple[float, ...]:
        """Return FLOP/s with 0, 1, ... nodes, or samples/s if the FLOP of a sample are unknown; () if not measured.

        Entries go beyond `nodes`. Cached.
        """
        pace, room = self._pace_of(job), round_up_nodes(nodes)
        if pace is None or not _measured_steps(pace):
            return ()
        known = self._achieved.get(job.name)
        if known is None or known[0] != pace or len(known[1]) != room + 1:
            known = pace, _compute_throughput(pace, room)
            if self._is_in_pool(job):
                self._achieved[job.name] = known
        return known[1]

    def lost_share(self, job: PooledJob, nodes: int, danger: FailureRisk) -> tuple[float, ...]:
        """Return the share of a job's time that roll-backs cost, with 0, 1, ... nodes; entries go beyond `nodes`.

        With experts, the loss of all copies of one counts. Cached.

        Args:
            danger: Failures of a node per second, seconds until a lost copy is restored, and seconds that a roll-back
                costs.
        """
        pace, room = self._pace_of(job), round_up_nodes(nodes)
        shape = (min(pace.experts, MOST), min(pace.slots, MOST)) if pace is not None else (0, 0)
        known = self._lost.get(job.name)
        if known is None or known[0] != (shape, room, danger):
            rate, exposed_s, lost_s = danger
            if all(shape):
                share = lost_with_experts(room, rate, exposed_s, lost_s, experts=shape[0], slots=shape[1])
            else:
                share = lost_with_all(room, rate, exposed_s, lost_s)
            known = (shape, room, danger), tuple(share.tolist())
            if self._is_in_pool(job):
                self._lost[job.name] = known
        return known[1]

    def is_in_flop(self, job: PooledJob) -> bool:
        """Return whether `achieved_flops` is in FLOP/s."""
        pace = self._pace_of(job)
        return pace is not None and pace.flop_per_sample > 0

    def _pace_of(self, job: PooledJob) -> JobPace | None:
        """Return the pace that counts for a plan; for a job that is not in the pool, its own pace."""
        return self._planned.get(job.name) if self._is_in_pool(job) else job.pace

    def _is_in_pool(self, job: PooledJob) -> bool:
        """Return whether this very job is in the pool, and not another of that name."""
        known = self._state.jobs.get(job.name)
        return known is not None and known.submission == job.submission


def _is_off(taken: JobPace | None, known: JobPace) -> bool:
    """Return whether a known pace differs too much from the taken one, with which the plan was made: in a step time,
    the layouts or FLOP, or in a size that was not measured then.

    If `taken` is None, each measured pace does. A pace without step times never differs.
    """
    if taken is known:  # Fast path: this runs after every message, and the pace seldom changes.
        return False
    if taken is None or (*_step_shape(taken), taken.flop_per_sample) != (*_step_shape(known), known.flop_per_sample):
        return bool(known.step_s)
    return any(
        nodes not in taken.step_s or abs(seconds - taken.step_s[nodes]) > _OFF_BY * taken.step_s[nodes]
        for nodes, seconds in known.step_s.items()
    )


def _measured_steps(pace: JobPace) -> dict[int, float]:
    """Return the plausible step times of a pace: jobs report them, and a plan must not fail because of one."""
    return {size: seconds for size, seconds in pace.step_s.items() if seconds >= LEAST_STEP_S}


def _compute_throughput(pace: JobPace, nodes: int) -> tuple[float, ...]:
    """Return FLOP/s with 0, 1, ..., `nodes` nodes."""
    times = StepTimes(
        step_s=_measured_steps(pace),
        micro_batches=min(max(1, pace.micro_batches), MOST),
        workers=min(max(1, pace.workers), MOST),
        flop=min(max(1, pace.samples), MOST) * (pace.flop_per_sample or 1.0),
        places=places_by_nodes(pace.layouts),
    )
    return tuple(times.throughput(nodes).tolist())
