"""How fast each job trains with how many nodes, as the plan takes it: what was measured, and fitted (`planning.waf`).

A plan is made when nodes or jobs come and go. What was measured since changes none of itself, or two jobs alike would
hand a node to and fro with every measurement; but a job that was seen for the first time, or is off by a quarter, does.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from msgspec.structs import replace

from holdfast.coordination.pool.plans.trying_again import TryingAgain
from holdfast.coordination.pool.state import PoolState
from holdfast.planning.waf.pace import StepTimes
from holdfast.planning.waf.survival import lost_with_all, lost_with_experts
from holdfast.protocol.job_spec import LEAST_STEP_S, MOST, JobSpec
from holdfast.protocol.layouts.layout import WHOLE, Layout
from holdfast.protocol.layouts.several import MAX_LAYOUTS, Layouts, ListedLayout, places_by_nodes
from holdfast.protocol.pool.record import PooledJob
from holdfast.protocol.pool.sharing import JobPace

#: how often a node fails, per second; how long until its copies are there again; what going back costs, seconds
Danger = tuple[float, float, float]
#: a plan is made anew once a step takes so much more or less than it was made with
_OFF_BY = 0.25
#: no step is taken to be longer
_LONGEST_STEP_S = 1e9


def room_for(nodes: int) -> int:
    """Return up to how many nodes is reckoned: no other number because of one node more or less."""
    return 1 << (nodes + 1).bit_length()


def declared(spec: JobSpec) -> JobPace | None:
    """Return what a job says of its own pace before it was seen to train, None where it says nothing."""
    if not spec.pace.known:
        return None
    return JobPace(
        step_s=spec.pace.known,
        micro_batches=spec.pace.micro_batches,
        samples=spec.pace.samples,
        workers=spec.workers_per_node,
        flop_per_sample=spec.output.flop_per_sample,
        layouts=_spread_over(spec.pace.places),
    )


def _spread_over(places: Sequence[int]) -> Layouts:
    """Return layouts of so many places with 1, 2, ... nodes: to a plan it is all the same by which dimension."""
    before = (1, *places)
    new = [nodes for nodes, count in enumerate(places, 1) if count != before[nodes - 1]]
    found = [ListedLayout(layout=Layout(shard=places[nodes - 1]), nodes=nodes) for nodes in new]
    whole = [ListedLayout(layout=WHOLE, nodes=1)] if found and new[0] > 1 else []
    return (*whole, *found)[:MAX_LAYOUTS]


def learnt(before: JobPace | None, now: JobPace, said: JobPace | None) -> JobPace:
    """Return what is known of a job with what it says now: of each size what was said last.

    What was measured under another layout is forgotten. What was measured of other sizes was so at another time. Where
    steps of one size take so many times as long by now, those of the others are taken to do so, too: else a job that
    something slows down for a while would seem to be better off with numbers of nodes that it had before that, try one
    after the other, and come back to none of them.

    Args:
        said: what the job itself had said before, None where nobody knows.
    """
    if before is None or _samples(before) != _samples(now):
        return now
    news = {size: seconds for size, seconds in now.step_s.items() if said is None or said.step_s.get(size) != seconds}
    times = [seconds / before.step_s[size] for size, seconds in news.items() if seconds and before.step_s.get(size)]
    as_long = median(times) if times else 1.0
    then, here = places_by_nodes(before.layouts), places_by_nodes(now.layouts)
    alike = {size: seconds for size, seconds in before.step_s.items() if _at(then, size) == _at(here, size)}
    others = {size: min(seconds * as_long, _LONGEST_STEP_S) for size, seconds in alike.items()}
    return replace(now, step_s={**others, **news})


def _at(places: Sequence[int], nodes: int) -> int:
    return places[min(nodes, len(places)) - 1] if places else 1


def _samples(pace: JobPace) -> tuple[int, int, int]:
    return pace.micro_batches, pace.samples, pace.workers


class Paces:
    """The paces that the plan in force was made with."""

    def __init__(self, state: PoolState) -> None:
        self._state = state
        self._taken: dict[str, JobPace] = {}
        self._trying_again = TryingAgain(state, _throughput)
        #: FLOP/s by job, for so many nodes, of the pace that was taken
        self._achieved: dict[str, tuple[JobPace, tuple[float, ...]]] = {}
        #: the share of its time that going back takes, by job, and what that was reckoned from
        self._lost: dict[str, tuple[object, tuple[float, ...]]] = {}

    def look(self, *, anew: bool) -> bool:
        """Take what is known by now where plans are made anew, or have to be; return whether that was because of it."""
        again = self._trying_again.look()
        known = {job.name: job.pace for job in self._state.jobs.values() if job.pace is not None}
        off = again or any(_is_off(self._taken.get(name), pace) for name, pace in known.items())
        if anew or off:
            self._taken = known
            self._achieved = {name: kept for name, kept in self._achieved.items() if name in known}
            self._lost = {name: kept for name, kept in self._lost.items() if name in self._state.jobs}
        return off

    def achieved(self, job: PooledJob, nodes: int) -> tuple[float, ...]:
        """Return FLOP/s with 0.. nodes, samples/s where nobody has said how many FLOP one takes; () if unknown."""
        pace, room = self._of(job), room_for(nodes)
        if pace is None or not _known(pace):
            return ()
        known = self._achieved.get(job.name)
        if known is None or known[0] != pace or len(known[1]) != room + 1:
            known = pace, _throughput(pace, room)
            if self._is_here(job):
                self._achieved[job.name] = known
        return known[1]

    def lost_share(self, job: PooledJob, nodes: int, danger: Danger) -> tuple[float, ...]:
        """Return the share of a job's time that going back takes, with 0.. nodes."""
        pace, room = self._of(job), room_for(nodes)
        shape = (min(pace.experts, MOST), min(pace.slots, MOST)) if pace is not None else (0, 0)
        known = self._lost.get(job.name)
        if known is None or known[0] != (shape, room, danger):
            rate, exposed_s, lost_s = danger
            if all(shape):
                share = lost_with_experts(room, rate, exposed_s, lost_s, experts=shape[0], slots=shape[1])
            else:
                share = lost_with_all(room, rate, exposed_s, lost_s)
            known = (shape, room, danger), tuple(share.tolist())
            if self._is_here(job):
                self._lost[job.name] = known
        return known[1]

    def in_flop(self, job: PooledJob) -> bool:
        """Tell whether `achieved` is in FLOP/s."""
        pace = self._of(job)
        return pace is not None and pace.flop_per_sample > 0

    def _of(self, job: PooledJob) -> JobPace | None:
        """Return the pace that counts; of a job that somebody only asks about it is what that one says itself."""
        return self._taken.get(job.name) if self._is_here(job) else job.pace

    def _is_here(self, job: PooledJob) -> bool:
        known = self._state.jobs.get(job.name)
        return known is not None and known.submission == job.submission


def _is_off(taken: JobPace | None, known: JobPace) -> bool:
    if taken is known:  # (it is looked at after every message, and seldom changes)
        return False
    if taken is None or (*_samples(taken), taken.flop_per_sample) != (*_samples(known), known.flop_per_sample):
        return bool(known.step_s)
    return any(
        nodes not in taken.step_s or abs(seconds - taken.step_s[nodes]) > _OFF_BY * taken.step_s[nodes]
        for nodes, seconds in known.step_s.items()
    )


def _known(pace: JobPace) -> dict[int, float]:
    """Return the steps of a pace that can have been measured: jobs have said them, and no plan is to fail by one."""
    return {size: seconds for size, seconds in pace.step_s.items() if seconds >= LEAST_STEP_S}


def _throughput(pace: JobPace, nodes: int) -> tuple[float, ...]:
    times = StepTimes(
        step_s=_known(pace),
        micro_batches=min(max(1, pace.micro_batches), MOST),
        workers=min(max(1, pace.workers), MOST),
        flop=min(max(1, pace.samples), MOST) * (pace.flop_per_sample or 1.0),
        places=places_by_nodes(pace.layouts),
    )
    return tuple(times.throughput(nodes).tolist())
