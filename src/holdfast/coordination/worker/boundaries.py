"""Where a worker may stand in a step, and which boundary leads where: the table of coordination.worker."""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.coordination.worker.copy import StateCopy
from holdfast.coordination.worker.tasks import Enter, Entering, Forward, Load, Move, Receive
from holdfast.protocol.plan import Decision, GenerationPlan, Phase
from holdfast.protocol.state import CheckpointSource, LiveSource, SnapshotSource


class InvalidTransitionError(Exception):
    """The shell called a boundary that the phase does not allow: a bug, with the story that led there."""


#: a phase, or while a generation is entered the task that is due
Place = Phase | type[Entering]

#: (where a worker stands, the boundary that it comes to) -> its phase then; what is not here is not allowed
NEXT: Mapping[tuple[Place, str], Phase] = {
    (Forward, "begin_apply"): Phase.FORWARD,
    (Phase.FORWARD, "applied_step"): Phase.ENTERING,
    (Load, "loaded"): Phase.ENTERING,
    (Move, "moving"): Phase.ENTERING,
    (Move, "moved"): Phase.ENTERING,
    (Receive, "adopting"): Phase.ADOPTING,
    (Phase.ADOPTING, "received"): Phase.ENTERING,
    (Phase.ADOPTING, "spoilt"): Phase.ENTERING,
    (Phase.ADOPTING, "unadopted"): Phase.ENTERING,
    (Enter, "entered"): Phase.COMPUTE,
    (Phase.COMPUTE, "computing"): Phase.COMPUTE,
    (Phase.COMPUTE, "computed"): Phase.REDUCING,
    (Phase.REDUCING, "brought"): Phase.REDUCING,
    (Phase.REDUCING, "reduced"): Phase.READY,
    (Phase.REDUCING, "refused"): Phase.REFUSED,
    (Phase.READY, "voting"): Phase.VOTED,
    (Phase.VOTED, "vote_passed"): Phase.PASSED,
    (Phase.VOTED, "vote_abandoned"): Phase.ABANDONED,
    (Phase.PASSED, "begin_apply"): Phase.APPLYING,
    (Phase.APPLYING, "applied_step"): Phase.COMPUTE,
    (Phase.COMPUTE, "finish"): Phase.FINISHED,
}

#: A report from here would be no promise: the step may yet pass, or the state is about to change.
UNDER_WAY = frozenset({Phase.VOTED, Phase.APPLYING, Phase.FORWARD, Phase.ADOPTING})

#: A swap flag that was up may have been seen up by others, or will be: whether they swap with this step is open.
FLAG_GIVEN = frozenset({Phase.VOTED, Phase.PASSED, Phase.ABANDONED, Phase.APPLYING})

#: Where nothing of the state is being changed, nor promised: here a script may end, and leave it whole.
KEEPING = frozenset({Phase.ENTERING, Phase.COMPUTE, Phase.REDUCING})


def due(worker: str, plan: GenerationPlan, decision: Decision | None, copy: StateCopy, *, placed: bool) -> Entering:
    """Return what a worker has to do next to enter the generation of `plan`.

    Args:
        decision: what the generation began with, None after a swap.
        placed: the experts are where the plan has them, or there are none.
    """
    lacking, source = copy.lacking, plan.source_of(worker, decision)
    if copy.forward_due(decision) and copy.passed is not None:
        return Forward(plan, copy.passed.step, copy.passed.commit)
    if lacking and isinstance(source, CheckpointSource | SnapshotSource):
        return Load(plan, source)
    send_to = plan.receivers(worker)
    if not placed:
        return Move(plan, send_to)
    if lacking:
        return Receive(plan, together=plan.expert_plan is None and _unit_receives(worker, plan, decision))
    return Enter(plan, send_to)


def _unit_receives(worker: str, plan: GenerationPlan, decision: Decision | None) -> bool:
    """Tell whether a worker is one of several places of a unit, all of which are sent the state."""
    rank, places = plan.rank(worker), plan.places
    if places == 1 or rank is None:
        return False
    first = rank - rank % places
    unit = plan.workers[first : first + places]
    return all(isinstance(plan.source_of(place, decision), LiveSource) for place in unit)
