"""What would come of nodes being drained: the pool's own decisions, on a copy of how it stands."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.coordination.pool.granting import Granting
from holdfast.coordination.pool.jobs import PooledJobs
from holdfast.coordination.pool.nodes import PooledNodes
from holdfast.coordination.pool.places.moving import GUESSED_MOVE_S, Moving
from holdfast.coordination.pool.state import PoolState
from holdfast.protocol.messages.forecast import DrainForecast
from holdfast.protocol.pool.record import Grant


def foresee_drain(state: PoolState, names: Sequence[str]) -> list[DrainForecast]:
    """Return what would come of draining these nodes, all at once; nothing is changed.

    Raises:
        BadInputError, UnreachableError: asking for it would be refused.
    """
    after = state.copy()
    jobs = PooledJobs(after)
    PooledNodes(after).drain(names, drained=True)
    Granting(after, jobs, Moving(after)).carry_out()
    spare = _Spare(state, after)
    return [_of(state, after, spare, name) for name in dict.fromkeys(names)]


class _Spare:
    """What jobs are given, or will be once others have left it; each counts for one node."""

    def __init__(self, before: PoolState, after: PoolState) -> None:
        given = [grant for node, grant in after.grants.items() if _is_new(before.grants.get(node), grant)]
        self._given = {job: [grant.node for grant in given if grant.job == job] for job in after.jobs}
        self._standbys = {node for node, grant in before.grants.items() if grant.standby}
        self._recalled = [
            grant for node, grant in after.grants.items() if grant.recalled and not before.grants[node].recalled
        ]

    def take(self, job: str, leaves: str) -> tuple[str, str]:
        """Return who takes a node's place in its job, and where that is now, in words; "" where nobody does."""
        if mine := self._given.get(job):
            node = mine.pop(0)
            return node, "which waits there as a standby" if node in self._standbys else "which is free"
        for grant in self._recalled:
            if grant.node != leaves and grant.job != job:
                self._recalled.remove(grant)
                how = "where it waits as a standby" if grant.standby else "which goes on with fewer"
                return grant.node, f"which job {grant.job} gives up, {how}"
        return "", ""


def _is_new(before: Grant | None, after: Grant) -> bool:
    """Tell whether a node is to train in a job in which it did not."""
    if after.standby or after.recalled:
        return False
    return before is None or before.job != after.job or before.standby


def _of(before: PoolState, after: PoolState, spare: _Spare, name: str) -> DrainForecast:
    grant = before.grants.get(name)
    if grant is None:
        return DrainForecast(node=name, why="it is nobody's, and stays so")
    job = before.jobs[grant.job]
    if grant.recalled or job.state in ("suspending", "stopping"):
        return DrainForecast(node=name, job=job.name, why="its job leaves it already")
    if grant.standby:
        return DrainForecast(node=name, job=job.name, why="it waits there as a standby: nobody notices that it goes")
    to, where = spare.take(job.name, name)
    cost_s = before.move_s.get(job.name)
    costs = (
        f"about {GUESSED_MOVE_S:.1f} s of its training (a guess)"
        if cost_s is None
        else f"about {cost_s:.1f} s of its training"
    )
    kept = len(before.own(job.name)) - 1
    if to:
        why = f"{to} joins first, {where}; then the job leaves {name}, at the end of a step: {costs}"
    elif after.grants[name].recalled:
        why = f"no other node is to be had: the job goes on with {kept}, at the end of a step: {costs}"
    else:
        least = job.spec.nodes_to_begin
        why = f"no other node is to be had, and the job keeps {least} at the least: it is left once another has joined"
    waits = not to and not after.grants[name].recalled
    return DrainForecast(node=name, job=job.name, to=to, waits=waits, cost_s=cost_s, why=why)
