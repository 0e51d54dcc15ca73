"""Summary of a job that replayed an availability trace."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from holdfast.observability.report import committed_steps
from holdfast.protocol.events import JobFailed, JobFinished, NodeLeft, NodesJoined, ReadEvent, Recovered, StepCommitted


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplaySummary:
    """Progress and costs of a replayed trace. Events after the end of the trace are ignored.

    All times are seconds on this machine, not of the trace.
    """

    outcome: str
    #: From the first committed step to the end of the trace or of the job, whichever comes first.
    elapsed_s: float
    #: Committed steps that no roll-back undid.
    steps: int
    #: Samples of these steps.
    samples: int
    #: Samples per second over `elapsed_s`, without the first step.
    samples_per_s: float
    #: Committed steps that a roll-back undid.
    undone_steps: int
    final_loss: float | None
    nodes_joined: int
    nodes_lost: int
    recoveries: dict[str, int]
    #: Down time of all recoveries together.
    down_s: float
    #: Time in which the job had no node.
    without_nodes_s: float


def summarise_replay(events: Sequence[ReadEvent], ends: float | None, *, outcome: str) -> ReplaySummary:
    """Return the summary of a replay. Events after the end of the trace or of the job do not count.

    Args:
        events: all events of the job.
        ends: end of the trace, in unix seconds; None if no step was ever committed.
        outcome: how the replay ended, in words.
    """
    # The end of the job also ends the replay.
    over = [event.time for event in events if isinstance(event, JobFinished | JobFailed)]
    until = min(over if ends is None else [*over, ends], default=0.0)
    counted = [event for event in events if event.time <= until]
    steps = committed_steps(counted)
    ever = [event for event in counted if isinstance(event, StepCommitted)]
    begin = ever[0].time if ever else until
    recoveries = [event for event in counted if isinstance(event, Recovered)]
    samples = sum(step.samples for step in steps)
    after_first = samples - ever[0].samples if steps and steps[0] is ever[0] else samples
    return ReplaySummary(
        outcome=outcome,
        elapsed_s=until - begin,
        steps=len(steps),
        samples=samples,
        samples_per_s=after_first / (until - begin) if until > begin else 0.0,
        undone_steps=len(ever) - len(steps),
        final_loss=steps[-1].loss if steps else None,
        nodes_joined=sum(len(event.nodes) for event in counted if isinstance(event, NodesJoined)),
        nodes_lost=sum(isinstance(event, NodeLeft) and event.reason == "failed" for event in counted),
        recoveries=_count(event.action for event in recoveries),
        down_s=sum(event.down_s for event in recoveries),
        without_nodes_s=without_nodes(counted, begin, until),
    )


def without_nodes(events: Iterable[ReadEvent], begin: float, end: float) -> float:
    """Return the seconds between `begin` and `end` in which the job had no node.

    Time before the first join does not count: the job counts as empty only after its last node has left.
    """
    present: set[str] = set()
    empty_since: float | None = None
    total = 0.0
    for event in events:
        if isinstance(event, NodesJoined):
            if empty_since is not None:
                total += max(0.0, event.time - max(begin, empty_since))
            empty_since = None
            present.update(event.names)
        elif isinstance(event, NodeLeft) and event.node in present:
            present.remove(event.node)
            if not present:
                empty_since = event.time
    return total if empty_since is None else total + max(0.0, end - max(begin, empty_since))


def _count(words: Iterable[str]) -> dict[str, int]:
    """Return how many times each word occurs."""
    counts: dict[str, int] = {}
    for word in words:
        counts[word] = counts.get(word, 0) + 1
    return counts
