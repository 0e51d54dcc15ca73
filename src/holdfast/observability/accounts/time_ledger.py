"""Ledger of a job's time, computed from its events: seconds per cause, ETTR, goodput, FLOP, node-hours.

Reports, metrics and the coordinator's status use it. Every reader of the whole journal computes the same values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from holdfast.observability.accounts.node_time import NodeTime
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

    def __init__(self, on_booked: Callable[[int, Cause, float], None] | None = None) -> None:
        """Start without events.

        Args:
            on_booked: called for each booked time with the `seq` of the commit that ends it, cause and seconds.
                The `seq` is 0 for time after the newest commit.
        """
        self.usual = UsualSteps()
        self._on_booked = on_booked
        self._position = Position()
        #: The highest step that was ever committed, undone or not.
        self._furthest = 0
        self._node_time = NodeTime()
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
        """Update the ledger from the next event.

        A commit ends the span under way. A `recovered` or `rebalanced` event adds facts to the span that the previous
        commit ended; any other event to the span under way. Therefore a span is only booked when the event after its
        commit is known.
        """
        if self._start is None:
            self._start = self._now = event.time
            self._open = Span(event.time)
            self._waiting_since = event.time  # The first generation waits for its nodes.
        self._now = max(self._now, event.time)
        if isinstance(event, StepCommitted):
            self._book_closed_span()
            self._close_span(event)
        else:
            self._node_time.add_event(event, self._now)
            if isinstance(event, Recovered | Rebalanced):
                self._add_recovery_facts(event)
            self._book_closed_span()
            self._apply_to_open_span(event)
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
        node_s, worker_s = self._node_time.until(now)
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
        """Return the seconds by cause that later events will not move to another cause, for counters.

        No value ever decreases.

        They are the booked seconds and all time spent waiting so far. The mapping is the ledger's own, and the next
        call changes it.

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

    def _apply_to_open_span(self, event: ReadEvent) -> None:
        """Record an event other than a commit in the span under way: a failure, wait, generation or checkpoint stall.

        `journal_repaired` ends the span as lost. Starts of the job and of coordinators set the FLOP figures.
        """
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
                self._end_wait(event.time)
                self._world = event.world_size
                # A join or rebalance reports its cost with the first step after it.
                if event.reason not in ("join", "rebalance"):
                    span.generation, span.saves = event.time, event.reason == "save"
            case CheckpointSaved() | SnapshotSaved():
                self._stalled += max(0.0, event.stall_s)
            case _:
                pass

    def _note_start(self, event: JobStarted | CoordinatorRestarted) -> None:
        """Take the FLOP figures from the event. If a coordinator restarted, record its time in the span under way."""
        self._flop_per_sample, self._peak_flop_per_s = event.flop_per_sample, event.peak_flop_per_s
        if isinstance(event, CoordinatorRestarted):
            self._open.back = event.time

    def _close_span(self, event: StepCommitted) -> None:
        """End the span under way at a committed step, and start the next one.

        If the commit arrived late, after a later failure or generation, or if no generation started in the span, the
        facts of a recovery are not part of the ended span. A wait that no generation ended is over one usual step
        before the commit.
        """
        span, end = self._open, max(event.time, self._open.began)
        self._world = event.world_size
        if self._waiting_since is not None and self._waiting_since <= end:
            # The missing nodes reconnected to a later coordinator unchanged, so no new generation was needed.
            began = max(self._waiting_since, end - (self.usual.of(event.world_size) or 0.0))
            self._end_wait(began)
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

    def _end_wait(self, now: float) -> None:
        """Add the time since the job started to wait to the span under way. Do nothing if it does not wait."""
        if self._waiting_since is not None:
            self._open.waited += max(0.0, now - max(self._waiting_since, self._open.began))
            self._waiting_since = None

    def _add_recovery_facts(self, event: Recovered | Rebalanced) -> None:
        """Add the facts of a recovery or rebalance to the span that ended last. Do nothing without such a span.

        After a recovery with a new generation, these are the end of the regrouping, and the failure if it was not
        detected. A rebalance, or a node that joined without a new generation, only marks the span as slowed by it.
        """
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
        """Book the span that ended last, if there is one. No later event adds facts about it.

        An undisturbed step counts for the usual step time. Until a usual time is known, spans are kept, and at most
        `_MOST_HELD` of them.
        """
        if self._closed is None:
            return
        (span, end), self._closed = self._closed, None
        paused = span.paused > 0.0
        seconds, plain = max(0.0, end - span.began - span.paused), not (span.disturbed or span.again)
        if plain:
            self.usual.note(span.world, seconds)
        full = self.usual.full
        if plain and not paused and full is not None and seconds <= LATE * full and not self._kept:
            self._book_final(
                span.seq, Cause.EFFECTIVE, seconds
            )  # Fast path for usual steps, with the result of `split`.
            return
        self._kept.append((span, end))
        if self.usual.full is not None or len(self._kept) > _MOST_HELD:
            for kept, ended in self._kept:
                self._book(self._booked, kept, ended)
            self._kept.clear()

    def _book(self, books: dict[Cause, float], span: Span, end: float) -> None:
        """Split a span by cause, and add its seconds to `books`: the ledger's final ones, or a copy for an account."""
        for cause, seconds in split(span, end, self.usual.of(span.world), self.usual.full):
            if books is self._booked:
                self._book_final(span.seq, cause, seconds)
            else:
                books[cause] += seconds

    def _book_final(self, seq: int, cause: Cause, seconds: float) -> None:
        """Book seconds that no longer change. Seconds of checkpoint stalls that are not booked yet become checkpoint
        time instead of effective time.

        `on_booked` gets all of the seconds under `cause`, as if none had been moved.
        """
        paid = 0.0
        if self._stalled and cause is Cause.EFFECTIVE:
            paid = min(seconds, self._stalled)
            self._stalled -= paid
            self._booked[Cause.CHECKPOINT] += paid
        self._booked[cause] += seconds - paid
        if self._on_booked is not None:
            self._on_booked(seq, cause, seconds)

    def _seconds(self, now: float) -> dict[Cause, float]:
        """Return the seconds per cause up to `now`, including kept and open spans."""
        books = dict(self._booked)
        closed = [self._closed] if self._closed is not None else []
        for span, end in [*self._kept, *closed, (self._tail(now), max(now, self._open.began))]:
            self._book(books, span, end)
        return books

    def _tail(self, now: float) -> Span:
        """Return a copy of the span under way as if it ended now. Time beyond a usual step counts as transition."""
        tail = replace(self._open, world=self._world, swap=Cause.TRANSITION)
        if self._waiting_since is not None:
            tail.waited += max(0.0, now - max(self._waiting_since, tail.began))
            tail.generation = now if tail.failed is None else tail.generation
        return tail
