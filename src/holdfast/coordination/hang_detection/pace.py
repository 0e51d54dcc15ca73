"""Measures the pace of a job as its coordinator sees it, how long it stands still, and how fast its nodes answer."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.coordination.timing.reading import Total
from holdfast.coordination.timing.times import FAILURE, FLOOR_S, TOGETHER_S, UNKNOWN_S, Times
from holdfast.protocol.messages.progress import Activity

#: A step this many times as long as usual leads to a probe, which costs one message per node. Consequences wait until
#: it is a failure.
PROBE_FACTOR = 1.5
#: seconds added to that, so that short steps do not lead to probes
PROBE_FLOOR_S = 0.05
#: A stopped process counts as hung once others have waited this many usual steps: it is certainly not just slow.
STOPPED_FACTOR = 2.0
#: Least patience, in seconds. An agent answers in milliseconds, but may wait this long for a core of a busy machine.
PATIENCE_S = 0.2
#: length of a window, in seconds; the slowest answer of the last one or two windows counts
WINDOW_S = 30.0


class Pace:
    """Steps and entries of the current generation. Times are unix seconds."""

    def __init__(self) -> None:
        self._times = Times()
        self._step = self._world = 0
        #: when the last step or entry ended
        self.since = 0.0
        self._entering = False

    def on_generation(self, world: int, now: float) -> None:
        """Handle the start of a generation: its members enter now.

        Args:
            world: the number of members.
        """
        self._world = world
        self.since = now
        self._entering = True
        self._step = 0

    def on_entered(self, now: float) -> None:
        """Learn how long the entry took, once all members have entered. Later calls change nothing."""
        if self._entering:
            self._add_time(Activity.ENTERING, now)
        self._entering = False

    def on_applied(self, step: int, now: float) -> None:
        """Learn the time of a step when the first worker has applied it. Older steps, and steps during an entry, are
        ignored.

        Of the first step in a generation only the end is known, so its time is not learned.
        """
        if self._entering or step <= self._step:
            return
        if self._step:
            self._add_time(Activity.VOTED, now)
        self._step = step
        self.since = now

    def restart_waiting(self, now: float) -> None:
        """Restart the waiting time: the coordinator does not know what happened while it did not run."""
        self._step, self.since = 0, now

    def _add_time(self, activity: Activity, now: float) -> None:
        """Add the time since the last event to the times of an activity, and start again."""
        took_s = max(0.0, now - self.since)
        self._times.add(activity, self._world, Total(1, took_s, took_s))
        self.since = now

    @property
    def mean_s(self) -> float | None:
        """The mean seconds of a step with this number of members, or None if unknown."""
        limit_s = self._times.limit_s(Activity.VOTED, self._world)
        return None if limit_s is None else (limit_s - FLOOR_S) / FAILURE

    def should_ask(self, now: float) -> bool:
        """Return whether a probe is due: the step takes longer than about 1.5 usual steps, or the entry longer than it
        may.

        If the usual time of a step is unknown, a fixed time counts.
        """
        still_s, mean_s = now - self.since, self.mean_s
        if self._entering:
            return still_s > self._enter_s
        return still_s > (TOGETHER_S if mean_s is None else PROBE_FACTOR * mean_s + PROBE_FLOOR_S)

    @property
    def together_s(self) -> float:
        """Seconds that an operation of all members may take: at most a usual step, or a fixed time if that is unknown.

        0 while the members enter the generation.
        """
        if self._entering:
            return 0.0
        return TOGETHER_S if self.mean_s is None else self.mean_s + FLOOR_S

    @property
    def overdue_at(self) -> float:
        """When the step or entry counts as a failure, in Unix seconds."""
        return self._exceeds_at(FAILURE)

    @property
    def stopped_at(self) -> float:
        """When a stopped process has held up the others for too long."""
        return self._exceeds_at(STOPPED_FACTOR)

    def _exceeds_at(self, times: float) -> float:
        """Return when the step exceeds this many usual steps, or the entry its limit, in Unix seconds.

        If the usual time of a step is unknown, it is `UNKNOWN_S` after the step's beginning.
        """
        if self._entering:
            return self.since + self._enter_s
        return self.since + (UNKNOWN_S if self.mean_s is None else times * self.mean_s + PROBE_FLOOR_S)

    @property
    def _enter_s(self) -> float:
        """Seconds that an entry may take."""
        return self._times.limit_s(Activity.ENTERING, self._world) or UNKNOWN_S


@dataclass(slots=True)
class _SlowestAnswer:
    """The slowest answers of one node in the current and the previous window, in seconds."""

    #: start of the current window
    started: float
    #: slowest answer of it
    now_s: float = 0.0
    #: slowest answer of the previous window
    before_s: float = 0.0

    def roll(self, now: float) -> None:
        """Start a new window if the current one is over.

        The slowest answer of the window just before is kept as `before_s`, which is 0 if that window is too old.
        """
        if now - self.started > WINDOW_S:
            self.before_s = self.now_s if now - self.started < 2 * WINDOW_S else 0.0
            self.started = now
            self.now_s = 0.0


class AnswerTimes:
    """Learns how long to wait for a node's answer to a probe, from its earlier answers.

    Times are unix seconds.
    """

    def __init__(self) -> None:
        self._slowest: dict[str, _SlowestAnswer] = {}

    def on_answer(self, node: str, took_s: float, now: float) -> None:
        """Add the seconds that a node's answer took to its slowest ones.

        A late one counts as just in time, so that a stopped node does not raise the limit.
        """
        slowest, took_s = self._slowest.setdefault(node, _SlowestAnswer(now)), min(took_s, self.patience_s(node, now))
        slowest.roll(now)
        slowest.now_s = max(slowest.now_s, took_s)

    def patience_s(self, node: str, now: float) -> float:
        """Return how long a node's answer may take: three times its slowest one of the last minute, at least 0.2 s."""
        slowest = self._slowest.get(node)
        if slowest is None:
            return PATIENCE_S
        slowest.roll(now)
        return max(PATIENCE_S, FAILURE * max(slowest.now_s, slowest.before_s))

    def keep_nodes(self, nodes: frozenset[str]) -> None:
        """Forget all other nodes."""
        self._slowest = {node: slowest for node, slowest in self._slowest.items() if node in nodes}
