"""Moving jobs together: into fewer racks and zones, where that is worth what the moves cost.

A job keeps as many nodes as it has. Each move has one of its nodes joined by another that is nobody's, and then left:
so nobody is ever short of one, and what is left is free for the next move. The way is searched by steps: each gathers a
job around a rack, into nodes that are free and into those of others, which change places with it by way of a free one.
Of each job in turn the step is taken that saves most beyond its cost, until none saves anything; the jobs to and fro.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

from holdfast.protocol.pool.record import PoolNode

#: a zone fewer is worth so many racks
ZONE_IN_RACKS = 10.0
#: a job in one rack fewer is worth so many seconds of its training, unless somebody says otherwise
WORTH_S = 60.0
#: a job is gathered around so many racks at the most: those in which it is, or there is room, most
_MOST_RACKS = 8

#: a zone, and a rack in it; whoever names none is a rack of its own
_Place = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Relocation:
    """A job gives one node up for another."""

    job: str
    from_node: str
    to_node: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Occupied:
    """Who has which nodes.

    owners: of the nodes whose jobs may move. free: nobody's, or standbys, which leave at once. refused: nodes that a
    job would not take. move_s: what a move of a job costs of its training.
    """

    nodes: Mapping[str, PoolNode]
    owners: Mapping[str, str]
    free: frozenset[str]
    refused: Mapping[str, frozenset[str]]
    move_s: Mapping[str, float]

    def place(self, node: str) -> _Place:
        """Return the rack of a node."""
        known = self.nodes[node]
        return known.zone, known.rack or f"\0{node}"

    def fits(self, job: str, node: str) -> bool:
        """Tell whether a job would take a node."""
        return node not in self.refused.get(job, frozenset())


@dataclass(frozen=True, kw_only=True, slots=True)
class Compaction:
    """What moves, in order. `racks`, `zones`: of each job that moves, before and after."""

    moves: tuple[Relocation, ...]
    racks: Mapping[str, tuple[int, int]]
    zones: Mapping[str, tuple[int, int]]
    gain_s: float
    cost_s: float


def compact(at: Occupied, worth_s: float) -> Compaction:
    """Return the moves that are worth their cost, none where nothing is.

    Args:
        worth_s: a job in one rack fewer is worth so much of its training.
    """
    begun = _Board(at, at.owners)
    found = [
        _searched(begun.copy(), jobs, worth_s) for jobs in (sorted(begun.nodes), sorted(begun.nodes, reverse=True))
    ]
    _, moves, board = max(found, key=lambda one: one[0])
    jobs = dict.fromkeys(move.job for move in moves)
    return Compaction(
        moves=tuple(moves),
        racks={job: (len(begun.racks(job)), len(board.racks(job))) for job in jobs},
        zones={job: (len(begun.zones(job)), len(board.zones(job))) for job in jobs},
        gain_s=sum(begun.worth(job, worth_s) - board.worth(job, worth_s) for job in jobs),
        cost_s=sum(at.move_s[move.job] for move in moves),
    )


def _searched(board: _Board, turns: Sequence[str], worth_s: float) -> tuple[float, list[Relocation], _Board]:
    """Take steps, the jobs in these turns; return what they save beyond their cost, and who has which nodes then."""
    moves, saved, goes_on = list[Relocation](), 0.0, True
    while goes_on:
        goes_on = False
        for job in turns:
            none: tuple[float, list[Relocation]] = (0.0, [])
            net, step = max(_weighed(board, job, worth_s), key=lambda one: one[0], default=none)
            if net > 0:
                goes_on, saved = True, saved + net
                moves += step
                board.move(step)
    return saved, moves, board


class _Board:
    """Who has which nodes while moves are tried."""

    def __init__(self, at: Occupied, owners: Mapping[str, str]) -> None:
        self.at = at
        self.owners = dict(owners)
        self.nodes: dict[str, set[str]] = {}
        for node, job in owners.items():
            self.nodes.setdefault(job, set()).add(node)
        self.free: set[str] = {*at.free, *at.owners}.difference(owners)

    def copy(self) -> _Board:
        """Return another that is as this one is now."""
        return _Board(self.at, self.owners)

    def move(self, moves: Sequence[Relocation]) -> None:
        """Make moves."""
        for move in moves:
            assert self.owners.pop(move.from_node) == move.job, move
            self.owners[move.to_node] = move.job
            self.free.remove(move.to_node)
            self.free.add(move.from_node)
            self.nodes[move.job].remove(move.from_node)
            self.nodes[move.job].add(move.to_node)

    def racks(self, job: str, without: str = "") -> set[_Place]:
        """Return the racks in which a job is."""
        return {self.at.place(node) for node in self.nodes[job] if node != without}

    def zones(self, job: str) -> set[str]:
        """Return the zones in which a job is."""
        return {zone for zone, _ in self.racks(job)}

    def worth(self, job: str, worth_s: float) -> float:
        """Return what it costs that a job is in so many racks and zones."""
        return worth_s * (len(self.racks(job)) + ZONE_IN_RACKS * len(self.zones(job)))


# ---- steps ----


def _weighed(board: _Board, job: str, worth_s: float) -> Iterator[tuple[float, list[Relocation]]]:
    """Yield ways to gather a job around a rack, and what each saves beyond its cost."""
    at, mine = board.at, sorted(board.nodes[job])
    held, room = Counter(map(at.place, mine)), Counter(map(at.place, board.free))
    racks = sorted(map(at.place, at.owners.keys() | at.free), key=lambda rack: (-held[rack], -room[rack], rack))
    for rack in list(dict.fromkeys(racks))[:_MOST_RACKS]:
        for swaps, goes_on in ((False, False), (True, False), (True, True)):
            targets = _gathered(board, job, mine, rack, swaps=swaps)
            then = board.copy()
            step = _brought_about(then, job, targets, goes_on=goes_on)
            if step:
                jobs = {move.job for move in step}
                gain = sum(board.worth(one, worth_s) - then.worth(one, worth_s) for one in jobs)
                yield gain - sum(at.move_s[move.job] for move in step), step


def _gathered(board: _Board, job: str, mine: Sequence[str], rack: _Place, *, swaps: bool) -> list[str]:
    """Return the nodes that a job has once it is around a rack: of that first, then of its zone, then where it is."""
    at = board.at
    held, room = Counter(map(at.place, mine)), Counter(map(at.place, board.free))

    def rank(place: _Place) -> tuple[bool, bool, int, int, _Place]:
        return place != rack, place[0] != rack[0], -held[place], -room[place], place

    order = sorted({rack, *held, *(one for one in room if one[0] == rack[0])}, key=rank)
    there: dict[_Place, list[str]] = {place: [] for place in order}
    others = sorted(board.owners.keys() - board.nodes[job]) if swaps else []
    for node in (*mine, *sorted(board.free), *others):
        if at.place(node) in there and at.fits(job, node):
            there[at.place(node)].append(node)
    return [node for place in order for node in there[place]][: len(mine)]


def _brought_about(then: _Board, job: str, targets: Sequence[str], *, goes_on: bool) -> list[Relocation]:
    """Make the moves that bring a job to its targets, and return them; none where there is nothing to do, or no way.

    Another job that has one of these changes places with it, by way of a free node, or (not `goes_on`) stays on that.
    """
    new = [node for node in targets if node not in then.nodes[job]]
    leaves = sorted(then.nodes[job] - set(targets))
    if len(leaves) != len(new):
        return []
    new.sort(key=lambda node: node in then.owners)  # (free ones first: each leaves another one free)
    moves: list[Relocation] = []
    for old, node in zip(leaves, new, strict=True):
        step = _change(then, job, old, node, goes_on=goes_on)
        if not step:
            return []
        then.move(step)
        moves += step
    return moves


def _change(then: _Board, job: str, old: str, node: str, *, goes_on: bool) -> list[Relocation]:
    """Return the moves by which a job gives one node up for another; none where no free one is there for that."""
    other = then.owners.get(node)
    if other is None:
        return [Relocation(job, old, node)]
    by_way = [one for one in then.free if then.at.fits(other, one)]
    if not by_way or (goes_on and not then.at.fits(other, old)):
        return []
    best = min(by_way, key=_nearest(then.at, then.racks(other, without=node), node))
    moves = [Relocation(other, node, best), Relocation(job, old, node)]
    return [*moves, Relocation(other, best, old)] if goes_on else moves


def _nearest(at: Occupied, theirs: Set[_Place], node: str) -> Callable[[str], tuple[bool, bool, str]]:
    """Return how far away a node is for a job that leaves another: in racks where it is, in that one's zone."""
    zone = at.place(node)[0]
    return lambda one: (at.place(one) not in theirs, at.place(one)[0] != zone, one)
