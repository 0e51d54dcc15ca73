"""From a pattern of hosts to a placement: which expert takes which row, and where the other replicas go.

Axes: L layers, E experts, N nodes.
"""

from __future__ import annotations

import numpy as np

from holdfast.planning.arrays import BoolArray, IntArray, indices, put_rows
from holdfast.planning.balance.rows import rows_by_work
from holdfast.planning.balance.swaps import MOST_CELLS, swap_replicas, swap_rows
from holdfast.planning.balance.work import node_work
from holdfast.planning.keeping.columns import columns_by_copies, columns_by_groups
from holdfast.planning.keeping.rows import deal_keeping, rows_for_experts
from holdfast.planning.moving.migration import assign_roles, node_kinds
from holdfast.planning.placement.fill import deal_by_work
from holdfast.planning.placement.strategy import PlacementProblem

#: The busiest node may have this much of what it would have if nothing had to stay; less is not worth a move.
_ENOUGH = 1.05


def build(problem: PlacementProblem, pattern: BoolArray) -> IntArray:
    """Return a placement `(L, E, N)` in which every layer follows the `pattern` `(E, N)`, rows by rank.

    The nodes get even work. Where they hold experts already, the pattern's columns go to the nodes, and its rows to the
    experts, that have to move the fewest.
    """
    held = problem.previous_hosts
    if held is None or problem.previous is None:
        return _build_anew(problem, pattern)
    pattern, rows = _follow(problem, pattern, held)
    counts = deal_keeping(pattern, rows, problem.replicas, problem.slots, problem.previous, problem.work)
    if counts.size > MOST_CELLS:
        return counts
    goal = _ENOUGH * node_work(_build_anew(problem, pattern), problem.work).max(axis=1)
    base = node_work(counts - pattern[rows], problem.work)
    rows = swap_rows(pattern, rows, problem.replicas, problem.work, base, goal)
    counts = deal_keeping(pattern, rows, problem.replicas, problem.slots, problem.previous, problem.work)
    return swap_replicas(counts, pattern[rows], problem.work, goal)


def _follow(problem: PlacementProblem, pattern: BoolArray, held: BoolArray) -> tuple[BoolArray, IntArray]:
    """Return the pattern `(E, N)` with its columns as the nodes take them, and the row of each expert, `(L, E)`."""
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


def _build_anew(problem: PlacementProblem, pattern: BoolArray) -> IntArray:
    work = problem.work
    rows = rows_by_work(pattern, problem.replicas, work, problem.slots)
    counts = pattern[rows].astype(np.int64)
    free = np.repeat((problem.slots - pattern.sum(axis=0))[None, :], len(rows), axis=0)
    deal_by_work(counts, problem.replicas - pattern.sum(axis=1)[rows], free, work)
    return swap_replicas(counts, pattern[rows], work, np.zeros(len(rows)))
