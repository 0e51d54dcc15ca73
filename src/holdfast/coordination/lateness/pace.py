"""How fast a job goes, as its coordinator hears it, since when it stands still, and how fast its nodes answer."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.coordination.timing.reading import Total
from holdfast.coordination.timing.times import FAILURE, FLOOR_S, TOGETHER_S, UNKNOWN_S, Times
from holdfast.protocol.messages.progress import Activity

#: A step that takes longer than so many usual ones is worth asking after: that costs a message to each node and harms
#: nobody. What it may lead to waits until it is a failure.
ASK = 1.5
#: of the floor below which nothing counts as late, this much before anybody is asked
ASK_FLOOR_S = 0.05
#: A process that is stopped is no slow one: that others wait for it so much longer than usual is enough.
STOPPED = 2.0
#: an agent answers in milliseconds; one on a busy machine may have to wait so long for a core
PATIENCE_S = 0.2
#: the slowest answer of the last one or two of these counts, in seconds
WINDOW_S = 30.0


class Pace:
    """Steps and entries of the generation in force. Times are unix seconds."""

    def __init__(self) -> None:
        self._times = Times()
        self._step = self._world = 0
        #: since when nothing has happened
        self.since = 0.0
        self._entering = False

    def began(self, world: int, now: float) -> None:
        """A generation begins."""
        self._world, self.since, self._entering, self._step = world, now, True, 0

    def entered(self, now: float) -> None:
        """All its members are in."""
        if self._entering:
            self._add(Activity.ENTERING, now)
        self._entering = False

    def applied(self, step: int, now: float) -> None:
        """Somebody has applied a step."""
        if self._entering or step <= self._step:
            return
        if self._step:
            self._add(Activity.VOTED, now)
        self._step, self.since = step, now

    def wait_anew(self, now: float) -> None:
        """The coordinator was away: what happened meanwhile is not known."""
        self._step, self.since = 0, now

    def _add(self, activity: Activity, now: float) -> None:
        took_s = max(0.0, now - self.since)
        self._times.add(activity, self._world, Total(1, took_s, took_s))
        self.since = now

    @property
    def mean_s(self) -> float | None:
        """Return what a step usually takes; None where nobody knows."""
        limit_s = self._times.limit_s(Activity.VOTED, self._world)
        return None if limit_s is None else (limit_s - FLOOR_S) / FAILURE

    def asks(self, now: float) -> bool:
        """Tell whether it is time to ask where everybody stands."""
        still_s, mean_s = now - self.since, self.mean_s
        if self._entering:
            return still_s > self._enter_s
        return still_s > (TOGETHER_S if mean_s is None else ASK * mean_s + ASK_FLOOR_S)

    @property
    def together_s(self) -> float:
        """Return how long what all take part in may take: not longer than a whole step does."""
        if self._entering:
            return 0.0
        return TOGETHER_S if self.mean_s is None else self.mean_s + FLOOR_S

    @property
    def overdue_at(self) -> float:
        """From when on it takes longer than it should."""
        return self._takes_longer_at(FAILURE)

    @property
    def stopped_at(self) -> float:
        """From when on it takes so long that a process that is stopped is in others' way."""
        return self._takes_longer_at(STOPPED)

    def _takes_longer_at(self, times: float) -> float:
        if self._entering:
            return self.since + self._enter_s
        return self.since + (UNKNOWN_S if self.mean_s is None else times * self.mean_s + ASK_FLOOR_S)

    @property
    def _enter_s(self) -> float:
        return self._times.limit_s(Activity.ENTERING, self._world) or UNKNOWN_S


@dataclass(slots=True)
class _Slowest:
    """Of one node's answers: when this window began, the slowest in it, and in the one before, in seconds."""

    began: float
    now_s: float = 0.0
    before_s: float = 0.0

    def roll(self, now: float) -> None:
        if now - self.began > WINDOW_S:
            self.before_s = self.now_s if now - self.began < 2 * WINDOW_S else 0.0
            self.began, self.now_s = now, 0.0


class Answers:
    """How long nodes are waited for that are asked where their workers stand: learnt from how long answers take.

    Times are unix seconds.
    """

    def __init__(self) -> None:
        self._slowest: dict[str, _Slowest] = {}

    def came(self, node: str, took_s: float, now: float) -> None:
        """A node has answered; what was late counts as just late, lest a node that was stopped be waited for."""
        slowest, took_s = self._slowest.setdefault(node, _Slowest(now)), min(took_s, self.patience_s(node, now))
        slowest.roll(now)
        slowest.now_s = max(slowest.now_s, took_s)

    def patience_s(self, node: str, now: float) -> float:
        """Return how long a node's answer may take: three times the slowest one lately, on a machine that is loaded."""
        slowest = self._slowest.get(node)
        if slowest is None:
            return PATIENCE_S
        slowest.roll(now)
        return max(PATIENCE_S, FAILURE * max(slowest.now_s, slowest.before_s))

    def keep(self, nodes: frozenset[str]) -> None:
        """Nobody asks any others now."""
        self._slowest = {node: slowest for node, slowest in self._slowest.items() if node in nodes}
