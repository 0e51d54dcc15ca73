"""State of a job and the reason for it, from its newest events and its coordinator's status."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.observability.accounts.time_ledger import TimeLedger
from holdfast.observability.accounts.usual_steps import FAILED
from holdfast.observability.history.episodes import episodes
from holdfast.protocol.events import (
    ActionRequested,
    CoordinatorRestarted,
    FailureDetected,
    GenerationStarted,
    JobFailed,
    JobFinished,
    JobWaiting,
    ReadEvent,
    StepCommitted,
)
from holdfast.protocol.position import Awaited


@dataclass(frozen=True, kw_only=True, slots=True)
class JobCondition:
    """State of a job."""

    job: str
    state: str
    step: int
    #: Start of the state, in unix seconds.
    since: float
    #: Seconds since the newest commit, or since the first event.
    stands_s: float
    #: Usual step time; None if unknown.
    usual_step_s: float | None
    why: str
    #: Number of the event that explains the state; 0 for none.
    seq: int = 0
    #: The `who` of the `action_requested` event about it; "" if no action is needed.
    who: str = ""
    #: The `command` of that event; "" if no action is needed.
    command: str = ""
    #: The `about` of that event; "" if no action is needed.
    about: str = ""
    awaited: tuple[Awaited, ...] = ()


def find_condition(
    events: Sequence[ReadEvent], *, now: float | None = None, state: str = "", awaited: Sequence[Awaited] = ()
) -> JobCondition:
    """Return the state of a job, its reason, since when, and which action it needs, from its events.

    A running job that has not committed a step for `FAILED` times the usual step gets that as the reason.

    Args:
        events: all events of the job, at least one.
        now: unix seconds for a running job; None for the time of the newest event.
        state: the state that its coordinator reports, which replaces the one by the events; "" without a coordinator.
        awaited: the nodes that its coordinator waits for.
    """
    ledger, committed = TimeLedger(), None
    for event in events:
        ledger.add_event(event)
        committed = event if isinstance(event, StepCommitted) else committed
    now = max(event.time for event in events[-64:]) if now is None else now
    usual = ledger.usual.of(committed.world_size) if committed is not None else None
    begun = events[0].time if committed is None else committed.time
    found, why, since, seq = _find_state(events)
    asked = next((one for one in reversed(events) if isinstance(one, ActionRequested) and one.about_seq == seq), None)
    stands_s = max(0.0, now - begun)
    if found == "running" and usual is not None and stands_s > FAILED * usual:
        why = f"no step was committed for {stands_s:.1f} s; {usual:.3f} s is usual"
    return JobCondition(
        job=events[-1].job,
        state=state or found,
        step=ledger.step,
        since=since,
        stands_s=stands_s,
        usual_step_s=usual,
        why=why,
        seq=seq,
        who=asked.who if asked is not None else "",
        command=asked.command if asked is not None else "",
        about=asked.about if asked is not None else "",
        awaited=tuple(awaited),
    )


def _find_state(events: Sequence[ReadEvent]) -> tuple[str, str, float, int]:
    """Return the state by the events, its reason, its start (unix seconds), and the number of the event that set it.

    The newest decisive event counts: the end of the job, a wait, a failure without a later step or generation, a
    generation, or a step. The number is 0 if nothing needs an explanation. A stopped job whose coordinator has
    restarted waits for its first nodes.
    """
    failed: FailureDetected | None = None
    again: CoordinatorRestarted | None = None
    for event in reversed(events):
        match event:
            case CoordinatorRestarted():
                again = event
            case JobFinished(resumable=True) if again is not None:
                break
            case JobFinished():
                what = "it was ended and can be taken up again" if event.resumable else "all is done"
                return event.outcome, f"{what}: {event.why or event.reason}", event.time, event.seq
            case JobFailed():
                return "failed", event.why, event.time, event.seq
            case JobWaiting():  # A later failure does not change the state.
                slots = f" with {event.expert_slots} more expert slots" if event.expert_slots else ""
                nodes = f"{event.nodes} node{'s' if event.nodes > 1 else ''}"
                return "waiting", f"{event.why}: it waits for {nodes}{slots}", event.time, event.seq
            case FailureDetected():
                failed = failed or event
            case StepCommitted() | GenerationStarted() if failed is not None:
                why = f"{failed.node} failed ({failed.category or failed.kind}): the others are asked where they stand"
                return "recovering", why, failed.time, failed.seq
            case StepCommitted():
                return "running", "", event.time, 0
            case GenerationStarted():
                return "recovering" if _broken(events) else "running", _entering(event), event.time, event.seq
            case _:
                pass
    return "waiting", "it waits for its first nodes", (again or events[0]).time, 0


def _broken(events: Sequence[ReadEvent]) -> bool:
    last = list(episodes(events))[-1:]
    return any(isinstance(event, FailureDetected) for episode in last for event in episode.events)


def _entering(event: GenerationStarted) -> str:
    return f"generation {event.generation} ({event.reason}) has begun, and no step is committed in it yet"
