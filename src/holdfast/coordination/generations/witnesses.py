"""Witnesses: the few workers that report each step as it passes, on independent nodes if possible.

The other workers keep their applied steps, and report progress with heartbeats (docs/protocol.md, Witnesses).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import count

#: In a job of at most this many workers, all are witnesses. A step is announced once the last worker has applied it.
SMALL = 16
#: The least number of witnesses in larger jobs. Their messages are most of a step's cost. If no witness is left, steps
#: are announced a heartbeat later.
FEW = 4


def witnesses_wanted(workers: int, fault_threshold: int) -> int:
    """Return the number of witnesses: all of at most 16 workers, else 4, or one more than the nodes that may be lost
    together.
    """
    return workers if workers <= SMALL else max(FEW, fault_threshold + 1)


def choose_witnesses(places: Sequence[tuple[str, str]], wanted: int) -> tuple[int, ...]:
    """Return the ranks of the witnesses, ascending: as many as wanted, or all.

    They are on as many nodes, and in as many racks, as possible. A node has several only if every node has one.

    Args:
        places: by rank, the node and its rack; "" for a rack of its own.
        wanted: the number of workers, more than 0.
    """
    ranks: dict[str, list[int]] = defaultdict(list)
    firsts: dict[str, str] = {}
    for rank, (node, rack) in enumerate(places):
        ranks[node].append(rank)
        # Rack names contain no slash.
        firsts.setdefault(rack or f"/{node}", node)
    nodes = list(dict.fromkeys((*firsts.values(), *ranks)))
    chosen: list[int] = []
    wanted = min(wanted, len(places))
    for place in count():
        chosen += [ranks[node][place] for node in nodes if place < len(ranks[node])]
        if len(chosen) >= wanted:
            return tuple(sorted(chosen[:wanted]))
    raise AssertionError("unreachable")
