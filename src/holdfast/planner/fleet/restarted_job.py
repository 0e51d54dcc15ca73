"""The same job where any failure restarts all workers from the newest checkpoint, as under torchrun.

A restart takes in whoever is there when it ends. Who comes later is taken in by a restart of its own, right after a
checkpoint, where that pays: where the nodes that are missing would train more until the next failure than it costs.
"""

from __future__ import annotations

from math import floor

from holdfast.planner.fleet.account import Account
from holdfast.planner.fleet.case import FleetCase
from holdfast.planner.fleet.failures import Change, Course
from holdfast.planner.fleet.membership import Nodes


class RestartedJob:
    """One course of such a job."""

    def __init__(self, case: FleetCase, course: Course, period_s: float) -> None:
        self.account = Account()
        self._case = case
        self._course = course
        self._nodes = Nodes(case, course.away)
        self._period_s = period_s
        self._save_s = case.checkpoint.save_s
        self._restart_s = case.restart.restart_s
        self._now = 0.0
        #: when the restart that is under way ends, and what it is for
        self._ready_at, self._why = 0.0, "restart"
        #: time since the last checkpoint was through; of its period, then of saving
        self._since = 0.0
        #: on how many nodes, and how fast, the job trains since its last restart
        self._members, self._speed = self._nodes.members, self._nodes.speed

    def run(self) -> Account:
        """Live through the course."""
        for change in self._course.changes:
            self._advance(change.time)
            self._fail(change) if change.fails else self._nodes.back(change)
        self._advance(self._course.seconds)
        self.account.train(min(self._since, self._period_s), self._speed)
        self.account.lost["save"] += max(0.0, self._since - self._period_s)
        return self.account

    def _advance(self, until: float) -> None:
        """Let time pass."""
        while self._now < until:
            if not self._nodes.enough:
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
        """Train through whole periods, or to the checkpoint after which others are taken in."""
        whole, left = self._period_s + self._save_s, until - self._now
        most = 1.0 if self._joining_pays() else floor((self._since + left) / whole)
        time = most * whole - self._since
        if most < 1 or time > left:
            self._since += left
            self._now = until
            return
        self.account.train(most * self._period_s, self._speed)
        self.account.lost["save"] += most * self._save_s
        self._now += time
        self._since = 0.0
        if self._joining_pays():
            self._why, self._ready_at = "join", self._now + self._restart_s

    def _joining_pays(self) -> bool:
        more = self._nodes.members - self._members
        return more > 0 and more / self._nodes.members / (self._case.failures_per_hour / 3600.0) > self._restart_s

    def _fail(self, change: Change) -> None:
        runs = self._nodes.enough
        restarting = self._now < self._ready_at
        if not self._nodes.hit(change, self._nodes.members if restarting else self._members) or not runs:
            return
        self.account.failures += 1
        self.account.rollbacks += 1
        self.account.lost["rollback"] += self._since
        self._since = 0.0
        self._why, self._ready_at = "restart", self._now + self._case.restart.detect_s + self._restart_s
