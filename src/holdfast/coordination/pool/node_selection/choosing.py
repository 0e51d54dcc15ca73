"""Selects nodes for jobs, so that each job spans as few racks and zones as possible."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping

from holdfast.protocol.pool.record import PoolNode

#: a zone, and a rack of that zone
_Rack = tuple[str, str]


def _rack_of(node: PoolNode) -> _Rack:
    """Return the rack of a node."""
    return node.zone, node.rack


def select_nodes(nodes: Mapping[str, PoolNode], has: Iterable[str], free: Iterable[str], count: int) -> list[str]:
    """Return up to `count` of the free nodes for a job.

    Racks in which the job has nodes come first, then racks of its zones. Among equals the smallest rack that suffices
    comes first, else the largest.

    Args:
        nodes: all nodes of the pool, by name
        has: the job's nodes
        free: the nodes to select from
        count: how many to select
    """
    racks: defaultdict[_Rack, list[str]] = defaultdict(list)
    for name in sorted(free):
        racks[_rack_of(nodes[name])].append(name)
    mine = {_rack_of(nodes[name]) for name in has if name in nodes}
    zones = Counter(zone for zone, _ in mine)
    room = Counter({zone: 0 for zone, _ in racks})
    for (zone, _), names in racks.items():
        room[zone] += len(names)
    chosen: list[str] = []
    while racks and len(chosen) < count:
        wanted = count - len(chosen)

        def rank(rack: _Rack, wanted: int = wanted) -> tuple[bool, bool, tuple[bool, int], tuple[bool, int], _Rack]:
            size = len(racks[rack])
            return rack not in mine, not zones[rack[0]], _fit_key(room[rack[0]], wanted), _fit_key(size, wanted), rack

        best = min(racks, key=rank)
        taken = racks.pop(best)[:wanted]
        chosen += taken
        room[best[0]] -= len(taken)
        mine.add(best)
        zones[best[0]] += 1
    return chosen


def _fit_key(size: int, wanted: int) -> tuple[bool, int]:
    """Return a sort key: the smallest size that suffices first, then the largest."""
    return size < wanted, size if size >= wanted else -size


def select_surplus(nodes: Mapping[str, PoolNode], has: Collection[str], here: Collection[str], count: int) -> list[str]:
    """Return the `count` nodes that a job should return: disconnected ones first, then nodes in the zone and the rack
    in which it has the fewest.

    Args:
        nodes: all nodes of the pool, by name
        has: the job's nodes
        here: the connected nodes
        count: how many to select
    """
    in_rack = Counter(_rack_of(nodes[name]) for name in has)
    in_zone = Counter(nodes[name].zone for name in has)

    def rank(name: str) -> tuple[bool, int, int, _Rack, str]:
        rack = _rack_of(nodes[name])
        return name in here, in_zone[rack[0]], in_rack[rack], rack, name

    return sorted(has, key=rank)[:count]
