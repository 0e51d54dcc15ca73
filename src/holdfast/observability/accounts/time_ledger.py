"""Ledger of a job's time, computed from its events: seconds per cause, ETTR, goodput, FLOP, node-hours.

Reports, metrics and the coordinator's status use it. Every reader of the whole journal computes the same values.
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

#: Maximum number of spans that are kept until a usual step time is known.
_MOST_HELD = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeAccount:
    """A job's time by cause, and its efficiency. None means unknown."""

    #: Seconds since the first event.
    wall_s: float
    #: Seconds per cause; their sum is `wall_s`.
    seconds: Mapping[Cause, float]
    #: Share of the time that trained, effective or sub-healthy.
    ettr: float
    #: Committed samples, divided by the samples of the undisturbed full job in `wall_s`.
    goodput: float | None
    #: Workers of the full job, which is the largest world that has trained.
    full_world: int
    #: Usual step time of the full job.
    full_step_s: float | None
    node_hours: float
    #: Hours of all workers that were present.
    accelerator_hours: float
    flop_delivered: float | None
    #: Delivered FLOP, divided by the FLOP that the accelerators could have delivered.
    mfu: float | None


class TimeLedger:
    """Books the time of a job by cause, from its events in order."""

    def __init__(self, told: Callable[[int, Cause, float], None] | None = None) -> None:
        """Start without events.

        Args:
            told: called for each booked time with the `seq` of the commit that ends it, cause and seconds.
                The `seq` is 0 for time after the newest commit.
        """
        self.usual = UsualSteps()
        self._told = told
        self._position = Position()
        #: The highest step that was ever committed, undone or not.
        self._furthest = 0
        self._attendance = Attendance()
        self._flop_per_sample = self._peak_flop_per_s = 0.0
        self._start: float | None = None
        self._now = 0.0
        self._booked = dict.fromkeys(Cause, 0.0)
        self._settled = dict.fromkeys(Cause, 0.0)
        #: Seconds of checkpoint stalls that will be subtracted from the next steps.
        self._stalled = 0.0
        self._open = Span(0.0)
        self._world = 0
        self._waiting_since: float | None = None
        #: The span that ended last, with its end. The next event may add facts about it.
        self._closed: tuple[Span, float] | None = None
        #: Spans with their ends that wait until a usual step time is known.
        self._kept: list[tuple[Span, float]] = []

    @property
    def step(self) -> int:
        """The newest committed step that no roll-back undid."""
        return self._position.step

    def add_event(self, event: ReadEvent) -> None:
        """Update the ledger from an event."""
        if self._start is None:
            self._start = self._now = event.time
            self._open = Span(event.time)
            self._waiting_since = event.time  # The first generation waits for its nodes.
        self._now = max(self._now, event.time)
        if isinstance(event, StepCommitted):
            self._book_closed_span()
            self._commit(event)
        else:
            self._attendance.add_event(event, self._now)
            if isinstance(event, Recovered | Rebalanced):
                self._tell_closed(event)
            self._book_closed_span()
            self._mark(event)
        self._position = self._position.after(event)
        self._furthest = max(self._furthest, self._position.step)

    def account(self, now: float | None = None) -> TimeAccount:
        """Return the account up to `now`. The span under way is classified by the facts known so far.

        Args:
            now: unix seconds; None for the time of the newest event.
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
        """Return the seconds with a final cause, for counters. No value ever decreases.

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

    # ---- The span under way ----

    def _mark(self, event: ReadEvent) -> None:
        span = self._open
        match event:
            case JobStarted() | CoordinatorRestarted():
                self._note_start(event)
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
                # A join or rebalance reports its cost with the first step after it.
                if event.reason not in ("join", "rebalance"):
                    span.generation, span.saves = event.time, event.reason == "save"
            case CheckpointSaved() | SnapshotSaved():
                self._stalled += max(0.0, event.stall_s)
            case _:
                pass

    def _note_start(self, event: JobStarted | CoordinatorRestarted) -> None:
        self._flop_per_sample, self._peak_flop_per_s = event.flop_per_sample, event.peak_flop_per_s
        if isinstance(event, CoordinatorRestarted):
            self._open.back = event.time

    def _commit(self, event: StepCommitted) -> None:
        span, end = self._open, max(event.time, self._open.began)
        self._world = event.world_size
        if self._waiting_since is not None and self._waiting_since <= end:
            # The missing nodes reconnected to a later coordinator unchanged, so no new generation was needed.
            began = max(self._waiting_since, end - (self.usual.of(event.world_size) or 0.0))
            self._wait_is_over(began)
            span.generation = began
        since = next((time for time in (span.generation, span.detected, span.back) if time is not None), None)
        if since is not None and end < since:
            # The event arrived late: the known facts of a recovery belong to a later step.
            closed, self._open = Span(span.began), replace(span, began=end)
        elif span.generation is None:
            closed, self._open = Span(span.began), Span(end)  # The failure or disconnect removed no member.
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
        """Add the facts of a recovery or rebalance to the span that ended last."""
        if self._closed is None:
            return
        span, end = self._closed
        if isinstance(event, Rebalanced):
            span.swap = Cause.REBALANCE
        elif span.generation is None:
            span.swap = Cause.TRANSITION if event.action == "grow" else None
        else:
            span.regrouped = end - event.redo_s
            if span.failed is None:  # The generation broke without a detected failure.
                span.failed, span.detected = end - event.down_s, end - event.down_s + event.detect_s

    # ---- Booking ----

    def close(self) -> None:
        """Book all time, including the span under way. No event may follow."""
        self._book_closed_span()
        for span, end in [*self._kept, (self._tail(self._now), self._now)]:
            self._book(self._booked, span, end)
        self._kept.clear()
        self._open = Span(self._now)

    def _book_closed_span(self) -> None:
        """Book the span that ended last. No later event adds facts about it."""
        if self._closed is None:
            return
        (span, end), self._closed = self._closed, None
        paused = span.paused > 0.0
        seconds, plain = max(0.0, end - span.began - span.paused), not (span.disturbed or span.again)
        if plain:
            self.usual.note(span.world, seconds)
        full = self.usual.full
        if plain and not paused and full is not None and seconds <= LATE * full and not self._kept:
            self._enter(span.seq, Cause.EFFECTIVE, seconds)  # Fast path for usual steps, with the result of `split`.
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
        """Book final seconds. Checkpoint stalls are subtracted from effective time."""
        paid = 0.0
        if self._stalled and cause is Cause.EFFECTIVE:
            paid = min(seconds, self._stalled)
            self._stalled -= paid
            self._booked[Cause.CHECKPOINT] += paid
        self._booked[cause] += seconds - paid
        if self._told is not None:
            self._told(seq, cause, seconds)

    def _seconds(self, now: float) -> dict[Cause, float]:
        """Return the seconds per cause up to `now`, including kept and open spans."""
        books = dict(self._booked)
        closed = [self._closed] if self._closed is not None else []
        for span, end in [*self._kept, *closed, (self._tail(now), max(now, self._open.began))]:
            self._book(books, span, end)
        return books

    def _tail(self, now: float) -> Span:
        """Return the span under way as if it ended now. Time beyond a usual step counts as transition."""
        tail = replace(self._open, world=self._world, swap=Cause.TRANSITION)
        if self._waiting_since is not None:
            tail.waited += max(0.0, now - max(self._waiting_since, tail.began))
            tail.generation = now if tail.failed is None else tail.generation
        return tail
