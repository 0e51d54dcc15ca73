"""Where the seconds from one committed step to the next went (Unicron, Eq. 1): pure arithmetic of one span."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from holdfast.observability.accounts.usual_steps import LATE


class Cause(StrEnum):
    """What a second of a job's went into."""

    EFFECTIVE = "effective"  # steps, as fast as the full job's
    DETECTION = "detection"  # something had failed, and nobody had seen it
    TRANSITION = "transition"  # to another generation: stopped, decided, regrouped, joined, started
    REDONE = "redone"  # computed once more: micro-batches, or steps after a roll-back
    CHECKPOINT = "checkpoint"  # training stood while state was copied or saved
    REBALANCE = "rebalance"  # experts moved
    WAITING = "waiting"  # for nodes, or for a coordinator
    PAUSED = "paused"  # the script was busy with something of its own, or evaluated
    SUB_HEALTHY = "sub_healthy"  # training, slower than the full job: fewer workers, or late ones
    UNKNOWN = "unknown"  # the journal has lost its events


@dataclass(slots=True)
class Span:
    """What is known of the time from one commit (`began`) to the next; unix seconds, None where it did not happen.

    failed, detected: the first failure, and when it was seen. generation: when the newest generation began, which
    followed from a failure, a start or a roll-back. regrouped: when its members stood in it. back: when a coordinator
    came back. waited: seconds for want of nodes. swap: what a change at the boundary before it cost is told as this.
    paused: seconds for which the script had paused. again: the step had been committed before. lost: its events are.
    world, seq: of the commit that ends it.
    """

    began: float
    failed: float | None = None
    detected: float | None = None
    generation: float | None = None
    regrouped: float | None = None
    back: float | None = None
    waited: float = 0.0
    swap: Cause | None = None
    paused: float = 0.0
    saves: bool = False
    again: bool = False
    lost: bool = False
    world: int = 0
    seq: int = 0

    @property
    def disturbed(self) -> bool:
        """True unless it is a step as steps should be."""
        return self.generation is not None or self.failed is not None or self.swap is not None or self.lost


def split(span: Span, end: float, usual_s: float | None, full_s: float | None) -> Iterator[tuple[Cause, float]]:
    """Yield what the seconds from a span's begin to `end` went into; together they are exactly those.

    Args:
        usual_s: a step of the world that ends it. full_s: a step of the full job. None: not known, and then all that
            is no part of a recovery is training.
    """
    total = end - span.began
    if span.lost:
        yield Cause.UNKNOWN, total
        return
    if span.failed is None and span.generation is None:
        yield from _step(span, total, usual_s, full_s)
        return
    before, detection, decide, regroup, work = _parts(span, end)
    waited, rest = min(span.waited, before + detection + decide), span.waited
    decide, rest = _less(decide, rest)
    detection, rest = _less(detection, rest)
    before, rest = _less(before, rest)
    if usual_s is not None and before > LATE * usual_s:
        # It stood before anybody knew; while no coordinator was there, nobody could.
        yield (Cause.DETECTION if span.back is None else Cause.WAITING), before - usual_s
        before = usual_s
    yield Cause.WAITING, waited
    yield Cause.DETECTION, detection
    yield Cause.TRANSITION, decide + regroup
    if span.saves:
        yield Cause.CHECKPOINT, work
        work = 0.0
    trained = before + work if usual_s is None else min(before + work, usual_s)
    yield from _trained(trained, again=span.again, full_s=full_s)
    # What comes after a failure is computed once more; what comes after a start is its first step's extra.
    excess = before + work - trained
    yield (Cause.REDONE if span.failed is not None else Cause.TRANSITION), excess


def _parts(span: Span, end: float) -> tuple[float, ...]:
    """Return the seconds before a failure, until it was seen, decided, regrouped, and to the end; in this order."""
    failed = next((time for time in (span.failed, span.back) if time is not None), span.began)
    detected = failed if span.detected is None else span.detected
    generation = end if span.generation is None else span.generation
    regrouped = generation if span.regrouped is None else span.regrouped
    at, seconds = span.began, list[float]()
    for time in (failed, detected, generation, regrouped, end):
        reached = min(max(at, time), end)
        seconds.append(reached - at)
        at = reached
    return tuple(seconds)


def _step(span: Span, total: float, usual_s: float | None, full_s: float | None) -> Iterator[tuple[Cause, float]]:
    """Split a step without a recovery; where a swap came before it, what is beyond a usual step is the swap's."""
    paused, total = min(span.paused, total), total - min(span.paused, total)
    yield Cause.PAUSED, paused
    trained = total
    if span.swap is not None and usual_s is not None:
        trained = min(total, usual_s)
        yield span.swap, total - trained
    yield from _trained(trained, again=span.again, full_s=full_s)


def _trained(seconds: float, *, again: bool, full_s: float | None) -> Iterator[tuple[Cause, float]]:
    """Split time that trains: what the full job would have taken, and what is beyond."""
    if again:
        yield Cause.REDONE, seconds
        return
    effective = seconds if full_s is None or seconds <= LATE * full_s else full_s
    yield Cause.EFFECTIVE, effective
    yield Cause.SUB_HEALTHY, seconds - effective


def _less(seconds: float, off: float) -> tuple[float, float]:
    """Take off what there is; return what is left of both."""
    taken = min(seconds, off)
    return seconds - taken, off - taken
