"""The table of a worker's phases: which boundary it may cross from which phase, and the phase that follows."""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.coordination.worker.copy import StateCopy
from holdfast.coordination.worker.tasks import Enter, Entering, Forward, Load, Move, Receive
from holdfast.protocol.plan import Decision, GenerationPlan, Phase
from holdfast.protocol.state import CheckpointSource, LiveSource, SnapshotSource


class InvalidTransitionError(Exception):
    """The shell crossed a boundary that the phase does not allow: a bug. The message has the machine's state."""


#: a phase or, while a generation is entered, the type of the next task
Position = Phase | type[Entering]

#: (phase or task, boundary) -> the next phase. Pairs that are missing are not allowed.
NEXT_PHASE: Mapping[tuple[Position, str], Phase] = {
    (Forward, "begin_apply"): Phase.FORWARD,
    (Phase.FORWARD, "finish_apply"): Phase.ENTERING,
    (Load, "finish_load"): Phase.ENTERING,
    (Move, "begin_move"): Phase.ENTERING,
    (Move, "end_move"): Phase.ENTERING,
    (Receive, "begin_adoption"): Phase.ADOPTING,
    (Phase.ADOPTING, "finish_receive"): Phase.ENTERING,
    (Phase.ADOPTING, "void_received_state"): Phase.ENTERING,
    (Phase.ADOPTING, "cancel_adoption"): Phase.ENTERING,
    (Enter, "finish_entering"): Phase.COMPUTE,
    (Phase.COMPUTE, "begin_micro_batch"): Phase.COMPUTE,
    (Phase.COMPUTE, "begin_reduction"): Phase.REDUCING,
    (Phase.REDUCING, "finish_background_transfer"): Phase.REDUCING,
    (Phase.REDUCING, "finish_reduction"): Phase.READY,
    (Phase.REDUCING, "refused"): Phase.REFUSED,
    (Phase.READY, "begin_vote"): Phase.VOTED,
    (Phase.VOTED, "pass_vote"): Phase.PASSED,
    (Phase.VOTED, "abandon_vote"): Phase.ABANDONED,
    (Phase.PASSED, "begin_apply"): Phase.APPLYING,
    (Phase.APPLYING, "finish_apply"): Phase.COMPUTE,
    (Phase.COMPUTE, "finish"): Phase.FINISHED,
}

#: Phases without a report, because it could not promise anything: the step may still pass, or the state is changing.
UNREPORTED = frozenset({Phase.VOTED, Phase.APPLYING, Phase.FORWARD, Phase.ADOPTING})

#: Phases in which other workers may have seen this worker's swap flag, so that a swap with this step is possible.
FLAG_GIVEN = frozenset({Phase.VOTED, Phase.PASSED, Phase.ABANDONED, Phase.APPLYING})

#: Phases in which the state is neither changed nor promised, so that a script may end and leave a complete state.
KEEPING = frozenset({Phase.ENTERING, Phase.COMPUTE, Phase.REDUCING})


def next_entering_task(
    worker: str, plan: GenerationPlan, decision: Decision | None, copy: StateCopy, *, placed: bool
) -> Entering:
    """Return the next task of a worker that enters the generation of `plan`: apply the retained gradients, load, move
    the experts, receive the state, or else enter.

    Args:
        decision: The decision with which the generation began, or None after a swap.
        placed: Whether the experts are placed as planned. True for a model without experts.
    """
    lacking, source = copy.lacking, plan.source_of(worker, decision)
    if copy.is_forward_due(decision) and copy.passed is not None:
        return Forward(plan, copy.passed.step, copy.passed.commit)
    if lacking and isinstance(source, CheckpointSource | SnapshotSource):
        return Load(plan, source)
    send_to = plan.receivers(worker)
    if not placed:
        return Move(plan, send_to)
    if lacking:
        return Receive(plan, together=plan.expert_plan is None and _whole_group_receives(worker, plan, decision))
    return Enter(plan, send_to)


def _whole_group_receives(worker: str, plan: GenerationPlan, decision: Decision | None) -> bool:
    """Return whether a worker's replica group has several workers, and all of them receive the state from members."""
    rank, places = plan.rank(worker), plan.places
    if places == 1 or rank is None:
        return False
    first = rank - rank % places
    unit = plan.workers[first : first + places]
    return all(isinstance(plan.source_of(place, decision), LiveSource) for place in unit)
