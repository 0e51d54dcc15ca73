"""Simulated processes that can be paused and killed, and the progress page of a training thread.

A paused process handles its inputs late, and a dead process handles none. Other processes can read the progress page
even if its thread hangs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from holdfast.coordination.timing.reading import ProgressAccount, Reading, Total
from holdfast.coordination.worker.machine import WorkerMachine
from holdfast.planner.fleet.timeline import Timeline
from holdfast.protocol.messages.progress import Activity
from holdfast.protocol.plan import Phase


class Process:
    """Base of workers, agents and coordinators."""

    def __init__(self) -> None:
        self.alive = True
        self.stopped = False
        self._backlog: list[tuple[Callable[..., object], tuple[Any, ...]]] = []

    def deliver(self, action: Callable[..., object], *args: Any) -> None:
        """Run an action in this process: now, at its SIGCONT, or never."""
        if not self.alive:
            return
        if self.stopped:
            self._backlog.append((action, args))
        else:
            action(*args)

    def stop(self) -> None:
        """Pause like SIGSTOP: later actions wait."""
        self.stopped = True

    def resume(self) -> None:
        """Continue like SIGCONT: run all waiting actions at once, in order."""
        if not self.alive or not self.stopped:
            return
        self.stopped = False
        backlog, self._backlog = self._backlog, []
        for place, (action, args) in enumerate(backlog):
            if self.stopped:  # The last action paused it again.
                self._backlog = backlog[place:] + self._backlog
                return
            if self.alive:
                action(*args)


#: The page's activity for each activity of the simulated thread.
_ACTIVITIES = {
    "": Activity.AWAITING,
    "before": Activity.AWAITING,
    "propose": Activity.AWAITING,
    "compute": Activity.COMPUTE,
    "together": Activity.COMPUTE,
    "reduce": Activity.REDUCING,
    "pause": Activity.REDUCING,
    "vote": Activity.VOTED,
    "apply": Activity.APPLYING,
    "load": Activity.LOADING,
    "move": Activity.MOVING,
    "save": Activity.FINISHED,
    "put": Activity.SAVING,
    "adopt": Activity.RECEIVING,
    "bring": Activity.RECEIVING,
    "warm": Activity.WARMING,
}
_WAITS = ("reduce", "vote", "move")
#: The activity of a thread that hangs between two activities, by phase.
_PHASES = {
    Phase.ENTERING: Activity.ENTERING,
    Phase.COMPUTE: Activity.SCRIPT,
    Phase.REDUCING: Activity.REDUCING,
    Phase.READY: Activity.REDUCING,
    Phase.PASSED: Activity.APPLYING,
}


class SimPage:
    """The progress page of one training thread."""

    def __init__(self, timeline: Timeline) -> None:
        self.micro_batch: int | None = None
        self._timeline = timeline
        self._since = self._stopped_at = timeline.now
        self._about = ""
        self._totals: dict[Activity, Total] = {}

    def begin(self, what: str) -> None:
        """Record that the thread starts another activity, or "" for none."""
        now = self._timeline.now
        activity, took_s = _ACTIVITIES[self._about], now - self._since
        known = self._totals.get(activity, Total(0, 0.0, 0.0))
        self._totals[activity] = Total(known.count + 1, known.sum_s + took_s, max(known.longest_s, took_s))
        self._about, self._since, self.micro_batch = what, now, None

    def stop(self) -> None:
        """Record that the process is paused."""
        self._stopped_at = self._timeline.now

    def read(self, machine: WorkerMachine, now: float, *, stopped: bool, hung: bool) -> Reading:
        """Read the page when the node's clock is `now`; `hung` means that the training thread hangs."""
        ahead_s = now - self._timeline.now
        activity, waits = _ACTIVITIES[self._about], self._about in _WAITS
        if hung and not self._about:
            activity = _PHASES.get(machine.phase, activity)
        return Reading(
            generation=machine.generation,
            step=machine.step,
            activity=activity,
            micro_batch=self.micro_batch,
            since=self._since + ahead_s,
            world=machine.generations.world,
            waits_since=self._since + ahead_s if waits else None,
            looked=now if waits and not stopped else ahead_s + (self._stopped_at if waits else self._since),
        )

    @property
    def account(self) -> ProgressAccount:
        """The totals of all finished activities."""
        return ProgressAccount(totals=dict(self._totals))
