"""Finds late workers on one node: it reads their activities, learns usual durations, and reports.

It does not decide which worker is at fault: that needs the view of all nodes.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from holdfast.coordination.timing.reading import ProgressAccount, Reading, Total
from holdfast.coordination.timing.times import ENDLESS, UNKNOWN_S, WARM_UP, RunningMean, Times
from holdfast.protocol.job_spec import OWN_TIMES_S
from holdfast.protocol.messages.progress import Activity, Late, OwnTimes, ThreadActivity, WatchWork

#: shortest time between two checks, seconds
MIN_CHECK_S = 0.02
#: usual time between two checks
USUAL_CHECK_S = 0.1
#: part of the shortest limit that is used instead if it is longer
CHECK_PART = 0.2
#: longest time between two checks
MAX_CHECK_S = 1.0
#: An agent that checks this much later than planned did not run. That time counts against no worker.
AWAY_S = 0.05
#: Waiting workers poll their collective every 8 ms. One that has not for this many seconds does not run.
STALLED_S = 0.3
#: part of its limit from which the other threads of a worker are read too
CLOSE_PART = 1 / 3
#: seconds between two readings of totals
LEARN_S = 0.5
#: seconds between reports of own times while a worker's pace changes; the coordinator decides whether that lasts
REPORT_SOON_S = 1.0
#: ratio to the usual time from which a worker counts as slowed
SLOWED = 1.08
#: ratio of the usual time from which it counts as faster; so large that the steps after a single late one do not count
FASTER = 1.3
#: most pieces of work with an expected end
MAX_EXPECTED = 16
#: a late activity is reported again each time it has lasted this many times as long
REPORT_AGAIN = 1.5


@dataclass(slots=True)
class _CurrentActivity:
    """The current activity of a worker, and its reports."""

    #: generation, step, activity, micro-batch, start
    key: tuple[int, int, Activity, int | None, float]
    #: multiple of its limit at which it is reported
    next_report_at: float = 1.0
    #: time of the last check
    checked_at: float = 0.0
    #: duration at the last check, in seconds
    for_s: float = 0.0
    #: limit at the last check, in seconds
    limit_s: float = 0.0


@dataclass(slots=True)
class _CoreWait:
    """The time that a worker waited for a core, in seconds."""

    #: start of the activity
    since: float
    #: wait before `since`
    before_s: float
    #: total wait
    total_s: float
    #: first known wait of each other thread, by number
    others_before_s: dict[int, float]


class LateWatch:
    """Watches the workers of one node. Times are on the node's monotonic clock, in seconds."""

    def __init__(self) -> None:
        self.times = Times()
        #: how long the shell may wait until the next check
        self.check_interval_s = USUAL_CHECK_S
        #: seconds between reports of own times if nothing changes
        self.report_interval_s = OWN_TIMES_S
        #: Work at which a worker was ended, with the seconds from which on its end is reported, the newest last.
        self._expected: dict[tuple[int, Activity, int | None], float] = {}
        #: Workers with other threads that should be read too. Reading all threads of all workers costs too much.
        self.closely_watched: frozenset[str] = frozenset()
        self._last: float | None = None
        #: periods in which this agent did not run
        self._away: deque[tuple[float, float]] = deque(maxlen=16)
        self._activities: dict[str, _CurrentActivity] = {}
        #: by worker, since the start of its activity or its last poll
        self._core_waits: dict[str, _CoreWait] = {}
        #: by worker, since it has waited in a collective
        self._core_waits_in_collective: dict[str, _CoreWait] = {}
        self._totals: dict[str, tuple[int, Mapping[Activity, Total]]] = {}
        self._learnt_at = self._reported_at = -math.inf
        #: mean seconds of a micro-batch, by worker
        self._own: dict[str, RunningMean] = {}
        #: by worker, micro-batches since the last report, and their seconds
        self._since: dict[str, tuple[int, float]] = {}

    def is_learning_due(self, now: float) -> bool:
        """Return whether the next readings should include accounts."""
        return now - self._learnt_at >= LEARN_S

    def learn(
        self, now: float, readings: Mapping[str, Reading], accounts: Mapping[str, ProgressAccount]
    ) -> list[OwnTimes]:
        """Add the durations that have ended since the last call to the usual ones; return reports to send, if any are
        due.

        A report is due at intervals, sooner if a worker's pace has changed.

        Args:
            readings: the current activity of each worker
            accounts: the totals of each worker's activities
        """
        self._learnt_at = now
        before, self._totals = self._totals, {}
        for worker, account in accounts.items():
            reading = readings.get(worker)
            if reading is None:
                continue
            self._totals[worker] = reading.world, account.totals
            world, old = before.get(worker, (reading.world, {}))
            for activity, total in account.totals.items():
                known = old.get(activity)
                if (known.count if known is not None else 0) < min(WARM_UP, total.count):
                    self.times.add_first(activity, total.longest_s)
            if world == reading.world:  # Otherwise the times belong to two worlds.
                self._add_times(worker, world, old, account.totals)
        self._own = {worker: own for worker, own in self._own.items() if worker in accounts}
        if not self._own or now - self._reported_at < min(
            self.report_interval_s, REPORT_SOON_S if self._has_changed else self.report_interval_s
        ):
            return []
        since = {worker: computed for worker, computed in self._since.items() if worker in accounts}
        self._reported_at, self._since, slow = now, {}, dict(self.times.warnings)
        self.times.warnings.clear()
        means = {worker: own.mean_s for worker, own in self._own.items()}
        links = {worker: account.link_bytes_per_s for worker, account in accounts.items() if account.link_bytes_per_s}
        return [OwnTimes(compute_s=means, computed=since, slow=slow, link_bytes_per_s=links)]

    @property
    def _has_changed(self) -> bool:
        """Whether a worker has become slower or faster since the last report, compared with its mean."""
        usual = {
            worker: count * self._own[worker].mean_s
            for worker, (count, _) in self._since.items()
            if worker in self._own
        }
        return any(
            took > SLOWED * usual[worker] or took * FASTER < usual[worker]
            for worker, (_, took) in self._since.items()
            if worker in usual
        )

    def _add_times(self, worker: str, world: int, old: Mapping[Activity, Total], new: Mapping[Activity, Total]) -> None:
        """Add the durations of a worker that are in its new totals and not in the old ones, and the pace of its
        micro-batches.

        Args:
            world: the number of members, on which usual durations depend.
        """
        none = Total(0, 0.0, 0.0)
        for activity, total in new.items():
            known = old.get(activity, none)
            count, sum_s = total.count - known.count, total.sum_s - known.sum_s
            if count > 0 and sum_s >= 0.0:
                self.times.add(activity, world, Total(count, sum_s, total.longest_s))
                if activity is Activity.COMPUTE:
                    self._own.setdefault(worker, RunningMean()).add(count, sum_s / count)
                    before, before_s = self._since.get(worker, (0, 0.0))
                    self._since[worker] = before + count, before_s + sum_s

    def find_late(self, now: float, readings: Mapping[str, Reading]) -> list[Late]:
        """Return the late workers, once for each activity and again while it lasts, and late or expected work that has
        ended.

        Also sets `check_interval_s`, the time until the next check, and `closely_watched`. Times in which this agent
        did not run do not count.
        """
        if self._last is not None and now - self._last > self.check_interval_s + AWAY_S:
            self._away.append((self._last, now))
        self._last = now
        self._activities = {worker: seen for worker, seen in self._activities.items() if worker in readings}
        for starved in (self._core_waits, self._core_waits_in_collective):
            for worker in starved.keys() - readings.keys():
                del starved[worker]
        late = [
            ended for worker, reading in readings.items() if (ended := self._report_end(worker, reading)) is not None
        ]
        closely = set[str]()
        due, shortest = [MAX_CHECK_S], [USUAL_CHECK_S / CHECK_PART]
        for worker, reading in readings.items():
            for_s = self._own_time_s(now, worker, reading)
            self._waiting_time_s(now, worker, reading)  # This records how long it had no core.
            if reading.waits_since is None and reading.activity in ENDLESS:
                continue
            known_s = self._limit_s(worker, reading)
            limit_s = known_s or UNKNOWN_S
            seen = self._activity_of(worker, reading)
            seen.checked_at, seen.for_s, seen.limit_s = now, for_s, limit_s
            if for_s > CLOSE_PART * limit_s:
                closely.add(worker)
            if for_s > seen.next_report_at * limit_s:
                seen.next_report_at = REPORT_AGAIN * for_s / limit_s
                late.append(Late(stand=self._thread_activity(now, worker, reading)))
            due.append(seen.next_report_at * limit_s - for_s)
            shortest += [limit_s] if known_s else []
        usual = max(USUAL_CHECK_S, CHECK_PART * min(shortest[1:], default=0.0))
        self.check_interval_s, self.closely_watched = max(MIN_CHECK_S, min(usual, *due)), frozenset(closely)
        return late

    def _activity_of(self, worker: str, reading: Reading) -> _CurrentActivity:
        """Return the entry of a worker's current activity, a new one if the activity has changed."""
        began, seen = _activity_key(reading), self._activities.get(worker)
        if seen is None or seen.key != began:
            seen = self._activities[worker] = _CurrentActivity(began)
        return seen

    def expect_end(self, work: WatchWork) -> None:
        """Remember to report the end of this work if a worker here takes as long for it. The newest 16 requests are
        kept.
        """
        self._expected.pop(place := (work.step, work.activity, work.micro_batch), None)
        self._expected[place] = work.for_s
        while len(self._expected) > MAX_EXPECTED:
            del self._expected[next(iter(self._expected))]

    def _report_end(self, worker: str, reading: Reading) -> Late | None:
        """Return the report that the worker's last activity has ended since the last check, if it was late or took as
        long as the coordinator has asked for (`WatchWork`).

        None if neither, and if the activity goes on.
        """
        seen = self._activities.get(worker)
        if seen is None or seen.key == _activity_key(reading):
            return None
        generation, step, activity, micro_batch, _ = seen.key
        until = reading.since if reading.waits_since is None else reading.waits_since
        took_s = seen.for_s + max(0.0, until - seen.checked_at)
        if seen.next_report_at == 1.0 and took_s < self._expected.get((step, activity, micro_batch), math.inf):
            return None
        stand = ThreadActivity(
            worker=worker,
            generation=generation,
            step=step,
            activity=activity,
            for_s=took_s,
            limit_s=seen.limit_s,
            micro_batch=micro_batch,
        )
        return Late(stand=stand, ended=True)

    def _limit_s(self, worker: str, reading: Reading) -> float | None:
        """Return the limit of a worker's activity in seconds, or None if unknown.

        In a collective it is the time between polls; for a worker's first times, that of first times.
        """
        if reading.waits_since is not None:
            return STALLED_S
        _, totals = self._totals.get(worker, (0, dict[Activity, Total]()))
        total = totals.get(reading.activity)
        if total is None or total.count < WARM_UP:
            return self.times.first_limit_s(reading.activity, reading.world)
        return self.times.limit_s(reading.activity, reading.world)

    def _own_time_s(self, now: float, worker: str, reading: Reading) -> float:
        """Return how long a worker has been at its own part of an activity, or has not polled its collective.

        Times in which this agent did not run, or the worker had no core, do not count. Waiting for others is not own
        work, neither during the wait nor after it.
        """
        since = max(reading.since, reading.looked) if reading.waits_since is None else reading.looked
        away_s = sum(max(0.0, end - max(begin, since)) for begin, end in self._away)
        return now - since - away_s - _core_wait_s(self._core_waits, worker, since, reading)

    def _waiting_time_s(self, now: float, worker: str, reading: Reading) -> float:
        """Return how long a worker has waited in a collective; 0 if it is in none.

        Times without a core do not count, because the worker reads no data then.
        """
        since = reading.waits_since
        starved_s = _core_wait_s(self._core_waits_in_collective, worker, since or now, reading)
        return 0.0 if since is None else max(0.0, now - since - starved_s)

    def list_activities(
        self, now: float, readings: Mapping[str, Reading], stopped: Collection[str]
    ) -> tuple[ThreadActivity, ...]:
        """Return the activities of all workers with a reading, late or not.

        Args:
            now: the time
            readings: readings by worker
            stopped: workers with stopped processes
        """
        return tuple(
            self._thread_activity(now, worker, reading, stopped=worker in stopped)
            for worker, reading in readings.items()
        )

    def _thread_activity(self, now: float, worker: str, reading: Reading, *, stopped: bool = False) -> ThreadActivity:
        """Return the activity of a worker for a report: how long it lasts, its limit (0 if unknown), and its wait."""
        return ThreadActivity(
            worker=worker,
            generation=reading.generation,
            step=reading.step,
            activity=reading.activity,
            for_s=max(0.0, self._own_time_s(now, worker, reading)),
            limit_s=self._limit_s(worker, reading) or 0.0,
            micro_batch=reading.micro_batch,
            waits=reading.waits_since is not None,
            waits_s=self._waiting_time_s(now, worker, reading),
            stopped=stopped,
        )


def _activity_key(reading: Reading) -> tuple[int, int, Activity, int | None, float]:
    """Return the values that identify an activity."""
    activity = Activity.AWAITING if reading.waits_since is not None else reading.activity
    return reading.generation, reading.step, activity, reading.micro_batch, reading.since


def _core_wait_s(of: dict[str, _CoreWait], worker: str, since: float, reading: Reading) -> float:
    """Return how long a worker had no core since a time, at earliest since the last check before it; update its entry.

    While its thread does not run, it may wait for another thread of its process that has no core: the longest such wait
    is added.

    Args:
        of: the entries, by worker.
        since: the start of the activity or wait.
    """
    starved, total_s = of.get(worker), reading.starved_s + reading.collected_s
    if starved is None or starved.since != since:
        before_s = min(starved.total_s, total_s) if starved is not None else total_s
        starved = of[worker] = _CoreWait(since, before_s, total_s, {})
    starved.total_s = total_s
    before, others = starved.others_before_s, reading.others_starved_s
    others_s = (waited_s - before.setdefault(thread, waited_s) for thread, waited_s in others.items())
    return max(0.0, total_s - starved.before_s) + max(0.0, max(others_s, default=0.0))
