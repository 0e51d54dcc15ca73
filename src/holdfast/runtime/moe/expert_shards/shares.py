"""Division of expert gradients: each (layer, expert, weight) is cut into one shard per host rank.

Pure integers, the same on every rank. Shards of all items with the same hosts are adjacent, so that the owner of a
shard sums all of them at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.planning.levels import BLOCK
from holdfast.runtime.moe.hosts import Placement, hosts_by_expert

#: the ranks that compute the gradients, and the ranks that apply their sum
ShardGroupKey = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Item:
    """One weight of one expert of one layer, whose gradient is divided into one shard per host rank."""

    layer: int
    expert: int
    weight: str
    numel: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardGroup:
    """All items with the same present and future hosts."""

    #: ranks that compute the gradients
    hosts: tuple[int, ...]
    #: ranks that apply the sum
    receivers: tuple[int, ...]
    items: tuple[Item, ...]

    @property
    def key(self) -> ShardGroupKey:
        """The hosts and receivers, which identify the group."""
        return self.hosts, self.receivers

    @property
    def is_local(self) -> bool:
        """Whether one rank has all items and keeps them, so that nothing is sent."""
        return len(self.hosts) == 1 and self.receivers == self.hosts

    def shard(self, item: Item, rank: int) -> slice:
        """Return the elements of an item that a host sums; may be empty.

        All hosts have shards of equal size, a multiple of `BLOCK`, except the last ones.
        """
        place = self.hosts.index(rank)
        size = -(-item.numel // (len(self.hosts) * BLOCK)) * BLOCK
        return slice(min(place * size, item.numel), min((place + 1) * size, item.numel))

    def shard_length(self, rank: int) -> int:
        """Return the number of elements that a host sums in total."""
        parts = (self.shard(item, rank) for item in self.items)
        return sum(part.stop - part.start for part in parts)


def group_items(
    placement: Placement, weights: Sequence[dict[str, int]], next_placement: Placement | None = None
) -> tuple[ShardGroup, ...]:
    """Group all items (one weight of one expert each) by their present and future hosts, and sort the groups by these
    ranks.

    Args:
        placement: per layer and rank.
        weights: per layer, elements of one expert's weights by name.
        next_placement: the placement from the next step on; None if it stays the same.
    """
    grouped: dict[ShardGroupKey, list[Item]] = {}
    for layer, (held, then, sizes) in enumerate(zip(placement, next_placement or placement, weights, strict=True)):
        receivers = hosts_by_expert(then)
        for expert, ranks in hosts_by_expert(held).items():
            items = (Item(layer=layer, expert=expert, weight=name, numel=size) for name, size in sizes.items())
            grouped.setdefault((ranks, receivers[expert]), []).extend(items)
    return tuple(
        ShardGroup(hosts=ranks, receivers=receivers, items=tuple(items))
        for (ranks, receivers), items in sorted(grouped.items())
    )
