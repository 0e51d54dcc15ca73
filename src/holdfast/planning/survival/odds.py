"""Which nodes are lost: all sets of k nodes alike, or each node by its own failure rate.

With rates, a set of k nodes is lost in proportion to the product of its nodes' rates: as nodes fail within a short
time, each on its own, given that k of them do.

Axes: N nodes, K lost nodes at the most.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from holdfast.errors import BadInputError
from holdfast.planning.arrays import FloatArray, IntArray, indices

#: Failure rates may differ by this factor; beyond, the odds of the rarest losses vanish.
_WIDEST = 1e9


def as_rates(rates: FloatArray | None, nodes: int) -> FloatArray | None:
    """Return failure rates `(N,)` over their mean; None where nodes are alike.

    Raises `BadInputError` for rates that are not above 0, or too far apart.
    """
    if rates is None:
        return None
    if rates.shape != (nodes,):
        raise BadInputError(f"failure rates have shape {rates.shape}: give one for each of the {nodes} nodes")
    for node, rate in enumerate(rates.tolist()):
        if not 0 < rate < np.inf:
            raise BadInputError(f"failure rate of node {node} is {rate:g}: rates are numbers above 0, in any unit")
    if float(rates.max()) > _WIDEST * float(rates.min()):
        raise BadInputError(
            f"failure rates go from {rates.min():g} to {rates.max():g}: they may differ by a factor of {_WIDEST:g}"
        )
    return None if float(np.ptp(rates)) == 0 else rates / rates.mean()


def swept_shares(rates: FloatArray | None, order: IntArray, most_lost: int) -> Iterator[FloatArray]:
    """Yield for each node of the `order` `(N,)` how likely it is lost, where 0, 1, ..., K of the nodes up to it are,
    `(K + 1,)`; `rates` `(N,)` of the nodes, None: alike."""
    if rates is None:
        lost: FloatArray = indices(most_lost + 1).astype(np.float64)
        for swept in range(1, order.size + 1):
            # Of k nodes lost among those swept, the last is one in k / swept of the cases.
            yield np.minimum(lost / swept, 1.0)
        return
    # The logarithm of the sum over all sets of k of the products of their rates.
    sums = np.full(most_lost + 1, -np.inf)
    sums[0] = 0.0
    for rate in np.log(rates[order]).tolist():
        with_it = np.full(most_lost + 1, -np.inf)
        with_it[1:] = sums[:-1] + rate
        sums = np.logaddexp(sums, with_it)
        known = sums > -np.inf
        yield np.where(known, np.exp(with_it - np.where(known, sums, 0.0)), 1.0)
