"""A job that recovers live: it stops for the parts of a recovery, then continues with the remaining nodes.

Copies of each part of the state are on different racks first: with G = nodes / copies parts, node b holds part b mod G.
A recovery restores lost copies before the next step. State is therefore lost only if all holders of a part fail before
the recovery ends. The job then goes back to its newest checkpoint.
"""

from __future__ import annotations

from collections import Counter, deque

import numpy as np

from holdfast.planner.fleet.case import FleetCase
from holdfast.planner.fleet.failures import Change, Course
from holdfast.planner.fleet.membership import FleetNodes
from holdfast.planner.fleet.recovery import PARTS, FailureMoment, computed_s, recovery_parts
from holdfast.planner.fleet.time_account import Account

#: stops that must still be completed if another failure interrupts them
_MUST_COMPLETE = ("redo", "rollback")


class LiveJob:
    """Simulates one course of a job that recovers live."""

    def __init__(self, case: FleetCase, course: Course, period_s: float, rng: np.random.Generator) -> None:
        """Start at second 0 with all nodes of the course that are not away.

        A checkpoint is saved after each `period_s` of training. `rng` draws the moment of each failure.
        """
        self.account = Account()
        self._case = case
        self._course = course
        self._rng = rng
        self._nodes = FleetNodes(case, course.away)
        self._now = 0.0
        #: stops of training in order: the cause and the end; cause "" if the workers still compute
        self._stops: deque[tuple[str, float]] = deque()
        #: lost holders of each part of the state that are not yet replaced
        self._missing: Counter[int] = Counter()
        self._saving = case.checkpoint.save_s / (period_s + case.checkpoint.save_s)
        self._period_s = period_s

    def run(self) -> Account:
        """Simulate the course, and return the account."""
        for change in self._course.changes:
            self._advance(change.time)
            self._on_failure(change) if change.fails else self._on_return(change)
        self._advance(self._course.seconds)
        return self.account

    # ---- time ----

    def _advance(self, until: float) -> None:
        """Advance the time to `until`, counted in the account: pass the queued stops, then train.

        Without enough nodes, wait instead. When all stops are over, lost copies of the state count as replaced.
        """
        while self._now < until and self._nodes.has_enough and self._stops:
            what, end = self._stops[0]
            self._account_for(what, min(end, until) - self._now)
            self._now = min(end, until)
            if end <= until:
                self._stops.popleft()
        if self._now < until:
            if self._nodes.has_enough:
                self._missing.clear()
                self._account_for("", until - self._now)
            else:
                self.account.lost["wait"] += until - self._now
            self._now = until

    def _account_for(self, what: str, seconds: float) -> None:
        """Count seconds as lost to a cause. Cause "" divides them between training at the present speed and saving."""
        if what:
            self.account.lost[what] += seconds
        else:
            self.account.lost["save"] += seconds * self._saving
            self.account.train(seconds * (1.0 - self._saving), self._nodes.speed)

    # ---- what happens ----

    def _on_failure(self, change: Change) -> None:
        """Remove failed nodes. If they hit members, start a recovery; with too few nodes left, only queue owed stops.

        The recovery replaces the stops under way. Only the rest of a redo or of a rollback is owed again after it. If
        all copies of a part of the state are lost, a rollback is added, unless one is owed already. A failure only
        counts if the job had enough nodes before.
        """
        nodes, before, ran = self._nodes, self._nodes.members, self._nodes.has_enough
        hits = nodes.remove_failed(change, before)
        if not hits:
            return
        self.account.failures += ran
        self._missing.update(self._state_part(node) for node in change.nodes[:hits])
        owed, computing = self._uncompleted_stops(), not self._stops
        if self._is_state_lost(before - hits) and "rollback" not in owed:
            owed["rollback"] = self._rollback_s()
            self.account.rollbacks += 1
        self._stops.clear()
        if nodes.has_enough:
            moment = FailureMoment.draw(self._case, self._rng, computing=computing)
            self._start_recovery(moment, before, before - hits, owed)
        else:
            self._add_stops(self._now, owed)

    def _on_return(self, change: Change) -> None:
        """Add returned nodes. If the job waited and now has enough, start a recovery that includes all owed stops.

        If it already ran and the nodes become members, training stops for a join. Other nodes become standbys.
        """
        waited, more = not self._nodes.has_enough, self._nodes.add_returned(change)
        if self._nodes.has_enough and waited:
            owed = self._uncompleted_stops()
            self._stops.clear()
            self._start_recovery(None, self._nodes.members, self._nodes.members, owed)
        elif self._nodes.has_enough and more:
            self._add_join()

    def _start_recovery(self, moment: FailureMoment | None, before: int, left: int, owed: dict[str, float]) -> None:
        """Queue the stops of a recovery, after the useful work that is still done.

        Args:
            moment: when the failure strikes; None if the recovery follows a wait for nodes.
            before: members before the failure.
            left: members that remain. If more nodes are up, they join at the end of the recovery.
            owed: seconds of stops that earlier recoveries have not completed, by part. They are added to this
                recovery's.
        """
        at = self._now + (computed_s(self._case, moment, before) if moment else 0.0)
        if at > self._now:
            self._stops.append(("", at))
        parts = recovery_parts(self._case, moment, before, max(left, 1))
        self._add_stops(at, owed | {part: getattr(parts, part) + owed.get(part, 0.0) for part in PARTS})
        if self._nodes.members > left:
            self._add_join()

    def _add_join(self) -> None:
        """Queue a stop in which nodes join, after the queued ones. If the last one is a join already, it is shared."""
        at = self._stops[-1][1] if self._stops else self._now
        if not self._stops or self._stops[-1][0] != "join":
            self._stops.append(("join", at + self._case.recovery.join_s))

    # ---- inside ----

    def _uncompleted_stops(self) -> dict[str, float]:
        """Return the seconds that are left of a queued redo and of a queued rollback, by name; other stops are left
        out.
        """
        begins = [self._now, *(end for _, end in self._stops)]
        return {what: end - at for at, (what, end) in zip(begins, self._stops, strict=False) if what in _MUST_COMPLETE}

    def _add_stops(self, at: float, durations: dict[str, float]) -> None:
        """Queue a stop for each part of a recovery, then for the rollback, from `at` on. Zero durations are skipped."""
        for what in (*PARTS, "rollback"):
            if durations.get(what, 0.0) > 0:
                at += durations[what]
                self._stops.append((what, at))

    def _state_part(self, node: int) -> int:
        """Return the number of the part of the state that a node holds. Without `job.copies`, all hold part 0."""
        copies = self._case.job.copies
        return node % max(1, self._case.nodes // copies) if copies else 0

    def _is_state_lost(self, left: int) -> bool:
        """Whether no node is left, or all `job.copies` of a part are lost. With 0 copies, each node holds the state."""
        copies = self._case.job.copies
        return left <= 0 or (copies > 0 and max(self._missing.values(), default=0) >= copies)

    def _rollback_s(self) -> float:
        """Return the seconds of a rollback: load the checkpoint, and repeat the training that came after it."""
        since = self.account.trained % self._period_s
        return self._case.checkpoint.load_s + since
