"""Which unit computes which micro-batch of a step: a rank, where each has a whole replica of the model."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from heapq import heapify, heapreplace

from holdfast.protocol.plan import GenerationPlan


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
    for turn in range(plan.counts[unit]):
        mine.append(first + sum(count > turn for count in plan.counts[:unit]))
        first += sum(count > turn for count in plan.counts)
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
