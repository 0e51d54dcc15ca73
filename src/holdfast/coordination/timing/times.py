"""Usual durations and the limits beyond which an activity counts as late: running means by activity and world size.

As in Unicron (4.1), three times the mean is a failure, and 1.1 times is worth a warning. The first limit is extended by
a floor: on a shared machine, a phase of one millisecond may well take fifty. Also, any activity may take one and a half
steps longer than usual, because short activities vary the most. A hang is still found within three steps.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from holdfast.coordination.timing.reading import Total
from holdfast.protocol.messages.progress import Activity

#: multiples of the mean, from Unicron 4.1
FAILURE = 3.0
WARNING = 1.1
#: a process that is ready to run may have to wait about this long for a core
FLOOR_S = 0.2
#: in steps: any activity may take this much longer than usual
STEPS_LONGER = 1.5
#: the number of durations from which limits apply; the first ones compile, allocate and connect
WARM_UP = 3
#: Before that, a worker is late only if it takes far longer than others at the same activity, and not before this many
#: seconds. That is longer than building any group takes (`build_gloo`).
UNKNOWN_S = 30.0
#: Before that, the network is suspected after all members have waited for each other for this many seconds. The first
#: operations of a large model take long.
TOGETHER_S = 120.0
#: a mean covers about this many of the newest durations
MEMORY = 50
#: Activities that are mostly short and sometimes long, such as an evaluation of the script, or a checkpoint. The
#: longest duration so far shows how long they may take.
UNEVEN = frozenset(
    {
        Activity.ENTERING,
        Activity.LOADING,
        Activity.MOVING,
        Activity.RECEIVING,
        Activity.SCRIPT,
        Activity.SAVING,
        Activity.PAUSED,
    }
)
#: the limit of these activities, in multiples of the longest duration
LONGEST = 2.0
#: the factor for a limit taken from another world size, since shares and partners differ
OTHER_WORLD = 2.0
#: Activities that are never late: they last until another worker acts, or until the process ends.
ENDLESS = frozenset({Activity.STARTING, Activity.AWAITING, Activity.FINISHED, Activity.ENDING, Activity.WARMING})


@dataclass(slots=True)
class RunningMean:
    """The mean of the newest durations of one kind, in seconds."""

    count: int = 0
    mean_s: float = 0.0

    def add(self, count: int, mean_s: float) -> None:
        """Add `count` durations of `mean_s` each. A late one counts as the limit, so that it does not become usual."""
        if self.warm:
            mean_s = min(mean_s, self.limit_s)
        self.count += count
        weight = count / min(self.count, MEMORY + count)
        self.mean_s += weight * (mean_s - self.mean_s)

    @property
    def warm(self) -> bool:
        """Whether there are enough durations to apply the limit."""
        return self.count >= WARM_UP

    @property
    def limit_s(self) -> float:
        """The duration above which one counts as late."""
        return FAILURE * self.mean_s + FLOOR_S


class Times:
    """The durations of one node's workers, by activity and world size."""

    def __init__(self) -> None:
        self._means: dict[tuple[Activity, int], RunningMean] = {}
        self._longest: dict[Activity, float] = {}
        #: the longest of the first durations of a process, by activity: these compile, allocate and start loader
        #: workers
        self._longest_first: dict[Activity, float] = {}
        #: the number of durations that were longer than usual, by activity
        self.warnings: Counter[Activity] = Counter()

    def add(self, activity: Activity, world: int, new: Total) -> None:
        """Add the durations of an activity that have ended since the last call, in a world of this size.

        If enough were known before, and the new ones are on average more than `WARNING` times as long as usual, count
        them as warnings. `new.longest_s` may be older.
        """
        mean = self._means.setdefault((activity, world), RunningMean())
        usual_s = new.sum_s / new.count
        if mean.warm and usual_s > WARNING * mean.mean_s:
            self.warnings[activity] += new.count
        mean.add(new.count, usual_s)
        self._longest[activity] = max(self._longest.get(activity, 0.0), new.longest_s)

    def add_first(self, activity: Activity, longest_s: float) -> None:
        """Record the longest of a process's first durations of an activity."""
        self._longest_first[activity] = max(self._longest_first.get(activity, 0.0), longest_s)

    def first_limit_s(self, activity: Activity, world: int) -> float | None:
        """Return how many seconds an activity may last for a process that has done it fewer than `WARM_UP` times: at
        least a multiple of the longest first duration.

        None if the limit is unknown or infinite.
        """
        limit_s = self.limit_s(activity, world)
        if limit_s is None:
            return None
        return max(limit_s, LONGEST * self._longest_first.get(activity, 0.0))

    def mean_s(self, activity: Activity, world: int) -> float | None:
        """Return the usual duration of an activity in a world of this size, or None if unknown."""
        mean = self._means.get((activity, world))
        return mean.mean_s if mean is not None and mean.warm else None

    def limit_s(self, activity: Activity, world: int) -> float | None:
        """Return how many seconds an activity may last in a world of this size, or None if the limit is unknown or
        infinite.

        Without enough durations there, other world sizes count; uneven activities may last a multiple of the longest so
        far.
        """
        if activity in ENDLESS:
            return None
        mean = self._means.get((activity, world))
        if mean is not None and mean.warm:
            limit_s = self._limit_s(mean, world)
        else:
            others = [
                self._limit_s(mean, size)
                for (what, size), mean in self._means.items()
                if what is activity and mean.warm
            ]
            if not others:
                return None
            limit_s = OTHER_WORLD * max(others)
        return max(limit_s, LONGEST * self._longest[activity]) if activity in UNEVEN else limit_s

    def _limit_s(self, mean: RunningMean, world: int) -> float:
        return max(mean.limit_s, mean.mean_s + STEPS_LONGER * self._step_s(world))

    def _step_s(self, world: int) -> float:
        """Return the usual duration of a whole step in a world of this size, in seconds, as the sum of its regular
        activities; 0 if unknown.
        """
        applied = self._means.get((Activity.APPLYING, world))
        if applied is None or not applied.warm:
            return 0.0
        whole_s = sum(
            mean.count * mean.mean_s
            for (what, size), mean in self._means.items()
            if size == world and what not in UNEVEN and what not in ENDLESS
        )
        return whole_s / applied.count
