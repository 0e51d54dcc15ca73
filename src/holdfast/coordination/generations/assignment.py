"""Which unit computes which micro-batch of a step: a rank, where each has a whole replica of the model.

And what is kept of an interrupted step: which a unit need not compute again, and who does the others.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from heapq import heapify, heapreplace

from holdfast.coordination.roles import whole_units
from holdfast.protocol.messages.worker import Report
from holdfast.protocol.names import node_and_index_of, node_of
from holdfast.protocol.plan import Decision, DecisionKind, GenerationPlan
from holdfast.protocol.record import Record

#: by unit
Assignment = tuple[tuple[int, ...], ...]


def round_robin(micro_batches: int, world: int, rank: int) -> tuple[int, ...]:
    """Return a rank's micro-batches, 0-based: rank, rank + world, ... Ranks have as many, or one more than others."""
    return tuple(range(rank, micro_batches, world))


def share_of(plan: GenerationPlan, micro_batches: int, rank: int) -> tuple[int, ...]:
    """Return the micro-batches of a rank's unit under a plan, 0-based, ascending."""
    unit = plan.unit_of(rank)
    if not plan.counts:
        return round_robin(micro_batches, plan.units, unit)
    # They are dealt in turn; whoever has as many as it is to have is passed over.
    mine: list[int] = []
    first = 0
    for round_ in range(plan.counts[unit]):
        mine.append(first + sum(count > round_ for count in plan.counts[:unit]))
        first += sum(count > round_ for count in plan.counts)
    return tuple(mine)


def divided(micro_batches: int, factors: Sequence[float]) -> tuple[int, ...]:
    """Return how many micro-batches each rank is to compute so that the longest of them takes as short as can be.

    Each has one at the least, that it stays known how long it takes. The next one always goes to the rank that would be
    done with it first: of equal parts on machines that differ in speed alone nothing is shorter.

    Args:
        micro_batches: M, of a step.
        factors: how many times as long as the others each rank takes for one.

    Returns:
        By rank; () where that is no shorter than giving all as many, or one more than others.
    """
    world = len(factors)
    if micro_batches <= world:
        return ()
    counts = [1] * world
    first = [(2 * factor, rank) for rank, factor in enumerate(factors)]
    heapify(first)
    for _ in range(micro_batches - world):
        _, rank = first[0]
        counts[rank] += 1
        heapreplace(first, ((counts[rank] + 1) * factors[rank], rank))
    return tuple(counts) if longest(micro_batches, factors, counts) < longest(micro_batches, factors) else ()


def even(micro_batches: int, world: int) -> list[int]:
    """Return how many micro-batches each rank has where all have as many, or one more than others."""
    return [len(range(rank, micro_batches, world)) for rank in range(world)]


def longest(micro_batches: int, factors: Sequence[float], counts: Sequence[int] = ()) -> float:
    """Return how long a step's longest rank computes, as many times as one micro-batch takes the others.

    Args:
        counts: of micro-batches by rank; () where all have as many, or one more than others.
    """
    each = counts or even(micro_batches, len(factors))
    return max(count * factor for count, factor in zip(each, factors, strict=True))


def keep_summed(
    micro_batches: int,
    summed: Sequence[Sequence[int]],
    usual: Sequence[Sequence[int]] = (),
    idle: Collection[int] = (),
    counts: Sequence[int] = (),
) -> tuple[tuple[int, ...], ...]:
    """Return an assignment in which each rank keeps what it holds and had; the rest goes to whoever has least.

    Finished work is not done again after a failure (Unicron 6.2, for data-parallel workers). Where two ranks hold
    the same micro-batch (both were given it in different generations), the first keeps it and the other starts over.

    Args:
        micro_batches: M, how many the step has.
        summed: for each rank, the micro-batches whose gradients are summed up there.
        usual: for each rank, what it had to compute before; it goes on with that where nobody else has it. So all but
            what the lost had to do stays as it was.
        idle: ranks that are given none, as long as there are others.
        counts: how many each rank is to have, where that is not the same for all.
    """
    taken: set[int] = set()
    shares: list[list[int]] = []
    for mine in summed:
        # Gradients are one sum per rank: if a single part belongs to somebody else, none of it can be kept.
        keep = [] if taken & set(mine) else sorted(mine)
        taken.update(keep)
        shares.append(keep)
    _give_back(shares, usual, taken, counts or [-(-micro_batches // len(shares))] * len(shares))
    none = idle if len(idle) < len(shares) else ()
    wanted = counts or [0] * len(shares)
    least = [(len(share) - wanted[rank], rank) for rank, share in enumerate(shares) if rank not in none]
    heapify(least)
    for micro_batch in range(micro_batches):
        if micro_batch not in taken:
            size, rank = least[0]
            shares[rank].append(micro_batch)
            heapreplace(least, (size + 1, rank))
    return tuple(tuple(share) for share in shares)


def _give_back(shares: list[list[int]], usual: Sequence[Sequence[int]], taken: set[int], most: Sequence[int]) -> None:
    """Let each rank go on with what it had, up to as many as it is to have at the most."""
    for share, mine, count in zip(shares, usual, most, strict=False):
        back = [micro_batch for micro_batch in mine if micro_batch not in taken][: max(0, count - len(share))]
        taken.update(back)
        share += back
        share.sort()


# ---- after a failure ----


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
    rank_of = {node_and_index_of(worker): rank for rank, worker in enumerate(before)}
    summed: list[tuple[int, ...]] = []
    usual: list[tuple[int, ...]] = []
    come: list[int] = []
    for number, unit in enumerate(_units(plan)):
        rank = rank_of.get(node_and_index_of(unit[0]))
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
