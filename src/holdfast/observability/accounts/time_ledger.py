"""The ledger of a job's time, from its events alone: seconds per cause, ETTR, goodput, FLOP, node-hours.

A report, the metrics and a coordinator's status use this one; whoever reads the journal from its begin has the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from holdfast.observability.accounts.node_time import Attendance
from holdfast.observability.accounts.time_spans import Cause, Span, split
from holdfast.observability.accounts.usual_steps import LATE, UsualSteps
from holdfast.protocol.events import (
    CheckpointSaved,
    CoordinatorRestarted,
    FailureDetected,
    FlopCounted,
    GenerationStarted,
    JobStarted,
    JobWaiting,
    JournalRepaired,
    ReadEvent,
    Rebalanced,
    Recovered,
    SnapshotSaved,
    StepCommitted,
)
from holdfast.protocol.position import Position

#: spans that are kept until a usual step is known, at the most
_MOST_HELD = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeAccount:
    """Where a job stands with its time; None: not known, or its user has not said.

    wall_s: from the first event on. seconds: per cause, together `wall_s`. ettr: of the time, what trained (effective
    or sub-healthy). goodput: samples that count / what the full job, undisturbed, would have got in `wall_s`; the full
    job is the largest world that has trained, `full_world` workers, whose usual step takes `full_step_s`.
    accelerator_hours: of all workers' that were there. mfu: FLOP delivered / what these could have.
    """

    wall_s: float
    seconds: Mapping[Cause, float]
    ettr: float
    goodput: float | None
    full_world: int
    full_step_s: float | None
    node_hours: float
    accelerator_hours: float
    flop_delivered: float | None
    mfu: float | None


class TimeLedger:
    """Takes in a job's events, in their order."""

    def __init__(self, told: Callable[[int, Cause, float], None] | None = None) -> None:
        """Begin without events; `told`: called with what is booked: the commit's `seq` (0: none), cause and seconds."""
        self.usual = UsualSteps()
        self._told = told
        self._position = Position()
        #: the newest step that was ever committed, undone or not
        self._furthest = 0
        self._attendance = Attendance()
        self._flop_per_sample = self._peak_flop_per_s = 0.0
        self._start: float | None = None
        self._now = 0.0
        self._booked = dict.fromkeys(Cause, 0.0)
        self._settled = dict.fromkeys(Cause, 0.0)
        #: seconds for which training stood for checkpoints, to be taken from the steps that come
        self._stalled = 0.0
        self._open = Span(0.0)
        self._world = 0
        self._waiting_since: float | None = None
        #: that has ended, and of which the next event may say more
        self._closed: tuple[Span, float] | None = None
        #: that came before a usual step was known
        self._kept: list[tuple[Span, float]] = []

    @property
    def step(self) -> int:
        """The newest committed step that no roll-back undid."""
        return self._position.step

    def take(self, event: ReadEvent) -> None:
        """Take in one event."""
        if self._start is None:
            self._start = self._now = event.time
            self._open = Span(event.time)
            self._waiting_since = event.time  # the first generation waits for its nodes
        self._now = max(self._now, event.time)
        if isinstance(event, StepCommitted):
            self._settle()
            self._commit(event)
        else:
            self._attendance.take(event, self._now)
            if isinstance(event, Recovered | Rebalanced):
                self._tell_closed(event)
            self._settle()
            self._mark(event)
        self._position = self._position.after(event)
        self._furthest = max(self._furthest, self._position.step)

    def account(self, now: float | None = None) -> TimeAccount:
        """Return where the job stands; what is under way is booked as what it looks like now.

        Args:
            now: unix seconds; None: the time of the newest event.
        """
        now = self._now if now is None else max(now, self._now)
        wall = 0.0 if self._start is None else now - self._start
        seconds = self._seconds(now)
        node_s, worker_s = self._attendance.until(now)
        full, samples = self.usual.full, self._position.samples
        possible = wall * self._position.step_samples / full if full else 0.0
        flop, peak = samples * self._flop_per_sample, self._peak_flop_per_s * worker_s
        return TimeAccount(
            wall_s=wall,
            seconds=seconds,
            ettr=(seconds[Cause.EFFECTIVE] + seconds[Cause.SUB_HEALTHY]) / wall if wall > 0 else 0.0,
            goodput=samples / possible if possible > 0 else None,
            full_world=self.usual.full_world,
            full_step_s=full,
            node_hours=node_s / 3600,
            accelerator_hours=worker_s / 3600,
            flop_delivered=flop if self._flop_per_sample else None,
            mfu=flop / peak if self._flop_per_sample and peak else None,
        )

    def settled(self, now: float | None = None) -> Mapping[Cause, float]:
        """Return the seconds of which the cause is known for good, for counters: none is less than it was.

        Args:
            now: as for `account`.
        """
        now = self._now if now is None else max(now, self._now)
        waited = self._open.waited + sum(span.waited for span, _ in self._kept)
        if self._closed is not None:
            waited += self._closed[0].waited
        if self._waiting_since is not None:
            waited += max(0.0, now - max(self._waiting_since, self._open.began))
        for cause, seconds in self._booked.items():
            known = seconds + waited if cause is Cause.WAITING else seconds
            self._settled[cause] = max(self._settled[cause], known)
        return self._settled

    # ---- what is under way ----

    def _mark(self, event: ReadEvent) -> None:
        span = self._open
        match event:
            case JobStarted() | CoordinatorRestarted():
                self._begin(event)
            case FlopCounted():
                self._flop_per_sample = event.flop_per_sample
            case JournalRepaired():
                span.lost = True
                end = max(event.step_time, span.began)
                self._closed, self._open, self._waiting_since = (span, end), Span(end), None
            case FailureDetected():
                if span.failed is None:
                    span.failed, span.detected = event.time - event.after_s, event.time
            case JobWaiting():
                self._waiting_since = event.time if self._waiting_since is None else self._waiting_since
            case GenerationStarted():
                self._wait_is_over(event.time)
                self._world = event.world_size
                if event.reason not in ("join", "rebalance"):  # (these say with their first step what they have cost)
                    span.generation, span.saves = event.time, event.reason == "save"
            case CheckpointSaved() | SnapshotSaved():
                self._stalled += max(0.0, event.stall_s)
            case _:
                pass

    def _begin(self, event: JobStarted | CoordinatorRestarted) -> None:
        self._flop_per_sample, self._peak_flop_per_s = event.flop_per_sample, event.peak_flop_per_s
        if isinstance(event, CoordinatorRestarted):
            self._open.back = event.time

    def _commit(self, event: StepCommitted) -> None:
        span, end = self._open, max(event.time, self._open.began)
        self._world = event.world_size
        if self._waiting_since is not None and self._waiting_since <= end:
            # Who was waited for came back to a later coordinator as it was: that took no other generation.
            began = max(self._waiting_since, end - (self.usual.of(event.world_size) or 0.0))
            self._wait_is_over(began)
            span.generation = began
        since = next((time for time in (span.generation, span.detected, span.back) if time is not None), None)
        if since is not None and end < since:
            # It is told of late: what is known of a recovery is of the step after it, or of a later one.
            closed, self._open = Span(span.began), replace(span, began=end)
        elif span.generation is None:
            closed, self._open = Span(span.began), Span(end)  # whatever failed, or was away, took no member along
        else:
            closed, self._open = span, Span(end)
        closed.world, closed.again, closed.seq = event.world_size, event.step <= self._furthest, event.seq
        closed.paused = event.paused_s
        self._closed = closed, end

    def _wait_is_over(self, now: float) -> None:
        if self._waiting_since is not None:
            self._open.waited += max(0.0, now - max(self._waiting_since, self._open.began))
            self._waiting_since = None

    def _tell_closed(self, event: Recovered | Rebalanced) -> None:
        """The span that has just ended was a recovery's last, or the first after a swap."""
        if self._closed is None:
            return
        span, end = self._closed
        if isinstance(event, Rebalanced):
            span.swap = Cause.REBALANCE
        elif span.generation is None:
            span.swap = Cause.TRANSITION if event.action == "grow" else None
        else:
            span.regrouped = end - event.redo_s
            if span.failed is None:  # the generation broke without anybody's failure
                span.failed, span.detected = end - event.down_s, end - event.down_s + event.detect_s

    # ---- the books ----

    def close(self) -> None:
        """No further event comes: book all, what is under way too."""
        self._settle()
        for span, end in [*self._kept, (self._tail(self._now), self._now)]:
            self._book(self._booked, span, end)
        self._kept.clear()
        self._open = Span(self._now)

    def _settle(self) -> None:
        """Book what has ended: nothing more will be said of it."""
        if self._closed is None:
            return
        (span, end), self._closed = self._closed, None
        paused = span.paused > 0.0
        seconds, plain = max(0.0, end - span.began - span.paused), not (span.disturbed or span.again)
        if plain:
            self.usual.note(span.world, seconds)
        full = self.usual.full
        if plain and not paused and full is not None and seconds <= LATE * full and not self._kept:
            self._enter(span.seq, Cause.EFFECTIVE, seconds)  # (what nearly all are; `split` says the same of them)
            return
        self._kept.append((span, end))
        if self.usual.full is not None or len(self._kept) > _MOST_HELD:
            for kept, ended in self._kept:
                self._book(self._booked, kept, ended)
            self._kept.clear()

    def _book(self, books: dict[Cause, float], span: Span, end: float) -> None:
        for cause, seconds in split(span, end, self.usual.of(span.world), self.usual.full):
            if books is self._booked:
                self._enter(span.seq, cause, seconds)
            else:
                books[cause] += seconds

    def _enter(self, seq: int, cause: Cause, seconds: float) -> None:
        """Enter what is known for good; what checkpoints have held up is taken from what trains."""
        paid = 0.0
        if self._stalled and cause is Cause.EFFECTIVE:
            paid = min(seconds, self._stalled)
            self._stalled -= paid
            self._booked[Cause.CHECKPOINT] += paid
        self._booked[cause] += seconds - paid
        if self._told is not None:
            self._told(seq, cause, seconds)

    def _seconds(self, now: float) -> dict[Cause, float]:
        """Return the seconds per cause up to `now`, what is kept and open among them."""
        books = dict(self._booked)
        closed = [self._closed] if self._closed is not None else []
        for span, end in [*self._kept, *closed, (self._tail(now), max(now, self._open.began))]:
            self._book(books, span, end)
        return books

    def _tail(self, now: float) -> Span:
        """Return what is under way as if it ended now; what comes after a last step is no part of a next one."""
        tail = replace(self._open, world=self._world, swap=Cause.TRANSITION)
        if self._waiting_since is not None:
            tail.waited += max(0.0, now - max(self._waiting_since, tail.began))
            tail.generation = now if tail.failed is None else tail.generation
        return tail
