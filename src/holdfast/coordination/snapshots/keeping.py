"""Which nodes hold copies of which others' snapshots: groups of F nodes, of different racks where there are any.

In a group each holds the parts of all others, so that fewer pairs of nodes share a fate than on a ring (GEMINI, 4.2:
groups are the best placement where they divide the nodes; the nodes left over join the last group, as a ring).
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import zip_longest


def peers_of(racks: Mapping[str, str], threshold: int) -> dict[str, tuple[str, ...]]:
    """Return for each node which others are to hold copies of its parts: `threshold` - 1 of them, or all there are.

    Args:
        racks: by node; "" for a rack of its own.
    """
    order = _in_turn(racks)
    found: dict[str, tuple[str, ...]] = {}
    groups = max(1, len(order) // max(1, threshold))
    for number in range(groups):
        first = number * threshold
        group = order[first:] if number + 1 == groups else order[first : first + threshold]
        for place, node in enumerate(group):
            following = [*group[place + 1 :], *group[:place]]
            # (in the group that is larger: first those that share no rack with it)
            following.sort(key=lambda other, node=node: bool(racks[node]) and racks[other] == racks[node])
            found[node] = tuple(following[: threshold - 1])
    return found


def _in_turn(racks: Mapping[str, str]) -> list[str]:
    """Return the nodes, rack by rack in turn, so that neighbours are of different racks as far as that goes."""
    by_rack: dict[str, list[str]] = {}
    for node in sorted(racks):
        by_rack.setdefault(racks[node] or f"/{node}", []).append(node)  # (no rack's name has a slash)
    rows = sorted(by_rack.values(), key=lambda nodes: (-len(nodes), nodes))
    return [node for transaction in zip_longest(*rows) for node in transaction if node is not None]
