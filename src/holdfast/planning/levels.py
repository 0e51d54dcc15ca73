"""How the members of a group add up, level by level: within a node first, then across nodes, a few at a time.

On each level the members form small groups, one beside the other. Of the members of a group the first ones, as many in
every group of the level, are its **owners**: each takes over one part of what the group adds up, and goes on with that
part to the next level, where it meets those that own the same part in other groups. With the last level everything is
added up. Whoever is no owner (a group may have a member more than owners) has put in its share, and waits for the
result. So each member is in one small group per level, about log(members) of them, whatever the number of members: no
number is awkward, and a result that has come anywhere has come from everybody.

All of it follows from the order of the members and their nodes alone.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

#: Up to so many members there is one level: everybody meets everybody. With 16, two levels already take less processor
#: time (benchmarks/levels.py); with 8 they do not, and one is half as many waits.
FLAT_UP_TO = 8
#: So many owners a group has at most, but for the workers of one node. An operation takes levels * L + messages * o,
#: with L a message's way through the network (30 us) and o what sending and receiving it costs (5 us): from 16 to 1,024
#: nodes fan-outs of 4 to 16 are within a quarter of each other, and smaller ones have fewer connections.
FAN_OUT = 8
#: What members add up is cut at multiples of so many elements, the squares of which are added up in floating point.
BLOCK = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class Levels:
    """One member's place in all levels, lowest first.

    owners: how many owners each group of a level has.
    groups: this member's group on each level that it is on, as members in the order in which they are added up; fewer
        than there are levels where it is no owner on its last.
    """

    owners: tuple[int, ...]
    groups: tuple[tuple[int, ...], ...]


def levels_of(nodes: Sequence[str], member: int, *, flat_up_to: int = FLAT_UP_TO, fan_out: int = FAN_OUT) -> Levels:
    """Return a member's levels.

    Args:
        nodes: of each member, its node; members of one node need not be neighbours.
        member: whose levels; a place in `nodes`.
        flat_up_to: so many members are one level.
        fan_out: the most owners in a group across nodes; at least 2.

    Raises:
        ValueError: such a member or fan-out there is not.
    """
    if not 0 <= member < len(nodes) or fan_out < 2:
        raise ValueError(f"member {member} of {len(nodes)}, fan-out {fan_out}: there is no such member or fan-out")
    everybody = list(range(len(nodes)))
    if len(nodes) <= flat_up_to:
        return Levels(owners=(len(nodes),), groups=(tuple(everybody),))
    homes: dict[str, list[int]] = {}
    for place, node in enumerate(nodes):
        homes.setdefault(node, []).append(place)
    fewest, most = min(map(len, homes.values())), max(map(len, homes.values()))
    if most == 1 or 2 * fewest <= most:
        # On nodes that are this unlike, an owner would have to take in what several do elsewhere.
        return _across(everybody, len(nodes), member, fan_out)
    home = homes[nodes[member]]
    place = home.index(member)
    row = [members[place] for members in homes.values()] if place < fewest else []
    across = _across(row, len(homes), member, fan_out)
    return Levels(owners=(fewest, *across.owners), groups=(tuple(home), *across.groups))


def _across(row: list[int], length: int, member: int, fan_out: int) -> Levels:
    """Return the levels in which those of a row add up, neighbours first.

    Args:
        row: those that meet; empty where the member is not among them.
        length: of every member's row on this level.
    """
    owners: list[int] = []
    groups: list[tuple[int, ...]] = []
    while length > 1:
        count = -(-length // fan_out)
        owners.append(length // count)
        if row:
            starts = _starts(length, count)
            number = bisect_right(starts, row.index(member)) - 1
            group = row[starts[number] : [*starts, length][number + 1]]
            groups.append(tuple(group))
            place = group.index(member)
            row = [row[start + place] for start in starts] if place < owners[-1] else []
        length = count
    return Levels(owners=tuple(owners), groups=tuple(groups))


def _starts(length: int, count: int) -> list[int]:
    """Return where each of `count` groups of a row begins; their sizes differ by one at most, larger ones first."""
    size, larger = divmod(length, count)
    return [group * size + min(group, larger) for group in range(count)]
