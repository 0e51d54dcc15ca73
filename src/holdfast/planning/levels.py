"""The groups of a hierarchical sum: first the members of each node, then across nodes, in small groups.

On each level the members form small groups. The first members of each group are its `owners`; every group of a level
has the same number of them. Each owner adds up one part of the group's sum. On the next level it meets the owners of
the same part from other groups. After the last level, everything is added up.

A group may have one member more than owners. A member that is not an owner contributes its share and waits for the
result. So each member is in one small group per level, about log(members) groups in all. Any number of members works. A
result that exists on any member contains the shares of all members.

The groups depend only on the order of the members and on their nodes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

#: Up to this many members form one level, in which each meets all others. With 16 members, two levels take less
#: processor time (benchmarks/levels.py). With 8 they do not, and one level has half as many waits.
FLAT_UP_TO = 8
#: The most owners of a group, except for the workers of one node. An operation takes levels * L + messages * o, with L
#: the network latency (30 us) and o the cost to send and receive one message (5 us). From 16 to 1,024 nodes, fan-outs
#: of 4 to 16 take times within 25 % of each other, and smaller ones need fewer connections.
FAN_OUT = 8
#: Parts are cut at multiples of this many elements. The squares of each block are added up in floating point.
BLOCK = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class Levels:
    """One member's groups on all levels, lowest level first."""

    #: The number of owners of each group, by level.
    owners: tuple[int, ...]
    #: This member's group on each of its levels: the members, in the order in which they are added up. There are fewer
    #: groups than levels if the member is not an owner on its last level.
    groups: tuple[tuple[int, ...], ...]


def compute_levels(
    nodes: Sequence[str], member: int, *, flat_up_to: int = FLAT_UP_TO, fan_out: int = FAN_OUT
) -> Levels:
    """Return the groups of one member on all levels.

    Few members form one level. If nodes have similar numbers of members, the members of a node add up first, then
    rows of one member per node. Otherwise all members form one row, in groups of adjacent ones.

    Args:
        nodes: The node of each member. Members of one node need not be adjacent.
        member: The member, as an index in `nodes`.
        flat_up_to: Up to this many members form a single level.
        fan_out: The most owners in a group across nodes; at least 2.

    Raises:
        ValueError: The member does not exist, or the fan-out is below 2.
    """
    if not 0 <= member < len(nodes) or fan_out < 2:
        raise ValueError(
            f"member is {member}, fan-out {fan_out}: give a member below {len(nodes)}, and a fan-out of at least 2"
        )
    all_members = list(range(len(nodes)))
    if len(nodes) <= flat_up_to:
        return Levels(owners=(len(nodes),), groups=(tuple(all_members),))
    homes: dict[str, list[int]] = {}
    for place, node in enumerate(nodes):
        homes.setdefault(node, []).append(place)
    fewest, most = min(map(len, homes.values())), max(map(len, homes.values()))
    if most == 1 or 2 * fewest <= most:
        # On nodes of such different sizes, one owner would do the work of several owners elsewhere.
        return _levels_across_nodes(all_members, len(nodes), member, fan_out)
    home = homes[nodes[member]]
    place = home.index(member)
    row = [members[place] for members in homes.values()] if place < fewest else []
    across = _levels_across_nodes(row, len(homes), member, fan_out)
    return Levels(owners=(fewest, *across.owners), groups=(tuple(home), *across.groups))


def _levels_across_nodes(row: list[int], length: int, member: int, fan_out: int) -> Levels:
    """Return the levels on which the members of one row add up, adjacent members first.

    Args:
        row: The members of the row; empty if `member` is not one of them.
        length: The length of every row on this level.
        member: The member that the result is for.
        fan_out: The most owners in a group.
    """
    owners: list[int] = []
    groups: list[tuple[int, ...]] = []
    while length > 1:
        count = -(-length // fan_out)
        owners.append(length // count)
        if row:
            starts = _group_starts(length, count)
            number = bisect_right(starts, row.index(member)) - 1
            group = row[starts[number] : [*starts, length][number + 1]]
            groups.append(tuple(group))
            place = group.index(member)
            row = [row[start + place] for start in starts] if place < owners[-1] else []
        length = count
    return Levels(owners=tuple(owners), groups=tuple(groups))


def _group_starts(length: int, count: int) -> list[int]:
    """Return the index at which each of `count` groups of a row starts. Group sizes differ by at most one, larger ones
    first.
    """
    size, larger = divmod(length, count)
    return [group * size + min(group, larger) for group in range(count)]
