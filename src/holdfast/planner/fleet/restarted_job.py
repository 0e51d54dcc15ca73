"""The same job if each failure restarts all workers from the newest checkpoint, as under torchrun.

A restart includes all nodes that are up when it ends. Nodes that return later need another restart. It follows a
checkpoint, and happens only if the returned nodes train more until the next failure than the restart costs.
"""

from __future__ import annotations

from math import floor

from holdfast.planner.fleet.case import FleetCase
from holdfast.planner.fleet.failures import Change, Course
from holdfast.planner.fleet.membership import FleetNodes
from holdfast.planner.fleet.time_account import Account


class RestartedJob:
    """Simulates one course of a job that restarts."""

    def __init__(self, case: FleetCase, course: Course, period_s: float) -> None:
        """Start at second 0 with all nodes that are not away. A checkpoint follows each `period_s` of training."""
        self.account = Account()
        self._case = case
        self._course = course
        self._nodes = FleetNodes(case, course.away)
        self._period_s = period_s
        self._save_s = case.checkpoint.save_s
        self._restart_s = case.restart.restart_s
        self._now = 0.0
        #: end of the restart under way, and its cause
        self._ready_at, self._why = 0.0, "restart"
        #: seconds since the last checkpoint was complete: training first, then saving
        self._since = 0.0
        #: nodes and speed of the job since its last restart
        self._members, self._speed = self._nodes.members, self._nodes.speed

    def run(self) -> Account:
        """Simulate the course, and return the account. Training since the last checkpoint counts at the end, too."""
        for change in self._course.changes:
            self._advance(change.time)
            self._on_failure(change) if change.fails else self._nodes.add_returned(change)
        self._advance(self._course.seconds)
        self.account.train(min(self._since, self._period_s), self._speed)
        self.account.lost["save"] += max(0.0, self._since - self._period_s)
        return self.account

    def _advance(self, until: float) -> None:
        """Advance the time to `until`: wait for enough nodes, then restart, then train. Each is counted in the account.

        At the end of a restart, all nodes that are up become members.
        """
        while self._now < until:
            if not self._nodes.has_enough:
                self.account.lost["wait"] += until - self._now
                self._now, self._ready_at = until, until + self._restart_s
            elif self._now < self._ready_at:
                end = min(self._ready_at, until)
                self.account.lost[self._why] += end - self._now
                self._now = end
                if end == self._ready_at:
                    self._members, self._speed = self._nodes.members, self._nodes.speed
            else:
                self._train(until)

    def _train(self, until: float) -> None:
        """Train and save through all full periods before `until`. Less than a period is only noted, and counted later.

        If a restart with returned nodes is worthwhile, stop at the first checkpoint and begin it.
        """
        whole, left = self._period_s + self._save_s, until - self._now
        most = 1.0 if self._is_join_worthwhile() else floor((self._since + left) / whole)
        time = most * whole - self._since
        if most < 1 or time > left:
            self._since += left
            self._now = until
            return
        self.account.train(most * self._period_s, self._speed)
        self.account.lost["save"] += most * self._save_s
        self._now += time
        self._since = 0.0
        if self._is_join_worthwhile():
            self._why, self._ready_at = "join", self._now + self._restart_s

    def _is_join_worthwhile(self) -> bool:
        """Whether returned nodes would train more until the next failure than a restart costs."""
        more = self._nodes.members - self._members
        return more > 0 and more / self._nodes.members / (self._case.failures_per_hour / 3600.0) > self._restart_s

    def _on_failure(self, change: Change) -> None:
        """Remove failed nodes. If they hit a job that had enough nodes, roll it back and restart it after detection.

        Time since the last checkpoint is lost, and a failure and a rollback are counted. During a restart, all nodes
        that are up count as members.
        """
        runs = self._nodes.has_enough
        restarting = self._now < self._ready_at
        if not self._nodes.remove_failed(change, self._nodes.members if restarting else self._members) or not runs:
            return
        self.account.failures += 1
        self.account.rollbacks += 1
        self.account.lost["rollback"] += self._since
        self._since = 0.0
        self._why, self._ready_at = "restart", self._now + self._case.restart.detect_s + self._restart_s
