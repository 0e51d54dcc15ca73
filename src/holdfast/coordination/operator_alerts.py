"""Events that need a person: the operator or the site, and the suggested command."""

from __future__ import annotations

from holdfast.protocol.events import (
    AnyEvent,
    CheckpointDelayed,
    CheckpointFailed,
    CheckpointRejected,
    CorruptionFound,
    JobFailed,
    JobWaiting,
    NodeLeft,
    NodeStayed,
    RolledBack,
    SnapshotFailed,
    StepSkipped,
    name_of,
)

#: The person that runs the job.
OPERATOR = "operator"
#: The person that repairs its machines.
SITE = "site"
#: A checkpoint delay of this many seconds shows that the storage is too slow, or the period too short.
SLOW_STORAGE_S = 10.0


def request_of(event: AnyEvent, step: int) -> dict[str, str | int] | None:
    """Return the fields of `action_requested` for an event: the person, the suggested command and the reason.

    None if no action is needed. Of a series of failed checkpoints or skipped steps, only the first one needs one.

    Args:
        step: the newest step that was committed before the event. A rollback needs action only if it undoes steps.
    """
    look = f"holdfast explain {event.seq}"
    match event:
        case JobWaiting():
            asked = OPERATOR, f"holdfast scale +{event.nodes}", event.why
        case NodeLeft(reason="quarantined"):
            asked = SITE, f"holdfast undrain {event.node}", f"node {event.node} is quarantined"
        case NodeStayed(reason="no_standby"):
            asked = OPERATOR, "holdfast agent --standby", f"node {event.node} cannot move: {event.detail}"
        case RolledBack() if event.to_step < step:
            asked = OPERATOR, look, f"{step - event.to_step} steps are undone: {event.why}"
        # One request for a series of failures is enough.
        case CheckpointFailed(tries=1):
            why = f"the checkpoint of step {event.step} could not be written: {event.why}"
            asked = OPERATOR, f"holdfast logs --node {event.node}", why
        case CheckpointDelayed() if event.waited_s >= SLOW_STORAGE_S:
            where = ", ".join(event.nodes)
            why = f"{event.left_out} checkpoints were left out: an earlier one is still being written on {where}"
            asked = OPERATOR, f"holdfast logs --node {event.nodes[0]}", why
        case CheckpointRejected():
            asked = OPERATOR, look, f"checkpoint {event.name} cannot be used: {event.why}"
        case SnapshotFailed():
            asked = OPERATOR, look, f"no snapshot of step {event.step} is whole: node {event.node}: {event.why}"
        case CorruptionFound():
            asked = OPERATOR, look, event.summary
        # The first step stands for the whole series.
        case StepSkipped(in_a_row=1):
            asked = OPERATOR, look, f"step {event.step} was skipped: {event.why}"
        case JobFailed():
            asked = OPERATOR, look, event.why
        case _:
            return None
    who, command, why = asked
    return {"who": who, "command": command, "why": why, "about": name_of(event), "about_seq": event.seq}
