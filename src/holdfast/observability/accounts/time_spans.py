"""Divide the seconds between two committed steps among causes (Unicron, Eq. 1)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from holdfast.observability.accounts.usual_steps import LATE


class Cause(StrEnum):
    """The cause to which a second of a job is booked."""

    EFFECTIVE = "effective"  # steps, as fast as the full job's
    DETECTION = "detection"  # from a failure to its detection
    TRANSITION = "transition"  # to another generation: stop, decide, regroup, join, start
    REDONE = "redone"  # computed again: micro-batches, or steps after a roll-back
    CHECKPOINT = "checkpoint"  # training stopped while state was copied or saved
    REBALANCE = "rebalance"  # experts moved
    WAITING = "waiting"  # for nodes, or for a coordinator
    PAUSED = "paused"  # the script paused training, or evaluated
    SUB_HEALTHY = "sub_healthy"  # training slower than the full job, with fewer or slow workers
    UNKNOWN = "unknown"  # the journal has lost its events


@dataclass(slots=True)
class Span:
    """The known facts about the time from one commit to the next. Times are unix seconds, None if it did not happen."""

    #: Time of the first commit.
    began: float
    #: Time of the first failure.
    failed: float | None = None
    #: Time at which this failure was detected.
    detected: float | None = None
    #: Start of the newest generation that followed from a failure, a start or a roll-back.
    generation: float | None = None
    #: Time at which the members of that generation had formed their group.
    regrouped: float | None = None
    #: Time at which a coordinator restarted.
    back: float | None = None
    #: Seconds of waiting for nodes.
    waited: float = 0.0
    #: Cause of the cost of a change at the step boundary before the span.
    swap: Cause | None = None
    #: Seconds for which the script paused.
    paused: float = 0.0
    #: Whether the generation saves the job before it ends.
    saves: bool = False
    #: Whether the step had been committed before.
    again: bool = False
    #: Whether the journal lost events of the span.
    lost: bool = False
    #: World size of the commit that ends the span.
    world: int = 0
    #: Event number of the commit that ends the span.
    seq: int = 0

    @property
    def disturbed(self) -> bool:
        """Whether a failure, generation, swap or lost event disturbed the step."""
        return self.generation is not None or self.failed is not None or self.swap is not None or self.lost


def split(span: Span, end: float, usual_s: float | None, full_s: float | None) -> Iterator[tuple[Cause, float]]:
    """Yield the seconds of a span by cause. Their sum is exactly the time from its start to `end`.

    Args:
        usual_s: usual step time of the world that ends the span; None if unknown.
        full_s: usual step time of the full job; None if unknown.
            Without usual times, all time outside of a recovery counts as training.
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
        # Training had stopped before the detection. Without a coordinator, no detection was possible.
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
    # After a failure, the excess was computed again. After a start, it is the extra time of the first step.
    excess = before + work - trained
    yield (Cause.REDONE if span.failed is not None else Cause.TRANSITION), excess


def _parts(span: Span, end: float) -> tuple[float, ...]:
    """Return the seconds up to the failure, its detection, the decision, the regrouping, and the end, in this order.

    A part is 0 if the moment at its end is unknown or not later than the one before. Without a known failure, a
    coordinator's restart counts as one. Without a generation, the decision takes all time to the end.
    """
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
    """Yield the seconds of a step without a failure or new generation: paused, cost of a swap, and trained.

    After a swap, such as a rebalance, the time beyond the usual step is the cost of the swap.
    """
    paused, total = min(span.paused, total), total - min(span.paused, total)
    yield Cause.PAUSED, paused
    trained = total
    if span.swap is not None and usual_s is not None:
        trained = min(total, usual_s)
        yield span.swap, total - trained
    yield from _trained(trained, again=span.again, full_s=full_s)


def _trained(seconds: float, *, again: bool, full_s: float | None) -> Iterator[tuple[Cause, float]]:
    """Yield training time as redone if the step was committed before (`again`), else as effective and sub-healthy.

    Sub-healthy is the excess over the step time of the full job, if the step was later than `LATE` times that.
    """
    if again:
        yield Cause.REDONE, seconds
        return
    effective = seconds if full_s is None or seconds <= LATE * full_s else full_s
    yield Cause.EFFECTIVE, effective
    yield Cause.SUB_HEALTHY, seconds - effective


def _less(seconds: float, off: float) -> tuple[float, float]:
    """Subtract `off` from `seconds` as far as possible. Return the rest of both."""
    taken = min(seconds, off)
    return seconds - taken, off - taken
