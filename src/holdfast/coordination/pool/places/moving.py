"""Carries out moves of jobs between nodes, one after another: each is over once the node that was given up is free.

What is under way is in the record; what is still to come is forgotten with the server, and lost is nothing but that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from holdfast.coordination.pool.places.compacting import Occupied, Relocation
from holdfast.coordination.pool.state import PoolState

#: what a move costs a job that has not made any yet
GUESSED_MOVE_S = 1.0


class Moving:
    """The moves that are to come."""

    def __init__(self, state: PoolState) -> None:
        self._state = state
        self._waiting: deque[Relocation] = deque()

    @property
    def to_come(self) -> int:
        """How many moves are not over, that under way among them."""
        return len(self._waiting) + sum(grant.replaced for grant in self._state.grants.values())

    def begin(self, moves: Iterable[Relocation]) -> None:
        """Make these moves, and no other ones."""
        self._waiting = deque(moves)

    def go_on(self) -> None:
        """Begin the next move, where none is under way; one that cannot be made any more is left out."""
        grants = self._state.grants
        if any(grant.replaced for grant in grants.values()):
            return
        while self._waiting:
            move = self._waiting[0]
            mine = grants.get(move.from_node)
            if mine is None or mine.job != move.job or mine.recalled or mine.standby or not self._is_whole(move.job):
                self._waiting.popleft()
                continue
            if self._awaited(move):
                return
            self._waiting.popleft()
            if self._takes(move):
                self._state.replace(move.from_node)
                return

    def give_up(self) -> None:
        """Let jobs stay where they are that have lost what was to take a node's place: no other may be to be had."""
        state = self._state
        for grant in [one for one in state.grants.values() if one.replaced and not one.recalled]:
            job = state.jobs[grant.job]
            if job.state == "admitted" and state.has(job.name) < job.share:
                state.keep(grant.node)

    def exchange(self, short: str, free: set[str]) -> None:
        """Have a job move to one of these nodes, which another would not take, from one that this could; one at once.

        Args:
            short: who lacks a node. free: what nobody else lacks; what is given is taken out.
        """
        state = self._state
        if any(grant.replaced for grant in state.grants.values()):
            return
        no_use = state.refused.get(short, frozenset())
        for name in sorted(state.jobs):
            fit = sorted(free - state.refused.get(name, frozenset()))
            mine = sorted(set(state.own(name)) - no_use)
            if name != short and fit and mine and self._is_whole(name):
                free.discard(fit[0])
                state.give(fit[0], name)
                state.replace(mine[0])
                return

    def _is_whole(self, name: str) -> bool:
        job = self._state.jobs[name]
        return job.state == "admitted" and self._state.has(name) == job.share

    def _awaited(self, move: Relocation) -> bool:
        """Have a node be free that a move goes to, where somebody waits there; tell whether it is about to be."""
        there = self._state.grants.get(move.to_node)
        if there is None or there.job == move.job:
            return False
        if there.standby and not there.recalled:
            self._state.recall(move.to_node)
        return there.standby or there.recalled

    def _takes(self, move: Relocation) -> bool:
        """Give a job the node that a move goes to; tell whether it has it now."""
        state, there = self._state, self._state.grants.get(move.to_node)
        if there is not None and there.job == move.job and there.standby and not there.recalled:
            state.call(move.to_node)
            return True
        refused = move.to_node in state.refused.get(move.job, frozenset())
        if there is not None or refused or move.to_node not in state.free():
            return False
        state.give(move.to_node, move.job)
        return True


def occupied(state: PoolState) -> Occupied:
    """Return who has which nodes, of the jobs that could move now: those that have all nodes that they are to have."""
    jobs = [job for job in state.jobs.values() if job.state == "admitted" and state.has(job.name) == job.share]
    owners = {node: job.name for job in jobs for node in state.own(job.name) if node in state.here}
    whole = {job.name for job in jobs}
    standbys = {node for name in whole for node in state.standbys(name) if node in state.here}
    return Occupied(
        nodes=dict(state.nodes),
        owners=owners,
        free=frozenset(state.free()) | standbys,
        refused=dict(state.refused),
        move_s={name: state.move_s.get(name, GUESSED_MOVE_S) for name in whole},
    )
