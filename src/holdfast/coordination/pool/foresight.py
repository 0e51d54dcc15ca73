"""Forecasts the effects of draining nodes: it runs the pool's own decisions on a copy of its state."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.coordination.pool.granting import Allocator
from holdfast.coordination.pool.jobs import PooledJobs
from holdfast.coordination.pool.node_selection.moving import GUESSED_MOVE_S, MoveQueue
from holdfast.coordination.pool.nodes import PooledNodes
from holdfast.coordination.pool.state import PoolState
from holdfast.protocol.messages.forecast import DrainForecast
from holdfast.protocol.pool.record import Grant


def forecast_drain(state: PoolState, names: Sequence[str]) -> list[DrainForecast]:
    """Return for each node the effect of draining all of them at once: its job, its replacement, the cost, in words.

    It plans on a copy, so the pool does not change.

    Raises:
        BadInputError, UnreachableError: The pool would refuse the drain.
    """
    after = state.copy()
    jobs = PooledJobs(after)
    PooledNodes(after).set_drained(names, drained=True)
    Allocator(after, jobs, MoveQueue(after)).allocate()
    spare = _Replacements(state, after)
    return [_forecast_node(state, after, spare, name) for name in dict.fromkeys(names)]


class _Replacements:
    """The nodes that jobs get, or will get once other jobs have left them; each replaces one node."""

    def __init__(self, before: PoolState, after: PoolState) -> None:
        new_grants = [grant for node, grant in after.grants.items() if _starts_training(before.grants.get(node), grant)]
        self._given = {job: [grant.node for grant in new_grants if grant.job == job] for job in after.jobs}
        self._standbys = {node for node, grant in before.grants.items() if grant.standby}
        self._recalled = [
            grant for node, grant in after.grants.items() if grant.recalled and not before.grants[node].recalled
        ]

    def select(self, job: str, leaves: str) -> tuple[str, str]:
        """Return the node that replaces a node of a job, and its present use in words; ("", "") if none does.

        Nodes granted to the job come first, then nodes that other jobs give up. Each is returned once.

        Args:
            job: the job
            leaves: The node to be replaced.
        """
        if mine := self._given.get(job):
            node = mine.pop(0)
            return node, "which waits there as a standby" if node in self._standbys else "which is free"
        for grant in self._recalled:
            if grant.node != leaves and grant.job != job:
                self._recalled.remove(grant)
                how = "where it waits as a standby" if grant.standby else "which goes on with fewer"
                return grant.node, f"which job {grant.job} gives up, {how}"
        return "", ""


def _starts_training(before: Grant | None, after: Grant) -> bool:
    """Return whether a node will train in a job in which it did not train before."""
    if after.standby or after.recalled:
        return False
    return before is None or before.job != after.job or before.standby


def _forecast_node(before: PoolState, after: PoolState, spare: _Replacements, name: str) -> DrainForecast:
    """Return the forecast for one drained node: unused, already left by its job, a standby, or replaced, given up or
    kept until another joins, with the cost in seconds of training.

    Args:
        before: The pool now.
        after: The pool once all the nodes are drained.
        spare: The replacements; the selected one is removed.
    """
    grant = before.grants.get(name)
    if grant is None:
        return DrainForecast(node=name, why="no job has it, and none will get it")
    job = before.jobs[grant.job]
    if grant.recalled or job.state in ("suspending", "stopping"):
        return DrainForecast(node=name, job=job.name, why="its job leaves it already")
    if grant.standby:
        return DrainForecast(node=name, job=job.name, why="it waits there as a standby: its end costs no training")
    to, where = spare.select(job.name, name)
    cost_s = before.move_s.get(job.name)
    costs = (
        f"about {GUESSED_MOVE_S:.1f} s of its training (a guess)"
        if cost_s is None
        else f"about {cost_s:.1f} s of its training"
    )
    kept = len(before.own_nodes(job.name)) - 1
    if to:
        why = f"{to} joins first, {where}; then the job leaves {name}, at the end of a step: {costs}"
    elif after.grants[name].recalled:
        why = f"no other node is available: the job goes on with {kept}, at the end of a step: {costs}"
    else:
        least = job.spec.nodes_to_begin
        why = f"no other node is available, and the job needs at least {least}: it leaves once another has joined"
    waits = not to and not after.grants[name].recalled
    return DrainForecast(node=name, job=job.name, to=to, waits=waits, cost_s=cost_s, why=why)
