"""Who tells of a step as it passes: few workers, on nodes that do not share their fate where that can be.

All others keep what they applied, and say where they stand with their heartbeats (docs/protocol.md, Witnesses).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import count

#: in a job of so many workers all are: its steps are announced as soon as the last has applied them
SMALL = 16
#: of more workers, so many at least. Each of them is heard of every step, which is most of what steps cost; where none
#: is left, a step is announced a heartbeat later
FEW = 4


def witnesses_wanted(workers: int, fault_threshold: int) -> int:
    """Return how many of a job's workers are to tell of steps: one more than the nodes that may be lost at once."""
    return workers if workers <= SMALL else max(FEW, fault_threshold + 1)


def choose_witnesses(places: Sequence[tuple[str, str]], wanted: int) -> tuple[int, ...]:
    """Return the ranks of the witnesses, ascending: as many as are wanted, or all.

    They are on as many nodes as can be, and those in as many racks as can be. A node has more than one only where every
    node has one.

    Args:
        places: by rank, the node and its rack; "" for a rack of its own.
        wanted: how many workers, more than 0.
    """
    ranks: dict[str, list[int]] = defaultdict(list)
    firsts: dict[str, str] = {}
    for rank, (node, rack) in enumerate(places):
        ranks[node].append(rank)
        firsts.setdefault(rack or f"/{node}", node)  # (no rack's name has a slash)
    nodes = list(dict.fromkeys((*firsts.values(), *ranks)))
    chosen: list[int] = []
    wanted = min(wanted, len(places))
    for place in count():
        chosen += [ranks[node][place] for node in nodes if place < len(ranks[node])]
        if len(chosen) >= wanted:
            return tuple(sorted(chosen[:wanted]))
    raise AssertionError("unreachable")
