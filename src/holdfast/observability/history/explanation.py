"""Explain an event by the episode that it belongs to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from holdfast.errors import BadInputError
from holdfast.observability.accounts.time_ledger import TimeLedger
from holdfast.observability.accounts.time_spans import Cause
from holdfast.observability.accounts.usual_steps import LATE
from holdfast.observability.history.episodes import SWAPS, Episode, episodes
from holdfast.protocol.events import (
    ActionRequested,
    CheckpointRejected,
    CorruptionFound,
    FailureDetected,
    GenerationStarted,
    JobFailed,
    JobWaiting,
    LayoutChanged,
    LayoutKept,
    ReadEvent,
    Rebalanced,
    RebalanceDecided,
    Recovered,
    RolledBack,
    SnapshotRejected,
    StacksTaken,
    StepCommitted,
)
from holdfast.protocol.failures import Severity

#: Responses to a failure by severity, the gentlest last (Unicron, Figure 7).
RUNGS: dict[int, str] = {
    Severity.RETRY: "the same members try again in a new group",
    Severity.PROCESS: "the process starts again on its node",
    Severity.NODE: "the node is taken out; its agent may bring it back",
}
#: The fate of the interrupted step, by decision.
_DECISIONS = {
    "start": "the job begins with its script's own state",
    "redo": "the step under way is computed again; no worker can have applied it",
    "forward": "a worker had passed the step under way, so all workers apply its recorded sums",
    "rollback": "some state had no live copy, so the job goes back to a checkpoint",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Rung:
    """One escalation step: a try to continue after failures."""

    #: Number of the `generation_started` event.
    seq: int
    generation: int
    severity: int | None
    #: The response, in words.
    what: str
    #: The fate of the interrupted step, in words.
    decision: str
    #: Whether this step ended the episode.
    held: bool
    #: Why it did not end the episode; "" if it did.
    why_not: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Rejected:
    """An alternative that a decision rejected, and why."""

    what: str
    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Explanation:
    """One event and its episode. Times are in seconds; fields without a value are empty or None."""

    event: ReadEvent
    why: str = ""
    #: The detected failures.
    failures: tuple[FailureDetected, ...] = ()
    #: The escalation steps, in order.
    rungs: tuple[Rung, ...] = ()
    #: Whether the episode has ended.
    over: bool = True
    #: The action of the recovery, once it is over.
    action: str = ""
    state_source: str = ""
    moved_bytes: int = 0
    #: Seconds of the recovery by phase.
    phases: dict[str, float] | None = None
    micro_batches_kept: int | None = None
    micro_batches_redone: int | None = None
    #: Why this recovery was chosen among the possible ones.
    chosen: str = ""
    #: Seconds by cause, from the commit before the episode to its end.
    seconds: dict[str, float] | None = None
    #: The rejected alternatives.
    rejected: tuple[Rejected, ...] = ()
    #: The stack dumps of all workers when a collective hung.
    stood: StacksTaken | None = None


def explain(events: Sequence[ReadEvent], seq: int) -> Explanation:
    """Explain the event with this number.

    A step is compared with the usual step time. A request is explained by the event that it is about, and a layout
    change by its recovery. Decisions to change nothing give their own reason, and all other events are explained by
    their episode, if they have one.

    Raises:
        BadInputError: no event has this number.
    """
    place = next((place for place, event in enumerate(events) if event.seq == seq), None)
    if place is None:
        last = events[-1].seq if events else 0
        raise BadInputError(f"there is no event {seq}: the events are those up to {last}; `holdfast events` lists them")
    event = events[place]
    if isinstance(event, StepCommitted):
        return _step(events, place, event)
    if isinstance(event, ActionRequested):
        return replace(explain(events, event.about_seq), event=event, why=event.why)
    if isinstance(event, RebalanceDecided) and not event.adopted:
        return Explanation(event=event, why=event.why)
    if isinstance(event, LayoutKept):
        return Explanation(event=event, why=event.why)
    if isinstance(event, LayoutChanged):
        told = next((one.seq for one in events[place::-1] if isinstance(one, Recovered)), 0)
        return replace(explain(events, told), event=event, why=event.why) if told else Explanation(event=event)
    if isinstance(event, StacksTaken):
        return Explanation(event=event, stood=event)
    found = next((episode for episode in episodes(events) if episode.has(seq)), None)
    return Explanation(event=event) if found is None else _episode(events, found, event)


def _episode(events: Sequence[ReadEvent], episode: Episode, event: ReadEvent) -> Explanation:
    """Return the explanation of an event by its whole episode.

    It has the failures, attempts, rejected alternatives and seconds by cause. If the episode ended with `recovered` or
    `rebalanced`, it also has the phases and moved bytes.
    """
    told = episode.recovered
    known = Explanation(
        event=event,
        why=_why(episode),
        failures=tuple(one for one in episode.events if isinstance(one, FailureDetected)),
        rungs=tuple(_rungs(episode)),
        over=told is not None or episode.ended < len(events),
        seconds=_seconds(events, episode.begun, episode.ended),
        rejected=tuple(_rejected(episode)),
        stood=_stood(events, {one.generation for one in episode.events if isinstance(one, FailureDetected)}),
    )
    match told:
        case Rebalanced():
            phases = {"transfer": told.transfer_s, "down": told.down_s}
            return replace(known, action="rebalance", moved_bytes=told.moved_bytes, phases=phases)
        case Recovered():
            return replace(
                known,
                action=told.action,
                state_source=told.state_source,
                moved_bytes=told.moved_bytes,
                phases={
                    "detect": told.detect_s,
                    "decide": told.decide_s,
                    "regroup": told.regroup_s,
                    "transfer": told.transfer_s,
                    "redo": told.redo_s,
                    "down": told.down_s,
                },
                micro_batches_kept=told.micro_batches_kept,
                micro_batches_redone=told.micro_batches_redone,
                chosen=told.why,
            )
        case None:
            return known


def _why(episode: Episode) -> str:
    """Return the reason of an episode by its first roll-back, job failure or corruption; "" without one of these."""
    for event in episode.events:
        if isinstance(event, RolledBack | JobFailed):
            return event.why
        if isinstance(event, CorruptionFound):
            return event.summary
    return ""


def _stood(events: Sequence[ReadEvent], generations: set[int]) -> StacksTaken | None:
    """Return the stack dumps of one of these generations. The event may come shortly before or after its end."""
    told = (one for one in events if isinstance(one, StacksTaken) and one.of_generation in generations)
    return next(told, None)


def _rungs(episode: Episode) -> Iterator[Rung]:
    """Yield the escalation steps: each generation of the episode, with the failures since the previous one.

    The last generation held if no failure followed it. For the others, the failures after them are the reason why they
    did not.
    """
    failures: list[FailureDetected] = []
    tried: list[tuple[GenerationStarted, list[FailureDetected]]] = []
    for event in episode.events:
        if isinstance(event, FailureDetected):
            failures.append(event)
        elif isinstance(event, GenerationStarted):
            tried.append((event, failures))
            failures = []
    for number, (generation, causes) in enumerate(tried):
        severity = min((cause.severity for cause in causes), default=None)
        after = tried[number + 1][1] if number + 1 < len(tried) else failures
        last = number + 1 == len(tried)
        held = last and not after
        yield Rung(
            seq=generation.seq,
            generation=generation.generation,
            severity=severity,
            what=_OTHER_RUNGS.get(generation.reason) or RUNGS.get(severity or 0, "another group"),
            decision=_decision(generation),
            held=held,
            why_not="" if held else "; ".join(_failed(cause) for cause in after) or "it was left before its first step",
        )


def _decision(generation: GenerationStarted) -> str:
    """Return in words what the generation does about the interrupted step; "" if its decision is not a known one."""
    if generation.reason == "layout" and generation.decision == "rollback":
        return "the state is read from the memory of the nodes, where all had put it: nothing is computed again"
    return _DECISIONS.get(generation.decision, "")


#: Responses without a failure, by the reason of the generation.
_OTHER_RUNGS = {
    "start": "the first members begin",
    "join": "who has come joins at a step's boundary, while the others train",
    "rebalance": "experts, or micro-batches of a slow node, go to others at a step's boundary",
    "layout": "another layout for so many nodes: all put the state away, and fresh workers take it up",
    "save": "the job saves what it has led to, and ends",
}


def _failed(cause: FailureDetected) -> str:
    return f"{cause.node}: {cause.category or cause.kind}"


def _rejected(episode: Episode) -> Iterator[Rejected]:
    """Yield the rejected alternatives with reasons.

    First checkpoints, snapshots and layouts that an event rejects. If a failure led to a new generation, then the
    obvious alternatives to it: the same members, waiting, removing a node, or going back to a checkpoint.
    """
    for event in episode.events:
        if isinstance(event, CheckpointRejected):
            yield Rejected(what=f"checkpoint {event.name}", why=event.why)
        elif isinstance(event, SnapshotRejected):
            where = f" in the memory of {event.node}" if event.node else ""
            yield Rejected(what=f"the snapshot of step {event.step}{where}", why=event.why)
        elif isinstance(event, LayoutKept):
            yield Rejected(what=f"another layout than {event.layout}", why=event.why)
    failures = [event for event in episode.events if isinstance(event, FailureDetected)]
    back = next((event for event in episode.events if isinstance(event, RolledBack)), None)
    generations = [one for one in episode.generations if one.reason not in SWAPS]
    if not failures or not generations:
        return
    worst = min(failure.severity for failure in failures)
    nodes = ", ".join(dict.fromkeys(failure.node for failure in failures if failure.severity == worst))
    if worst == Severity.NODE:
        yield Rejected(what="the same members once more", why=f"{nodes} cannot be one of them")
        waiting = next((event for event in episode.events if isinstance(event, JobWaiting)), None)
        if waiting is None:
            yield Rejected(what=f"waiting for {nodes}", why="the others can go on, and nodes that come back join them")
        else:
            yield Rejected(what=f"going on without {nodes}", why=waiting.why)
    elif worst == Severity.PROCESS:
        yield Rejected(what="taking the node out", why=f"only a process of {nodes} has ended: it starts again there")
    else:
        yield Rejected(what="taking a node out", why="the cause is unknown: the same members try first")
    if back is not None:
        yield Rejected(what=f"going on from step {episode.step}", why=back.why)
    elif episode.checkpoint is not None:
        again = episode.step - episode.checkpoint
        why = f"the state of step {episode.step} lives: {again} steps would have been computed again"
        yield Rejected(what=f"going back to the checkpoint of step {episode.checkpoint}", why=why)


def _step(events: Sequence[ReadEvent], place: int, event: StepCommitted) -> Explanation:
    """Return the explanation of a step: its time as a multiple of this world's usual step, and seconds by cause.

    The reason is "" if the usual step time is not known yet.
    """
    ledger = TimeLedger()
    for before in events[:place]:
        ledger.add_event(before)
    usual = ledger.usual.of(event.world_size)
    why = ""
    if usual:
        times = (event.step_s - event.paused_s) / usual
        why = f"it took {times:.2f} times the usual step of {event.world_size} workers, {usual:.3f} s"
        why += f", without the {event.paused_s:.3f} s of a pause" if event.paused_s else ""
        why += "" if times <= LATE else f": more than {LATE:g} times is late"
    return Explanation(event=event, why=why, seconds=_seconds(events, place, place + 1))


def _seconds(events: Sequence[ReadEvent], begun: int, ended: int) -> dict[str, float]:
    """Return the seconds by cause of the spans that end with the commits among events[begun:ended].

    If these are the newest events, the span under way is included. Causes without any time are left out.
    """
    commits = {event.seq for event in events[begun:ended] if isinstance(event, StepCommitted)}
    if ended >= len(events):
        commits.add(0)
    spent = dict.fromkeys(Cause, 0.0)

    def on_booked(seq: int, cause: Cause, seconds: float) -> None:
        """Add the seconds if the span ends with one of the commits."""
        if seq in commits:
            spent[cause] += seconds

    ledger = TimeLedger(on_booked)
    for event in events:
        ledger.add_event(event)
    ledger.close()
    return {str(cause): seconds for cause, seconds in spent.items() if seconds > 1e-9}
