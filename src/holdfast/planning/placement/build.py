"""From a pattern of hosts to a placement: which expert takes which row, and which nodes get the other replicas.

Axes: L layers, E experts, N nodes.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from holdfast.planning.arrays import BoolArray, FloatArray, IntArray, indices, put_rows
from holdfast.planning.balance.rows import assign_rows_by_work
from holdfast.planning.balance.swaps import MOST_CELLS, swap_replicas, swap_rows
from holdfast.planning.balance.work import node_work
from holdfast.planning.moving.migration import assign_roles, node_kinds
from holdfast.planning.placement.fill import deal_by_work
from holdfast.planning.placement.keeping.columns import columns_by_copies, columns_by_groups
from holdfast.planning.placement.keeping.rows import deal_keeping, rows_for_experts
from holdfast.planning.placement.strategy import PlacementProblem
from holdfast.planning.survival.objective import default_weights
from holdfast.planning.survival.recovery_probability import fatal_share
from holdfast.planning.survival.risk import columns_by_risk, safer_columns
from holdfast.planning.survival.search import SEARCH_UP_TO_NODES, NodeLosses

#: The fatal losses of columns that follow the held experts, over the safest columns, that are acceptable.
_SAFE_ENOUGH = 1.1
#: A trade of two columns moves all experts of two nodes. It must save this share of the fatal losses.
_WORTH_A_TRADE = 0.05
#: The work of the busiest node, over that without held experts, that is acceptable without further moves.
_ENOUGH = 1.05


def build_placement(problem: PlacementProblem, pattern: BoolArray) -> IntArray:
    """Return a placement `(L, E, N)` in which every layer has the host sets of the `pattern` `(E, N)`.

    The rows of the pattern are in the order of `problem.by_rank`: experts with the fewest replicas first. The nodes get
    even work. If the nodes hold experts already, columns are assigned to nodes and rows to experts so that few experts
    move. With failure rates, columns are also assigned to nodes so that few likely losses are fatal.
    """
    held = problem.previous_hosts
    if problem.failure_rates is not None:
        pattern = _assign_by_risk(problem, pattern, problem.failure_rates)
    if held is None or problem.previous is None:
        return _build_from_scratch(problem, pattern)
    wanted = pattern
    pattern, rows = _follow_held(problem, pattern, held)
    if problem.failure_rates is not None:
        pattern = _restore_safety(problem, pattern, wanted, problem.failure_rates)
        rows = rows_for_experts(pattern, problem.replicas, held)
    counts = deal_keeping(pattern, rows, problem.replicas, problem.slots, problem.previous, problem.work)
    if counts.size > MOST_CELLS:
        return counts
    goal = _ENOUGH * node_work(_build_from_scratch(problem, pattern), problem.work).max(axis=1)
    base = node_work(counts - pattern[rows], problem.work)
    rows = swap_rows(pattern, rows, problem.replicas, problem.work, base, goal)
    counts = deal_keeping(pattern, rows, problem.replicas, problem.slots, problem.previous, problem.work)
    return swap_replicas(counts, pattern[rows], problem.work, goal)


def _assign_by_risk(problem: PlacementProblem, pattern: BoolArray, rates: FloatArray) -> BoolArray:
    """Return the `pattern` `(E, N)` with its columns assigned to nodes so that few likely losses are fatal.

    `rates` `(N,)` are how often each node fails. Only nodes of the same slots and rack exchange columns.
    """
    kinds = node_kinds(problem.slots, problem.racks)
    pattern = columns_by_risk(pattern, rates, kinds)
    if problem.nodes > SEARCH_UP_TO_NODES:
        return pattern
    return safer_columns(pattern, rates, kinds, _make_cost(problem, rates))


def _restore_safety(problem: PlacementProblem, pattern: BoolArray, wanted: BoolArray, rates: FloatArray) -> BoolArray:
    """Return the `pattern` `(E, N)`, which follows the held experts, with some columns traded for safety.

    The result is about as safe as the pattern `wanted`, for nodes that fail at these `rates` `(N,)`.
    """
    cost, kinds = _make_cost(problem, rates), node_kinds(problem.slots, problem.racks)
    return safer_columns(pattern, rates, kinds, cost, goal=_SAFE_ENOUGH * cost(wanted), least=_WORTH_A_TRADE)


def _make_cost(problem: PlacementProblem, rates: FloatArray) -> Callable[[BoolArray], float]:
    """Return a function that computes the weighted fatal losses of a pattern `(E, N)`.

    The nodes fail at these `rates` `(N,)`.
    """
    weights = default_weights(problem.nodes) if problem.failure_weights is None else problem.failure_weights
    if problem.nodes <= SEARCH_UP_TO_NODES:
        losses = NodeLosses(problem.nodes, rates)
        return lambda pattern: float(losses.share_of(pattern) @ weights)
    return lambda pattern: float(fatal_share(pattern, rates).most @ weights)


def _follow_held(problem: PlacementProblem, pattern: BoolArray, held: BoolArray) -> tuple[BoolArray, IntArray]:
    """Return the pattern `(E, N)` with columns assigned to nodes, and the row of each expert `(L, E)`.

    Both are chosen so that the nodes keep most of the experts `held` `(L, E, N)`. Only nodes of the same slots and rack
    exchange columns.
    """
    kinds = node_kinds(problem.slots, problem.racks)
    grouped = None if kinds.any() else columns_by_groups(pattern, problem.replicas, held)
    if grouped is not None:
        rows = rows_for_experts(grouped, problem.replicas, held)
        better = columns_by_copies(grouped, rows, held)
        if (better != grouped).any():
            grouped, rows = better, rows_for_experts(better, problem.replicas, held)
        return grouped, rows
    hosts = np.empty((problem.replicas.shape[0], *pattern.shape), dtype=np.bool_)
    put_rows(hosts, problem.by_rank, pattern)
    pattern = np.take(pattern, assign_roles(held, hosts, kinds=kinds), axis=1)
    rows = rows_for_experts(pattern, problem.replicas, held)
    roles = assign_roles(held, pattern[rows], kinds=kinds)
    if (roles != indices(problem.nodes)).any():
        pattern = np.take(pattern, roles, axis=1)
        rows = rows_for_experts(pattern, problem.replicas, held)
    return pattern, rows


def _build_from_scratch(problem: PlacementProblem, pattern: BoolArray) -> IntArray:
    """Return a placement `(L, E, N)` that follows the pattern, whatever the nodes hold.

    Experts get rows, other replicas get free slots, and replicas are swapped, so that the nodes' work is even.
    """
    work = problem.work
    rows = assign_rows_by_work(pattern, problem.replicas, work, problem.slots)
    counts = pattern[rows].astype(np.int64)
    free = np.repeat((problem.slots - pattern.sum(axis=0))[None, :], len(rows), axis=0)
    deal_by_work(counts, problem.replicas - pattern.sum(axis=1)[rows], free, work)
    return swap_replicas(counts, pattern[rows], work, np.zeros(len(rows)))
