"""Which nodes: a job stays within as few racks and zones as can be."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping

from holdfast.protocol.pool.record import PoolNode

#: a zone, and a rack in it
_Rack = tuple[str, str]


def _rack(node: PoolNode) -> _Rack:
    return node.zone, node.rack


def choose(nodes: Mapping[str, PoolNode], has: Iterable[str], free: Iterable[str], count: int) -> list[str]:
    """Return up to `count` of the free nodes for a job.

    First those in racks that it is in, then of its zones; of these the smallest rack that suffices, else the largest.
    """
    racks: defaultdict[_Rack, list[str]] = defaultdict(list)
    for name in sorted(free):
        racks[_rack(nodes[name])].append(name)
    mine = {_rack(nodes[name]) for name in has if name in nodes}
    zones = Counter(zone for zone, _ in mine)
    room = Counter({zone: 0 for zone, _ in racks})
    for (zone, _), names in racks.items():
        room[zone] += len(names)
    chosen: list[str] = []
    while racks and len(chosen) < count:
        wanted = count - len(chosen)

        def rank(rack: _Rack, wanted: int = wanted) -> tuple[bool, bool, tuple[bool, int], tuple[bool, int], _Rack]:
            size = len(racks[rack])
            return rack not in mine, not zones[rack[0]], _fit(room[rack[0]], wanted), _fit(size, wanted), rack

        best = min(racks, key=rank)
        taken = racks.pop(best)[:wanted]
        chosen += taken
        room[best[0]] -= len(taken)
        mine.add(best)
        zones[best[0]] += 1
    return chosen


def _fit(size: int, wanted: int) -> tuple[bool, int]:
    """Return what is small for what suffices with least left over, else for what has most."""
    return size < wanted, size if size >= wanted else -size


def spare(nodes: Mapping[str, PoolNode], has: Collection[str], here: Collection[str], count: int) -> list[str]:
    """Return the `count` nodes that a job gives back: first those that are out of touch."""
    in_rack = Counter(_rack(nodes[name]) for name in has)
    in_zone = Counter(nodes[name].zone for name in has)

    def rank(name: str) -> tuple[bool, int, int, _Rack, str]:
        rack = _rack(nodes[name])
        return name in here, in_zone[rack[0]], in_rack[rack], rack, name

    return sorted(has, key=rank)[:count]
