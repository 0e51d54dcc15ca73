"""The micro-batches of each replica group in a step. Without sharding, each rank is a group.

After an interrupted step: the micro-batches that a group keeps, and who computes the rest.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from heapq import heapify, heapreplace

from holdfast.coordination.roles import whole_units
from holdfast.protocol.messages.worker import Report
from holdfast.protocol.names import node_and_index_of, node_of
from holdfast.protocol.plan import Decision, DecisionKind, GenerationPlan
from holdfast.protocol.record import Record

#: Micro-batches by replica group.
Assignment = tuple[tuple[int, ...], ...]


def round_robin(micro_batches: int, world: int, rank: int) -> tuple[int, ...]:
    """Return a rank's micro-batches, 0-based: rank, rank + world, ... Numbers per rank differ by at most one."""
    return tuple(range(rank, micro_batches, world))


def share_of(plan: GenerationPlan, micro_batches: int, rank: int) -> tuple[int, ...]:
    """Return the micro-batches of a rank's replica group under a plan, 0-based, ascending.

    Evenly in turn, or by the plan's counts.
    """
    unit = plan.unit_of(rank)
    if not plan.counts:
        return round_robin(micro_batches, plan.units, unit)
    # They are dealt in rounds; a group that has its full count is skipped.
    mine: list[int] = []
    first = 0
    for round_ in range(plan.counts[unit]):
        mine.append(first + sum(count > round_ for count in plan.counts[:unit]))
        first += sum(count > round_ for count in plan.counts)
    return tuple(mine)


def divide_by_speed(micro_batches: int, factors: Sequence[float]) -> tuple[int, ...]:
    """Return the number of micro-batches for each rank that minimizes the time of the slowest rank.

    Each rank gets at least one, so that its speed stays known. The next micro-batch always goes to the rank that would
    finish it first. That is optimal for equal parts on machines that differ only in speed.

    Args:
        micro_batches: M, the number in a step.
        factors: the relative time of one micro-batch on each rank; 1 for a usual one.

    Returns:
        The numbers by rank, or () if an even division is as fast, or if there are not more micro-batches than ranks.
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
    return tuple(counts) if slowest_time(micro_batches, factors, counts) < slowest_time(micro_batches, factors) else ()


def divide_evenly(micro_batches: int, world: int) -> list[int]:
    """Return the number of micro-batches of each rank in an even division; numbers differ by at most one."""
    return [len(range(rank, micro_batches, world)) for rank in range(world)]


def slowest_time(micro_batches: int, factors: Sequence[float], counts: Sequence[int] = ()) -> float:
    """Return the compute time of the slowest rank, in units of one micro-batch on a usual rank.

    Args:
        counts: the number of micro-batches by rank; () for an even division.
    """
    each = counts or divide_evenly(micro_batches, len(factors))
    return max(count * factor for count, factor in zip(each, factors, strict=True))


def keep_summed(
    micro_batches: int,
    summed: Sequence[Sequence[int]],
    usual: Sequence[Sequence[int]] = (),
    idle: Collection[int] = (),
    counts: Sequence[int] = (),
) -> tuple[tuple[int, ...], ...]:
    """Return an assignment in which each rank keeps its summed micro-batches; the rest goes to the least loaded ranks.

    Finished work is not repeated after a failure (Unicron 6.2, for data-parallel workers). If two ranks have summed the
    same micro-batch (in different generations), the first keeps it and the other starts over with nothing.

    Args:
        micro_batches: M, the number in the step.
        summed: for each rank, the micro-batches with gradients in its sum.
        usual: for each rank, its previous share. A rank keeps these unless another rank has them, so only the lost
            ranks' shares move.
        idle: ranks that get none of the rest, unless all ranks are idle.
        counts: the number for each rank, if they differ.
    """
    taken: set[int] = set()
    shares: list[list[int]] = []
    for mine in summed:
        # A rank has one sum of gradients: if another rank has one of its parts, nothing of it can be kept.
        keep = [] if taken & set(mine) else sorted(mine)
        taken.update(keep)
        shares.append(keep)
    _return_previous_shares(shares, usual, taken, counts or [-(-micro_batches // len(shares))] * len(shares))
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


def _return_previous_shares(
    shares: list[list[int]], usual: Sequence[Sequence[int]], taken: set[int], most: Sequence[int]
) -> None:
    """Add each rank's previous micro-batches that no rank has to its share, up to its maximum; update `shares` and
    `taken`.
    """
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
    """Return the assignment of a repeated or next step, in which survivors keep their computed micro-batches.

    () for the usual one, and after a start or rollback. Standbys that take over ranks and still receive their state
    compute nothing in that step: the others compute their share. With experts they do, because all ranks run the same
    number of rounds.

    Args:
        record: with the previous plan.
        plan: the next one.
        stand_ins: the nodes that take over ranks.
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
    """Return the summed micro-batches that each replica group keeps, for `Begin`; () if none does or groups have one
    worker.

    A group in the decided state keeps the micro-batches that all of its workers report, if all of these are assigned to
    it; else none. A group that receives the decided state keeps its sum of the previous step, which may be repeated
    until the state has arrived.
    """
    if plan.places == 1 or decision.kind not in (DecisionKind.REDO, DecisionKind.FORWARD):
        return ()
    kept: list[tuple[int, ...]] = []
    for number, unit in enumerate(_units(plan)):
        applied, mine = summed_by(unit, reports)
        lags = applied != decision.applied and all(worker in plan.sources for worker in unit)
        assigned = assignment[number] if assignment else ()
        goes_on = applied == decision.applied and set(mine) <= set(assigned)
        kept.append(mine if lags or goes_on else ())
    return tuple(kept) if any(kept) else ()


def summed_by(unit: Sequence[str], reports: Mapping[str, Report]) -> tuple[int | None, tuple[int, ...]]:
    """Return the step that all workers of a replica group have applied, and the micro-batches that all have summed.

    A micro-batch that only one reports was a proposal that the others had not accepted. (None, ()) if a report is
    missing or their states differ.
    """
    said = [report for worker in unit if (report := reports.get(worker)) is not None]
    applied = {report.applied for report in said}
    if len(said) < len(unit) or len(applied) > 1:
        return None, ()
    first, *others = (report.summed for report in said)
    return applied.pop(), tuple(one for one in first if all(one in summed for summed in others))


def count_kept(
    record: Record,
    plan: GenerationPlan,
    decision: Decision,
    reports: Mapping[str, Report],
    assignment: Sequence[Sequence[int]],
) -> tuple[int | None, int | None]:
    """Return how many micro-batches of the interrupted step are kept, and how many must be repeated.

    If the step is finished (FORWARD), all are kept. Each is None after a start or rollback; the second one also if it
    is unknown, such as the work of lost ranks.

    Args:
        assignment: the assignment of the repeated step, from `first_assignment`.
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
