"""How expert gradients are shared out: each (layer, expert, weight) is cut into as many shards as it has host ranks.

Pure integers, the same on every rank. Shards of all items with the same hosts lie side by side, so that the owner of
a shard sums all of them at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.planning.levels import BLOCK
from holdfast.runtime.moe.hosts import Placement, hosts_by_expert

#: whose gradients are summed up, and who is to have the sum
ShardGroupKey = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Item:
    """One weight of one expert of one layer."""

    layer: int
    expert: int
    weight: str
    numel: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardGroup:
    """All items that live on the same ranks, and are to: whose gradients `hosts` make and `receivers` apply."""

    hosts: tuple[int, ...]
    receivers: tuple[int, ...]
    items: tuple[Item, ...]

    @property
    def key(self) -> ShardGroupKey:
        """What tells a family from all others."""
        return self.hosts, self.receivers

    @property
    def is_local(self) -> bool:
        """True where nothing travels: one rank has it all, and keeps it."""
        return len(self.hosts) == 1 and self.receivers == self.hosts

    def shard(self, item: Item, rank: int) -> slice:
        """Return the elements of an item that a host sums up."""
        place = self.hosts.index(rank)
        size = -(-item.numel // (len(self.hosts) * BLOCK)) * BLOCK
        return slice(min(place * size, item.numel), min((place + 1) * size, item.numel))

    def shard_length(self, rank: int) -> int:
        """Return how many elements a host sums up in all."""
        parts = (self.shard(item, rank) for item in self.items)
        return sum(part.stop - part.start for part in parts)


def group_items(
    placement: Placement, weights: Sequence[dict[str, int]], following: Placement | None = None
) -> tuple[ShardGroup, ...]:
    """Group all items by their hosts, and by those that are to be their hosts.

    Args:
        placement: per layer and rank.
        weights: per layer, elements of one expert's weights by name.
        following: the placement from the next step on; None: the same.
    """
    grouped: dict[ShardGroupKey, list[Item]] = {}
    for layer, (held, then, sizes) in enumerate(zip(placement, following or placement, weights, strict=True)):
        receivers = hosts_by_expert(then)
        for expert, ranks in hosts_by_expert(held).items():
            items = (Item(layer=layer, expert=expert, weight=name, numel=size) for name, size in sizes.items())
            grouped.setdefault((ranks, receivers[expert]), []).extend(items)
    return tuple(
        ShardGroup(hosts=ranks, receivers=receivers, items=tuple(items))
        for (ranks, receivers), items in sorted(grouped.items())
    )
