"""Placement of snapshot copies: groups of F nodes, on different racks if possible.

In a group, each node holds the parts of all others. So fewer pairs of nodes share a fate than on a ring. GEMINI, 4.2:
groups are the best placement if their size divides the number of nodes; the remaining nodes join the last group, as a
ring.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import zip_longest


def peers_of(racks: Mapping[str, str], threshold: int) -> dict[str, tuple[str, ...]]:
    """Return for each node the peers that hold copies of its parts, best first: `threshold` - 1, or all others if there
    are fewer.

    Nodes form groups of `threshold`, on different racks if possible; the rest joins the last group.

    Args:
        racks: The rack of each node; "" for a rack of its own.
        threshold: How many nodes hold each part.
    """
    order = _in_turn(racks)
    found: dict[str, tuple[str, ...]] = {}
    groups = max(1, len(order) // max(1, threshold))
    for number in range(groups):
        first = number * threshold
        group = order[first:] if number + 1 == groups else order[first : first + threshold]
        for place, node in enumerate(group):
            following = [*group[place + 1 :], *group[:place]]
            # In the larger last group, peers on other racks come first.
            following.sort(key=lambda other, node=node: bool(racks[node]) and racks[other] == racks[node])
            found[node] = tuple(following[: threshold - 1])
    return found


def _in_turn(racks: Mapping[str, str]) -> list[str]:
    """Return the nodes, alternating between racks, so that neighbours are on different racks if possible."""
    by_rack: dict[str, list[str]] = {}
    for node in sorted(racks):
        # Rack names contain no slash.
        by_rack.setdefault(racks[node] or f"/{node}", []).append(node)
    rows = sorted(by_rack.values(), key=lambda nodes: (-len(nodes), nodes))
    return [node for row in zip_longest(*rows) for node in row if node is not None]
