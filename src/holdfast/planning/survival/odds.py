"""Which nodes are lost: all sets of k nodes alike, or each node by its own failure rate.

With rates, the probability of a set of k nodes is proportional to the product of its nodes' rates. This holds for nodes
that fail independently within a short time, given that k of them fail.

Axes: N nodes, K the most lost nodes.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from holdfast.errors import BadInputError
from holdfast.planning.arrays import FloatArray, IntArray, indices

#: The largest factor between failure rates. Beyond it, the odds of the rarest losses underflow.
_WIDEST = 1e9


def as_rates(rates: FloatArray | None, nodes: int) -> FloatArray | None:
    """Return failure rates `(N,)` over their mean; None if nodes are alike.

    Raises:
        BadInputError: There is not one rate per node, a rate is not above 0, or rates are too far apart.
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
    """Yield, for each node of the `order` `(N,)`, the probability that it is lost, `(K + 1,)`.

    Entry k is the probability given that k of the nodes up to this one are lost. `rates` `(N,)` are the failure rates
    of the nodes; None if nodes are alike.
    """
    if rates is None:
        lost: FloatArray = indices(most_lost + 1).astype(np.float64)
        for swept in range(1, order.size + 1):
            # If k of the swept nodes are lost, the last node is among them with probability k / swept.
            yield np.minimum(lost / swept, 1.0)
        return
    # The logarithm of the sum, over all sets of k nodes, of the product of their rates.
    sums = np.full(most_lost + 1, -np.inf)
    sums[0] = 0.0
    for rate in np.log(rates[order]).tolist():
        with_it = np.full(most_lost + 1, -np.inf)
        with_it[1:] = sums[:-1] + rate
        sums = np.logaddexp(sums, with_it)
        known = sums > -np.inf
        yield np.where(known, np.exp(with_it - np.where(known, sums, 0.0)), 1.0)
