"""Which rank computes which micro-batch of a step."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heapreplace


def round_robin(micro_batches: int, world: int, rank: int) -> tuple[int, ...]:
    """Return a rank's micro-batches, 0-based: rank, rank + world, ... Ranks have as many, or one more than others."""
    return tuple(range(rank, micro_batches, world))


def keep_summed(
    micro_batches: int,
    summed: Sequence[Sequence[int]],
    usual: Sequence[Sequence[int]] = (),
    idle: Collection[int] = (),
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
    """
    taken: set[int] = set()
    shares: list[list[int]] = []
    for mine in summed:
        # Gradients are one sum per rank: if a single part belongs to somebody else, none of it can be kept.
        keep = [] if taken & set(mine) else sorted(mine)
        taken.update(keep)
        shares.append(keep)
    _give_back(shares, usual, taken, -(-micro_batches // len(shares)))
    none = idle if len(idle) < len(shares) else ()
    least = [(len(share), rank) for rank, share in enumerate(shares) if rank not in none]
    heapify(least)
    for micro_batch in range(micro_batches):
        if micro_batch not in taken:
            size, rank = least[0]
            shares[rank].append(micro_batch)
            heapreplace(least, (size + 1, rank))
    return tuple(tuple(share) for share in shares)


def _give_back(shares: list[list[int]], usual: Sequence[Sequence[int]], taken: set[int], most: int) -> None:
    """Let each rank go on with what it had, up to an equal share."""
    for share, mine in zip(shares, usual, strict=False):
        back = [micro_batch for micro_batch in mine if micro_batch not in taken][: max(0, most - len(share))]
        taken.update(back)
        share += back
        share.sort()


@dataclass(slots=True)
class Share:
    """What one worker computes of the step in progress.

    assigned: its micro-batches, where they are not those of its rank.
    summed: those of them whose gradients it has, or is about to have.
    """

    assigned: tuple[int, ...] | None = None
    summed: list[int] = field(default_factory=list[int])

    def change(self, assigned: tuple[int, ...] | None, *, same_step: bool, keeps: bool = False) -> None:
        """Be given others; what is summed stays where it is a part of these, and of the same step.

        Args:
            keeps: the step of what is summed may still be done again: those that are given are of a later one.
        """
        if not (keeps or (same_step and assigned and set(self.summed) <= set(assigned))):
            self.summed = []
        self.assigned = assigned
