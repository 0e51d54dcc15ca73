"""What a job's events add up to: progress, recoveries and their cost, and whether every sample counted once."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from holdfast.protocol.events import (
    FailureDetected,
    GenerationStarted,
    JobFailed,
    JobFinished,
    JobStarted,
    JobWaiting,
    NodesJoined,
    ReadEvent,
    Rebalanced,
    Recovered,
    RolledBack,
    StepCommitted,
    name_of,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class RecoverySummary:
    """One `recovered` event. `extra_s`: what it cost beyond an undisturbed step; `nodes`: who came or went."""

    time: float
    action: str
    nodes: tuple[str, ...]
    state_source: str
    moved_bytes: int
    experts_moved: int
    down_s: float
    extra_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class JobReport:
    """A job in figures; times in seconds. `gaps`: steps that are missing or doubled, which must be none.

    `emulated_token_s`: seconds per token that expert computation was made to take, 0 where nothing was emulated.
    """

    job: str
    outcome: str
    started: float
    elapsed_s: float
    steps: int
    samples: int
    first_loss: float | None
    final_loss: float | None
    median_step_s: float
    #: share of the time since the first step that went into steps of usual length
    productive: float
    recoveries: tuple[RecoverySummary, ...]
    gaps: int
    #: of the steps, those at which the loss scale had the optimizer left alone
    skipped: int = 0
    #: placements of the experts that were switched to because of their loads
    rebalances: int = 0
    #: how long too few nodes were there
    waiting_s: float = 0.0
    emulated_token_s: float = 0.0


def committed_steps(events: Iterable[ReadEvent]) -> list[StepCommitted]:
    """Return the `step_committed` events that count: those undone by a roll-back are left out."""
    kept: list[StepCommitted] = []
    for event in events:
        if isinstance(event, RolledBack):
            kept = [step for step in kept if step.step <= event.to_step]
        elif isinstance(event, StepCommitted):
            kept.append(event)
    return kept


def make_report(events: Sequence[ReadEvent]) -> JobReport:
    """Add up a job's events."""
    steps = committed_steps(events)
    first = events[0]
    usual = statistics.median([step.step_s for step in steps[1:]]) if len(steps) > 1 else 0.0
    training = steps[-1].time - steps[0].time if steps else 0.0
    outcomes = [name_of(event) for event in events if isinstance(event, JobFinished | JobFailed)]
    numbers = [step.step for step in steps]
    return JobReport(
        job=first.job,
        outcome=outcomes[-1].removeprefix("job_") if outcomes else "running",
        started=first.time,
        elapsed_s=events[-1].time - first.time,
        steps=len(steps),
        samples=sum(step.samples for step in steps),
        first_loss=steps[0].loss if steps else None,
        final_loss=steps[-1].loss if steps else None,
        median_step_s=usual,
        productive=min(1.0, usual * (len(steps) - 1) / training) if training > 0 else 0.0,
        recoveries=tuple(_recoveries(events, usual)),
        skipped=sum(step.skipped for step in steps),
        rebalances=sum(isinstance(event, Rebalanced) for event in events),
        waiting_s=_waiting_s(events),
        emulated_token_s=first.emulated_token_s if isinstance(first, JobStarted) else 0.0,
        gaps=sum(number != place for place, number in enumerate(numbers, numbers[0] if numbers else 1)),
    )


def _waiting_s(events: Sequence[ReadEvent]) -> float:
    """Return for how long the job stood still for want of nodes, up to the last event."""
    total, since = 0.0, None
    for event in events:
        if isinstance(event, JobWaiting) and since is None:
            since = event.time
        elif isinstance(event, GenerationStarted) and since is not None:
            total, since = total + event.time - since, None
    return total if since is None else total + events[-1].time - since


def _recoveries(events: Sequence[ReadEvent], usual: float) -> list[RecoverySummary]:
    found: list[RecoverySummary] = []
    involved: list[str] = []
    for event in events:
        match event:
            case FailureDetected():
                involved.append(event.node)
            case NodesJoined():
                involved += event.names
            case GenerationStarted(reason="start"):
                involved = []
            case Recovered():
                found.append(_recovery(event, involved, usual))
                involved = []
            case _:
                pass
    return found


def _recovery(event: Recovered, involved: list[str], usual: float) -> RecoverySummary:
    return RecoverySummary(
        time=event.time,
        action=event.action,
        nodes=tuple(dict.fromkeys(involved)),
        state_source=event.state_source,
        moved_bytes=event.moved_bytes,
        experts_moved=event.experts_moved,
        down_s=event.down_s,
        extra_s=event.down_s - usual,
    )
