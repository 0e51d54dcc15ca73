"""Compacts jobs into fewer racks and zones, if that is worth the cost of the moves.

A job keeps its number of nodes. In each move one free node joins the job, and then the job leaves one of its nodes. So
a job never lacks a node, and the node that it leaves is free for the next move.

The search is greedy. Each step gathers one job around a rack, on free nodes and on nodes of other jobs, which are
exchanged by way of a free node. For each job in turn the step with the largest gain beyond its cost is made, until no
step gains anything. The search runs with the jobs in ascending and in descending order, and the better result counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

from holdfast.protocol.pool.record import PoolNode

#: worth of one zone fewer, in racks
ZONE_IN_RACKS = 10.0
#: default worth of one rack fewer for a job, in seconds of its training
RACK_WORTH_S = 60.0
#: Racks around which a job is gathered: at most this many, in order of its nodes there, then of free nodes.
_MOST_RACKS = 8

#: a zone, and a rack of that zone; a node without a rack is a rack of its own
_Rack = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Relocation:
    """A move: a job leaves one node for another."""

    job: str
    from_node: str
    to_node: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Occupancy:
    """The owners of the nodes, and the limits of moves."""

    nodes: Mapping[str, PoolNode]
    #: jobs by node, of jobs that may move
    owners: Mapping[str, str]
    #: nodes without a job, and standbys, which leave at once
    free: frozenset[str]
    #: nodes that a job refuses, by job
    refused: Mapping[str, frozenset[str]]
    #: seconds of its training that a move costs a job
    move_s: Mapping[str, float]

    def rack_of(self, node: str) -> _Rack:
        """Return the rack of a node."""
        known = self.nodes[node]
        return known.zone, known.rack or f"\0{node}"

    def can_use(self, job: str, node: str) -> bool:
        """Return whether a job accepts a node."""
        return node not in self.refused.get(job, frozenset())


@dataclass(frozen=True, kw_only=True, slots=True)
class Compaction:
    """The moves, in order, and their effect."""

    moves: tuple[Relocation, ...]
    #: racks of each moved job, before and after
    racks: Mapping[str, tuple[int, int]]
    #: zones of each moved job, before and after
    zones: Mapping[str, tuple[int, int]]
    #: seconds of training that the fewer racks and zones are worth
    gain_s: float
    #: seconds of training that the moves cost
    cost_s: float


def compact(at: Occupancy, worth_s: float) -> Compaction:
    """Return the moves that gather jobs into fewer racks and zones and are worth their cost, with their gain and cost
    in seconds, and the racks and zones of each moved job before and after.

    There are no moves if none is worth its cost.

    Args:
        at: the nodes and their owners
        worth_s: seconds of a job's training that one rack fewer is worth
    """
    begun = _Assignment(at, at.owners)
    found = [
        _search_moves(begun.copy(), jobs, worth_s) for jobs in (sorted(begun.nodes), sorted(begun.nodes, reverse=True))
    ]
    _, moves, board = max(found, key=lambda one: one[0])
    jobs = dict.fromkeys(move.job for move in moves)
    return Compaction(
        moves=tuple(moves),
        racks={job: (len(begun.racks(job)), len(board.racks(job))) for job in jobs},
        zones={job: (len(begun.zones(job)), len(board.zones(job))) for job in jobs},
        gain_s=sum(begun.spread_cost(job, worth_s) - board.spread_cost(job, worth_s) for job in jobs),
        cost_s=sum(at.move_s[move.job] for move in moves),
    )


def _search_moves(
    board: _Assignment, turns: Sequence[str], worth_s: float
) -> tuple[float, list[Relocation], _Assignment]:
    """Make the best step of each job in turn until none gains anything.

    Return the net gain in seconds, the moves, and the changed assignment.

    Args:
        board: The assignment to start from; it is changed.
        turns: The jobs in the order of their turns.
        worth_s: Seconds of a job's training that one rack fewer is worth.
    """
    moves: list[Relocation] = []
    saved = 0.0
    goes_on = True
    while goes_on:
        goes_on = False
        for job in turns:
            none: tuple[float, list[Relocation]] = (0.0, [])
            net, step = max(_weigh_steps(board, job, worth_s), key=lambda one: one[0], default=none)
            if net > 0:
                goes_on, saved = True, saved + net
                moves += step
                board.apply(step)
    return saved, moves, board


class _Assignment:
    """The nodes of each job while moves are tried."""

    def __init__(self, at: Occupancy, owners: Mapping[str, str]) -> None:
        self.occupancy = at
        self.owners = dict(owners)
        self.nodes: dict[str, set[str]] = {}
        for node, job in owners.items():
            self.nodes.setdefault(job, set()).add(node)
        self.free: set[str] = {*at.free, *at.owners}.difference(owners)

    def copy(self) -> _Assignment:
        """Return an independent copy."""
        return _Assignment(self.occupancy, self.owners)

    def apply(self, moves: Sequence[Relocation]) -> None:
        """Make these moves, in order: each job leaves `from_node` for the free `to_node`."""
        for move in moves:
            assert self.owners.pop(move.from_node) == move.job, move
            self.owners[move.to_node] = move.job
            self.free.remove(move.to_node)
            self.free.add(move.from_node)
            self.nodes[move.job].remove(move.from_node)
            self.nodes[move.job].add(move.to_node)

    def racks(self, job: str, without: str = "") -> set[_Rack]:
        """Return the racks of a job."""
        return {self.occupancy.rack_of(node) for node in self.nodes[job] if node != without}

    def zones(self, job: str) -> set[str]:
        """Return the zones of a job."""
        return {zone for zone, _ in self.racks(job)}

    def spread_cost(self, job: str, worth_s: float) -> float:
        """Return the cost of the job's racks and zones, in seconds of its training."""
        return worth_s * (len(self.racks(job)) + ZONE_IN_RACKS * len(self.zones(job)))


# ---- steps ----


def _weigh_steps(board: _Assignment, job: str, worth_s: float) -> Iterator[tuple[float, list[Relocation]]]:
    """Yield ways to gather a job around one of its best racks, with the net gain of each in seconds: onto free nodes,
    or also onto nodes of other jobs, which may or may not get its old ones.

    The assignment does not change.
    """
    at, mine = board.occupancy, sorted(board.nodes[job])
    held, room = Counter(map(at.rack_of, mine)), Counter(map(at.rack_of, board.free))
    racks = sorted(map(at.rack_of, at.owners.keys() | at.free), key=lambda rack: (-held[rack], -room[rack], rack))
    for rack in list(dict.fromkeys(racks))[:_MOST_RACKS]:
        for swaps, goes_on in ((False, False), (True, False), (True, True)):
            targets = _select_targets(board, job, mine, rack, swaps=swaps)
            then = board.copy()
            step = _move_to_targets(then, job, targets, goes_on=goes_on)
            if step:
                jobs = {move.job for move in step}
                gain = sum(board.spread_cost(one, worth_s) - then.spread_cost(one, worth_s) for one in jobs)
                yield gain - sum(at.move_s[move.job] for move in step), step


def _select_targets(board: _Assignment, job: str, mine: Sequence[str], rack: _Rack, *, swaps: bool) -> list[str]:
    """Return the nodes that a job has once it is gathered around a rack, as many as now.

    Nodes of that rack come first, then of its zone, then of the job's other racks. Only nodes that it accepts: its own
    and free ones, and if `swaps`, other jobs'.
    """
    at = board.occupancy
    held, room = Counter(map(at.rack_of, mine)), Counter(map(at.rack_of, board.free))

    def rank(place: _Rack) -> tuple[bool, bool, int, int, _Rack]:
        return place != rack, place[0] != rack[0], -held[place], -room[place], place

    order = sorted({rack, *held, *(one for one in room if one[0] == rack[0])}, key=rank)
    usable: dict[_Rack, list[str]] = {rack: [] for rack in order}
    others = sorted(board.owners.keys() - board.nodes[job]) if swaps else []
    for node in (*mine, *sorted(board.free), *others):
        if at.rack_of(node) in usable and at.can_use(job, node):
            usable[at.rack_of(node)].append(node)
    return [node for rack in order for node in usable[rack]][: len(mine)]


def _move_to_targets(then: _Assignment, job: str, targets: Sequence[str], *, goes_on: bool) -> list[Relocation]:
    """Make the moves in `then` that bring a job to its targets, and return them; [] if that is impossible or
    unnecessary. `then` may have changed in that case, too.

    If another job has a target, the two exchange nodes by way of a free node. Without `goes_on` the other job stays on
    that free node.
    """
    new = [node for node in targets if node not in then.nodes[job]]
    leaves = sorted(then.nodes[job] - set(targets))
    if len(leaves) != len(new):
        return []
    new.sort(key=lambda node: node in then.owners)  # Free nodes first: each such move frees another node.
    moves: list[Relocation] = []
    for old, node in zip(leaves, new, strict=True):
        step = _plan_exchange(then, job, old, node, goes_on=goes_on)
        if not step:
            return []
        then.apply(step)
        moves += step
    return moves


def _plan_exchange(then: _Assignment, job: str, old: str, node: str, *, goes_on: bool) -> list[Relocation]:
    """Return the moves by which a job leaves `old` for `node`.

    If another job has `node`, that job first moves to the free node that suits it best, and if `goes_on`, later on to
    `old`. [] if that job accepts no free node, or if `goes_on` and it does not accept `old`.
    """
    other = then.owners.get(node)
    if other is None:
        return [Relocation(job, old, node)]
    by_way = [one for one in then.free if then.occupancy.can_use(other, one)]
    if not by_way or (goes_on and not then.occupancy.can_use(other, old)):
        return []
    best = min(by_way, key=_distance_key(then.occupancy, then.racks(other, without=node), node))
    moves = [Relocation(other, node, best), Relocation(job, old, node)]
    return [*moves, Relocation(other, best, old)] if goes_on else moves


def _distance_key(at: Occupancy, theirs: Set[_Rack], node: str) -> Callable[[str], tuple[bool, bool, str]]:
    """Return a sort key for nodes: racks of the job first, then the zone of the node that it leaves."""
    zone = at.rack_of(node)[0]
    return lambda one: (at.rack_of(one) not in theirs, at.rack_of(one)[0] != zone, one)
