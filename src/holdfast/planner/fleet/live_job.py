"""A job that recovers live: it stops for a recovery's parts and goes on with the nodes that are left.

Copies of the state are on other racks first: of G = nodes / copies parts, node b holds part b mod G. A loss is made
good within its recovery (what moves comes before the next step), so that state is lost only where all holders of a part
fail before that has ended: then the job goes back to its newest checkpoint.
"""

from __future__ import annotations

from collections import Counter, deque

import numpy as np

from holdfast.planner.fleet.account import Account
from holdfast.planner.fleet.case import FleetCase
from holdfast.planner.fleet.failures import Change, Course
from holdfast.planner.fleet.membership import Nodes
from holdfast.planner.fleet.recovery import PARTS, Moment, computed_s, recovery_parts

#: what has to be done whatever else strikes meanwhile
_OWED = ("redo", "rollback")


class LiveJob:
    """One course of such a job."""

    def __init__(self, case: FleetCase, course: Course, period_s: float, rng: np.random.Generator) -> None:
        self.account = Account()
        self._case = case
        self._course = course
        self._rng = rng
        self._nodes = Nodes(case, course.away)
        self._now = 0.0
        #: what stops training, in order: for what, and until when; "" for computing that goes on meanwhile
        self._stops: deque[tuple[str, float]] = deque()
        #: how many holders of each part are lost and not made good
        self._missing: Counter[int] = Counter()
        self._saving = case.checkpoint.save_s / (period_s + case.checkpoint.save_s)
        self._period_s = period_s

    def run(self) -> Account:
        """Live through the course."""
        for change in self._course.changes:
            self._advance(change.time)
            self._fail(change) if change.fails else self._return(change)
        self._advance(self._course.seconds)
        return self.account

    # ---- time ----

    def _advance(self, until: float) -> None:
        """Let time pass."""
        while self._now < until and self._nodes.enough and self._stops:
            what, end = self._stops[0]
            self._spend(what, min(end, until) - self._now)
            self._now = min(end, until)
            if end <= until:
                self._stops.popleft()
        if self._now < until:
            if self._nodes.enough:
                self._missing.clear()
                self._spend("", until - self._now)
            else:
                self.account.lost["wait"] += until - self._now
            self._now = until

    def _spend(self, what: str, seconds: float) -> None:
        if what:
            self.account.lost[what] += seconds
        else:
            self.account.lost["save"] += seconds * self._saving
            self.account.train(seconds * (1.0 - self._saving), self._nodes.speed)

    # ---- what happens ----

    def _fail(self, change: Change) -> None:
        nodes, before, ran = self._nodes, self._nodes.members, self._nodes.enough
        hits = nodes.hit(change, before)
        if not hits:
            return
        self.account.failures += ran
        self._missing.update(self._part_of(node) for node in change.nodes[:hits])
        owed, computing = self._owed(), not self._stops
        if self._state_is_lost(before - hits) and "rollback" not in owed:
            owed["rollback"] = self._going_back_s()
            self.account.rollbacks += 1
        self._stops.clear()
        if nodes.enough:
            moment = Moment.drawn(self._case, self._rng, computing=computing)
            self._recover(moment, before, before - hits, owed)
        else:
            self._stop(self._now, owed)

    def _return(self, change: Change) -> None:
        waited, more = not self._nodes.enough, self._nodes.back(change)
        if self._nodes.enough and waited:
            owed = self._owed()
            self._stops.clear()
            self._recover(None, self._nodes.members, self._nodes.members, owed)
        elif self._nodes.enough and more:
            self._join()

    def _recover(self, moment: Moment | None, before: int, left: int, owed: dict[str, float]) -> None:
        """Begin a recovery: from a failure, or from waiting. Standbys come in at its end, as arrivals do."""
        at = self._now + (computed_s(self._case, moment, before) if moment else 0.0)
        if at > self._now:
            self._stops.append(("", at))
        parts = recovery_parts(self._case, moment, before, max(left, 1))
        self._stop(at, owed | {part: getattr(parts, part) + owed.get(part, 0.0) for part in PARTS})
        if self._nodes.members > left:
            self._join()

    def _join(self) -> None:
        """Nodes come in; those that come while others wait to, come in with them."""
        at = self._stops[-1][1] if self._stops else self._now
        if not self._stops or self._stops[-1][0] != "join":
            self._stops.append(("join", at + self._case.recovery.join_s))

    # ---- inside ----

    def _owed(self) -> dict[str, float]:
        """Return what is under way and must be done whatever happens, in seconds."""
        begins = [self._now, *(end for _, end in self._stops)]
        return {what: end - at for at, (what, end) in zip(begins, self._stops, strict=False) if what in _OWED}

    def _stop(self, at: float, durations: dict[str, float]) -> None:
        """Stop for a recovery's parts, one after the other, then for going back."""
        for what in (*PARTS, "rollback"):
            if durations.get(what, 0.0) > 0:
                at += durations[what]
                self._stops.append((what, at))

    def _part_of(self, node: int) -> int:
        copies = self._case.job.copies
        return node % max(1, self._case.nodes // copies) if copies else 0

    def _state_is_lost(self, left: int) -> bool:
        copies = self._case.job.copies
        return left <= 0 or (copies > 0 and max(self._missing.values(), default=0) >= copies)

    def _going_back_s(self) -> float:
        """Return how long it takes to be where the job was: load, and train what came after the checkpoint again."""
        since = self.account.trained % self._period_s
        return self._case.checkpoint.load_s + since
