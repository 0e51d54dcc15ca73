"""What is usual, and from when on something counts as late: running means per activity and world size.

Three times the mean is a failure and 1.1 times is worth a warning, as Unicron has it (4.1); the first is made longer by
a floor, since on a shared machine a phase of a millisecond may well take fifty, and anything may take one and a half
steps longer than usual: what is short varies most, and a hang is found within three steps all the same.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from holdfast.coordination.timing.reading import Total
from holdfast.protocol.messages.progress import Activity

#: Unicron 4.1
FAILURE = 3.0
WARNING = 1.1
#: a process that is ready to run may have to wait about so long for a core
FLOOR_S = 0.2
#: of a step, by so much anything may take longer than usual
STEPS_LONGER = 1.5
#: so many must have ended before anybody is judged by them: the first ones compile, allocate and connect
WARM_UP = 3
#: Until then somebody may be late all the same who takes far longer than others at it, but not before so many seconds:
#: longer than any group takes to be built (`build_gloo`).
UNKNOWN_S = 30.0
#: Until then, the network is suspected after all members have waited for each other for this many seconds. The first
#: operations of a large model take long.
TOGETHER_S = 120.0
#: a mean is that of about so many of the newest
MEMORY = 50
#: What is short most of the time and long now and then (a script's evaluation, a checkpoint): that it has ended once by
#: itself shows what it may take.
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
#: of that, so many times the longest
LONGEST = 2.0
#: where only other worlds' times are known, theirs count so many times: shares and partners are others
OTHER_WORLD = 2.0
#: Nobody is late in these: they last until somebody else does something, or a process is gone.
ENDLESS = frozenset({Activity.STARTING, Activity.AWAITING, Activity.FINISHED, Activity.ENDING, Activity.WARMING})


@dataclass(slots=True)
class RunningMean:
    """The mean of the newest durations of one kind, in seconds."""

    count: int = 0
    mean_s: float = 0.0

    def add(self, count: int, mean_s: float) -> None:
        """Take in `count` durations that took `mean_s` each; what is late counts as just late, lest it become usual."""
        if self.warm:
            mean_s = min(mean_s, self.limit_s)
        self.count += count
        weight = count / min(self.count, MEMORY + count)
        self.mean_s += weight * (mean_s - self.mean_s)

    @property
    def warm(self) -> bool:
        """True where enough have ended to judge others by them."""
        return self.count >= WARM_UP

    @property
    def limit_s(self) -> float:
        """From when on one counts as late."""
        return FAILURE * self.mean_s + FLOOR_S


class Times:
    """The durations of one node's workers, by activity and world size."""

    def __init__(self) -> None:
        self._means: dict[tuple[Activity, int], RunningMean] = {}
        self._longest: dict[Activity, float] = {}
        #: The longest of the first ones of a process, by activity: these compile, allocate and start loader workers.
        self._longest_first: dict[Activity, float] = {}
        #: how often something took longer than usual, by activity
        self.warnings: Counter[Activity] = Counter()

    def add(self, activity: Activity, world: int, new: Total) -> None:
        """Take in what has ended since the last time; of `longest_s`, whatever is known."""
        mean = self._means.setdefault((activity, world), RunningMean())
        usual_s = new.sum_s / new.count
        if mean.warm and usual_s > WARNING * mean.mean_s:
            self.warnings[activity] += new.count
        mean.add(new.count, usual_s)
        self._longest[activity] = max(self._longest.get(activity, 0.0), new.longest_s)

    def add_first(self, activity: Activity, longest_s: float) -> None:
        """Record the longest of what a process has done first."""
        self._longest_first[activity] = max(self._longest_first.get(activity, 0.0), longest_s)

    def first_limit_s(self, activity: Activity, world: int) -> float | None:
        """Return how long an activity may last for a process that has done it fewer than `WARM_UP` times."""
        limit_s = self.limit_s(activity, world)
        if limit_s is None:
            return None
        return max(limit_s, LONGEST * self._longest_first.get(activity, 0.0))

    def mean_s(self, activity: Activity, world: int) -> float | None:
        """Return what an activity takes in a world of this size; None where that is not known."""
        mean = self._means.get((activity, world))
        return mean.mean_s if mean is not None and mean.warm else None

    def limit_s(self, activity: Activity, world: int) -> float | None:
        """Return for how long an activity may last in a world of this size; None where nobody can say."""
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
        """Return what a step in a world of this size takes, all that happens in each one together; 0 if unknown."""
        applied = self._means.get((Activity.APPLYING, world))
        if applied is None or not applied.warm:
            return 0.0
        whole_s = sum(
            mean.count * mean.mean_s
            for (what, size), mean in self._means.items()
            if size == world and what not in UNEVEN and what not in ENDLESS
        )
        return whole_s / applied.count
