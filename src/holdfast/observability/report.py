"""Report of a job from its events: progress, recoveries and their costs, and time by cause."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from holdfast.observability.accounts.time_ledger import TimeAccount, TimeLedger
from holdfast.observability.history.audit import FindingSubject, audit_events
from holdfast.observability.history.episodes import Episode, episodes
from holdfast.protocol.events import (
    FailureDetected,
    JobStarted,
    ReadEvent,
    Rebalanced,
    Recovered,
    RolledBack,
    StepCommitted,
)

#: Reasons of generations that nodes left without a failure.
DRAIN, MOVE = "drain", "move"


@dataclass(frozen=True, kw_only=True, slots=True)
class RecoverySummary:
    """One `recovered` event."""

    time: float
    action: str
    #: "drain" or "move" if nodes left without a failure, "rebalance" if micro-batches were redistributed, else
    #: `action`.
    cause: str
    #: The nodes that failed, joined or left.
    nodes: tuple[str, ...]
    state_source: str
    moved_bytes: int
    experts_moved: int
    down_s: float
    #: Down time beyond the usual step time, in seconds.
    extra_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class JobReport:
    """Key figures of a job. Times are in seconds."""

    job: str
    outcome: str
    started: float
    elapsed_s: float
    steps: int
    samples: int
    first_loss: float | None
    final_loss: float | None
    median_step_s: float
    recoveries: tuple[RecoverySummary, ...]
    #: Number of missing or duplicate steps; 0 in a sound journal.
    gaps: int
    #: The time by cause, up to the newest event.
    time: TimeAccount
    #: Steps that changed no parameter.
    skipped: int = 0
    #: Steps that were skipped because the loss scale was too large.
    overflows: int = 0
    #: Number of changes of the expert placement because of expert loads.
    rebalances: int = 0
    #: Number of redistributions of micro-batches because a node became slow or fast again.
    redealt: int = 0
    #: Emulated seconds of expert computation per token; 0 without emulation.
    emulated_token_s: float = 0.0
    #: Emulated seconds per micro-batch; 0 without emulation.
    emulated_micro_batch_s: float = 0.0


def committed_steps(events: Iterable[ReadEvent]) -> list[StepCommitted]:
    """Return the `step_committed` events that no roll-back undid."""
    kept: list[StepCommitted] = []
    for event in events:
        if isinstance(event, RolledBack):
            kept = [step for step in kept if step.step <= event.to_step]
        elif isinstance(event, StepCommitted):
            kept.append(event)
    return kept


def make_report(events: Sequence[ReadEvent]) -> JobReport:
    """Return the report of a job from its events, of which there must be at least one.

    It combines the steps that count, an audit, one entry per recovery, and the account of the job's time. The median
    step time leaves out the first step.
    """
    steps = committed_steps(events)
    first, ledger = events[0], TimeLedger()
    for event in events:
        ledger.add_event(event)
    usual = statistics.median([step.step_s for step in steps[1:]]) if len(steps) > 1 else 0.0
    audited = audit_events(events)
    return JobReport(
        job=first.job,
        outcome=audited.outcome,
        started=first.time,
        elapsed_s=events[-1].time - first.time,
        steps=len(steps),
        samples=sum(step.samples for step in steps),
        first_loss=steps[0].loss if steps else None,
        final_loss=steps[-1].loss if steps else None,
        median_step_s=usual,
        recoveries=tuple(_recoveries(events, usual)),
        skipped=sum(step.skipped for step in steps),
        overflows=sum(step.overflow for step in steps),
        rebalances=sum(isinstance(event, Rebalanced) and event.experts_moved > 0 for event in events),
        redealt=sum(isinstance(event, Rebalanced) and not event.experts_moved for event in events),
        emulated_token_s=first.emulated_token_s if isinstance(first, JobStarted) else 0.0,
        emulated_micro_batch_s=first.emulated_micro_batch_s if isinstance(first, JobStarted) else 0.0,
        gaps=sum(finding.about is FindingSubject.STEP for finding in audited.findings),
        time=ledger.account(),
    )


def _recoveries(events: Sequence[ReadEvent], usual: float) -> Iterator[RecoverySummary]:
    """Yield a summary of each episode that ended with a `recovered` event; `usual`: median step time in seconds."""
    for episode in episodes(events):
        told = episode.recovered
        if isinstance(told, Recovered):
            yield _recovery(told, *_cause(episode, told), usual)


def _cause(episode: Episode, told: Recovered) -> tuple[str, tuple[str, ...]]:
    """Return the cause of a recovery, and the nodes that failed, joined or left.

    The cause is the recovery's action; if no node failed and the last generation is a drain or a move, it is that
    reason.
    """
    generations = episode.generations
    failed = any(isinstance(event, FailureDetected) for event in episode.events)
    if failed or not generations or generations[-1].reason not in (DRAIN, MOVE):
        return told.action, episode.nodes
    left = [node for node in episode.members if node not in generations[-1].members]
    return generations[-1].reason, (*left, *(node for node in episode.nodes if node not in left))


def _recovery(event: Recovered, cause: str, nodes: tuple[str, ...], usual: float) -> RecoverySummary:
    return RecoverySummary(
        time=event.time,
        action=event.action,
        cause=cause,
        nodes=nodes,
        state_source=event.state_source,
        moved_bytes=event.moved_bytes,
        experts_moved=event.experts_moved,
        down_s=event.down_s,
        extra_s=event.down_s - usual,
    )
