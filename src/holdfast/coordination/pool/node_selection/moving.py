"""Moves jobs between nodes, one move at a time. A move ends once the node that the job left is free.

The record contains the current move. The waiting moves are forgotten when the server ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from holdfast.coordination.pool.node_selection.compacting import Occupancy, Relocation
from holdfast.coordination.pool.state import PoolState

#: seconds that a move costs a job that has not made any yet
GUESSED_MOVE_S = 1.0


class MoveQueue:
    """The moves that wait."""

    def __init__(self, state: PoolState) -> None:
        self._state = state
        self._waiting: deque[Relocation] = deque()

    @property
    def pending_count(self) -> int:
        """The number of moves that have not ended, the current one included."""
        return len(self._waiting) + sum(grant.replaced for grant in self._state.grants.values())

    def start(self, moves: Iterable[Relocation]) -> None:
        """Make these moves, and forget all others."""
        self._waiting = deque(moves)

    def start_next(self) -> None:
        """Start the next waiting move unless one is under way: the job gets the new node, and its old one is marked as
        replaced.

        A standby of another job is recalled from there first; the move then waits. Moves that have become impossible
        are dropped.
        """
        grants = self._state.grants
        if any(grant.replaced for grant in grants.values()):
            return
        while self._waiting:
            move = self._waiting[0]
            mine = grants.get(move.from_node)
            if (
                mine is None
                or mine.job != move.job
                or mine.recalled
                or mine.standby
                or not self._has_its_share(move.job)
            ):
                self._waiting.popleft()
                continue
            if self._recall_destination(move):
                return
            self._waiting.popleft()
            if self._grant_destination(move):
                self._state.mark_replaced(move.from_node)
                return

    def cancel_hopeless(self) -> None:
        """Keep the replaced node of a job that has fewer nodes than its share without it, as when the replacement was
        lost: there may be no other.
        """
        state = self._state
        for grant in [grant for grant in state.grants.values() if grant.replaced and not grant.recalled]:
            job = state.jobs[grant.job]
            if job.state == "admitted" and state.own_count(job.name) < job.share:
                state.unmark_replaced(grant.node)

    def free_usable_node(self, short: str, free: set[str]) -> None:
        """Free a node that a job can use: grant a free node, which this job refuses, to another job that accepts it and
        has its share, and replace one of its nodes.

        Does nothing while a move is under way, or if no job can exchange.

        Args:
            short: the job that lacks a node
            free: nodes that no other job lacks; the granted one is removed
        """
        state = self._state
        if any(grant.replaced for grant in state.grants.values()):
            return
        no_use = state.refused.get(short, frozenset())
        for name in sorted(state.jobs):
            fit = sorted(free - state.refused.get(name, frozenset()))
            mine = sorted(set(state.own_nodes(name)) - no_use)
            if name != short and fit and mine and self._has_its_share(name):
                free.discard(fit[0])
                state.grant_node(fit[0], name)
                state.mark_replaced(mine[0])
                return

    def _has_its_share(self, name: str) -> bool:
        """Return whether a job is admitted and has all nodes of its share."""
        job = self._state.jobs[name]
        return job.state == "admitted" and self._state.own_count(name) == job.share

    def _recall_destination(self, move: Relocation) -> bool:
        """Recall the destination of a move if it is a standby of another job; return whether the move must wait for it.

        True also if another job's grant of it is recalled already; False if it is free, of the same job, or trains in
        another job.
        """
        destination = self._state.grants.get(move.to_node)
        if destination is None or destination.job == move.job:
            return False
        if destination.standby and not destination.recalled:
            self._state.recall_node(move.to_node)
        return destination.standby or destination.recalled

    def _grant_destination(self, move: Relocation) -> bool:
        """Grant the destination of a move to its job, or promote it if it is the job's standby; return whether the job
        has it now.

        False if it is not free, or if the job has refused it.
        """
        state, destination = self._state, self._state.grants.get(move.to_node)
        if destination is not None and destination.job == move.job and destination.standby and not destination.recalled:
            state.promote_standby(move.to_node)
            return True
        refused = move.to_node in state.refused.get(move.job, frozenset())
        if destination is not None or refused or move.to_node not in state.free_nodes():
            return False
        state.grant_node(move.to_node, move.job)
        return True


def build_occupancy(state: PoolState) -> Occupancy:
    """Return the connected nodes of the jobs that could move now, and the nodes to which they could move.

    Those are the admitted jobs that have exactly their share. Their connected standbys count as free.
    """
    jobs = [job for job in state.jobs.values() if job.state == "admitted" and state.own_count(job.name) == job.share]
    owners = {node: job.name for job in jobs for node in state.own_nodes(job.name) if node in state.connected}
    complete = {job.name for job in jobs}
    standbys = {node for name in complete for node in state.standbys(name) if node in state.connected}
    return Occupancy(
        nodes=dict(state.nodes),
        owners=owners,
        free=frozenset(state.free_nodes()) | standbys,
        refused=dict(state.refused),
        move_s={name: state.move_s.get(name, GUESSED_MOVE_S) for name in complete},
    )
