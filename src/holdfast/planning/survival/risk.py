"""Nodes with different failure rates: which column of a pattern of hosts each node takes.

Experts with few replicas must be on reliable nodes. The danger of a host set is the product of its nodes' failure
rates. So risky nodes go into large sets or into none. A risky node in a small set is combined with a safe one.

Axes: E experts, N nodes, S sets of nodes.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from holdfast.planning.arrays import BoolArray, FloatArray, IntArray, indices
from holdfast.planning.survival.hitting import smallest_sets

#: The assumed failure probability of the average node, for the first choice. Later choices use exact odds.
_TYPICAL = 0.05
#: The most trades of two columns.
_MOST_TRADES = 24
#: The most nodes for which all pairs are considered.
_ALL_PAIRS_UP_TO = 24
#: Relative differences up to this are rounding errors.
_ROUNDING = 1e-9


def columns_by_risk(pattern: BoolArray, rates: FloatArray, kinds: IntArray) -> BoolArray:
    """Return the `pattern` `(E, N)` with its columns assigned to the nodes so that host sets are in the least danger.

    The riskiest node chooses first. It takes the column of the sets in the least danger so far. `rates` `(N,)` are over
    their mean. A column may only go to a node of the same kind, `kinds` `(N,)`, as the node at its index.
    """
    sets = smallest_sets(pattern).astype(np.float64)
    logs = np.log(rates * _TYPICAL)
    left = sets.sum(axis=1)
    danger: FloatArray = np.zeros(len(sets))
    free = np.ones(rates.size, dtype=np.bool_)
    column = np.empty(rates.size, dtype=np.int64)
    waiting = logs.sum()
    for taken, node in enumerate(np.argsort(-rates, kind="stable").tolist()):
        typical = waiting / (rates.size - taken)
        of_columns = np.exp(danger + left * typical) @ sets
        open_to_it = free & (kinds == kinds[node])
        chosen = int(np.where(open_to_it, of_columns, np.inf).argmin())
        column[node], free[chosen] = chosen, False
        danger += sets[:, chosen] * logs[node]
        left -= sets[:, chosen]
        waiting -= logs[node]
    return pattern[:, column]


def safer_columns(
    pattern: BoolArray,
    rates: FloatArray,
    kinds: IntArray,
    cost: Callable[[BoolArray], float],
    *,
    goal: float = 0.0,
    least: float = 0.0,
) -> BoolArray:
    """Return the `pattern` `(E, N)` with few columns traded, until its `cost` is at most the `goal`.

    It ends earlier if no trade saves the share `least` of the cost, or after a fixed number of trades. `rates` and
    `kinds` are as for `columns_by_risk`.
    """
    now = cost(pattern)
    for _ in range(_MOST_TRADES):
        if now <= goal:
            break
        best, found = now * (1 - max(least, _ROUNDING)), None
        for first, second in _trade_pairs(pattern, rates, kinds):
            traded = pattern.copy()
            traded[:, [first, second]] = traded[:, [second, first]]
            price = cost(traded)
            if price < best:
                best, found = price, traded
        if found is None:
            break
        pattern, now = found, best
    return pattern


def _trade_pairs(pattern: BoolArray, rates: FloatArray, kinds: IntArray) -> list[tuple[int, int]]:
    """Return the pairs of nodes that may trade columns.

    On few nodes these are all pairs. On many, they combine the riskiest nodes of small sets with the safest nodes of
    others.
    """
    nodes = indices(rates.size)
    if rates.size > _ALL_PAIRS_UP_TO:
        sets = smallest_sets(pattern)
        danger = np.exp(sets @ np.log(rates * _TYPICAL)) @ sets
        risky = np.argsort(-danger * rates, kind="stable")[:4]
        safe = np.argsort(danger + rates * danger.mean(), kind="stable")[:8]
    else:
        risky = safe = nodes
    return [
        (first, second)
        for first in risky.tolist()
        for second in safe.tolist()
        if kinds[first] == kinds[second]
        and rates[first] > rates[second]
        and (pattern[:, first] != pattern[:, second]).any()
    ]
