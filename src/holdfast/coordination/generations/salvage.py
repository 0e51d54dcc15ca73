"""What is kept of an interrupted step: which micro-batches a unit need not compute again, and who does the others."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from holdfast.coordination.generations.assignment import keep_summed, share_of
from holdfast.coordination.generations.roles import whole_units
from holdfast.protocol.messages.worker import Report
from holdfast.protocol.names import node_of, seat_of
from holdfast.protocol.plan import Decision, DecisionKind, GenerationPlan
from holdfast.protocol.record import Record

#: by unit
Assignment = tuple[tuple[int, ...], ...]


def first_assignment(
    record: Record,
    plan: GenerationPlan,
    decision: Decision,
    reports: Mapping[str, Report],
    stand_ins: Collection[str] = (),
) -> Assignment:
    """Let survivors keep the micro-batches they have computed of the step that comes next; () where nobody has any.

    Nodes that take others' places, and are sent their state only now, have none of that step: the others compute theirs
    meanwhile. With experts all go through as many rounds, and nobody computes before all experts are there.
    """
    if decision.kind not in (DecisionKind.REDO, DecisionKind.FORWARD):
        return ()
    before = record.plan.workers if record.plan is not None else ()
    rank_of = {seat_of(worker): rank for rank, worker in enumerate(before)}
    summed: list[tuple[int, ...]] = []
    usual: list[tuple[int, ...]] = []
    come: list[int] = []
    for number, unit in enumerate(_units(plan)):
        rank = rank_of.get(seat_of(unit[0]))
        applied, mine = summed_by(unit, reports)
        summed.append(mine if applied == decision.applied else ())
        usual.append(share_of(record.plan, record.micro_batches, rank) if record.plan and rank is not None else ())
        if node_of(unit[0]) in stand_ins and any(worker in plan.sources for worker in unit):
            come.append(number)
    dense = record.expert_shape is None
    idle = [*come, *(unit for unit, count in enumerate(plan.counts) if not count)] if dense else []
    return keep_summed(record.micro_batches, summed, usual, idle, plan.counts) if any(summed) or idle else ()


def kept_by_units(
    plan: GenerationPlan, decision: Decision, reports: Mapping[str, Report], assignment: Assignment
) -> Assignment:
    """Return what each unit keeps of the micro-batches that its places have named as summed, as Begin says it.

    It keeps all that all of its places name, or nothing. A unit whose places all lack the decided state, and are sent
    it, keeps what it has of the step before, which may be done again as long as that has not come.
    """
    if plan.places == 1 or decision.kind not in (DecisionKind.REDO, DecisionKind.FORWARD):
        return ()
    kept: list[tuple[int, ...]] = []
    for number, unit in enumerate(_units(plan)):
        applied, mine = summed_by(unit, reports)
        lags = applied != decision.applied and all(worker in plan.sources for worker in unit)
        given = assignment[number] if assignment else ()
        goes_on = applied == decision.applied and set(mine) <= set(given)
        kept.append(mine if lags or goes_on else ())
    return tuple(kept) if any(kept) else ()


def summed_by(unit: Sequence[str], reports: Mapping[str, Report]) -> tuple[int | None, tuple[int, ...]]:
    """Return the step whose state all places of a unit have, and the micro-batches of the next that all name as summed.

    What one alone names it has proposed to the others, in vain. (None, ()): they have not all the same state.
    """
    said = [report for worker in unit if (report := reports.get(worker)) is not None]
    applied = {report.applied for report in said}
    if len(said) < len(unit) or len(applied) > 1:
        return None, ()
    first, *others = (report.summed for report in said)
    return applied.pop(), tuple(one for one in first if all(one in summed for summed in others))


def salvaged(
    record: Record,
    plan: GenerationPlan,
    decision: Decision,
    reports: Mapping[str, Report],
    assignment: Sequence[Sequence[int]],
) -> tuple[int | None, int | None]:
    """Return how many micro-batches of the interrupted step need not be computed again, and how many that were must.

    None: no step was interrupted, or not known, like what the lost had done.

    Args:
        assignment: of the step when it is done again, as `first_assignment` says.
    """
    if decision.kind is DecisionKind.FORWARD:
        return record.micro_batches, 0
    if decision.kind is not DecisionKind.REDO:
        return None, None
    summed: dict[str, set[int]] = {}
    for unit in whole_units(reports, plan.places):
        applied, mine = summed_by(unit, reports)
        if applied == decision.applied:
            summed[unit[0]] = set(mine)
    shares = zip(plan.unit_heads, assignment, strict=False)
    kept = sum(len(mine) for head, share in shares if (mine := summed.get(head, set())) <= set(share))
    whole = record.plan is not None and summed.keys() >= set(record.plan.unit_heads) and record.expert_shape is None
    return kept, sum(map(len, summed.values())) - kept if whole else None


def _units(plan: GenerationPlan) -> list[tuple[str, ...]]:
    return [plan.workers[first : first + plan.places] for first in range(0, len(plan.members), plan.places)]
