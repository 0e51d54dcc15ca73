"""What a job's roll-backs cost it, by its number of nodes: so one that keeps few copies of a thing outbids a safe one.

A job loses its state when nodes fail together, before copies are made anew, and the last copy of something is among
them: Lazarus' curve (`planning.survival`) says how likely k losses do that. It then trains again what it had done since
it last saved.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from holdfast.planning.arrays import FloatArray

#: `(k,)` -> the probability that a copy of everything is left after 0..k of so many nodes fail together
Survives = Callable[[int], FloatArray]

#: a node that is likelier than this to fail within the time that copies take is of no use in any plan
_MOST = 0.5


def lost_share(
    nodes: int, failure_rate: float, exposed_s: float, rolled_back_s: float, survives: Survives
) -> FloatArray:
    """Return the share of a job's time that roll-backs undo, `(nodes + 1,)`, with 0..nodes nodes.

    Args:
        failure_rate: of a node, per second. exposed_s: from a failure until all copies are there again: whoever fails
            in it fails together with the first. rolled_back_s: what one roll-back costs, with the restart. survives:
            for a number of nodes N, `(N + 1,)` probabilities that nothing is lost with 0..N of them.
    """
    together = min(-np.expm1(-failure_rate * exposed_s), _MOST)
    share = np.zeros(nodes + 1)
    for held in range(1, nodes + 1):
        odds = 1.0 - survives(held)[1:]
        share[held] = held * failure_rate * float(_binomial(held - 1, together) @ odds) * rolled_back_s
    return np.minimum(share, 1.0)


def lost_with_all(nodes: int, failure_rate: float, exposed_s: float, rolled_back_s: float) -> FloatArray:
    """Return `lost_share` of a job whose every node has all of it (`copies_everywhere`), for all sizes at once."""
    together = min(-np.expm1(-failure_rate * exposed_s), _MOST)
    held = np.arange(nodes + 1)
    share = held * failure_rate * together ** np.maximum(held - 1, 0) * rolled_back_s
    return np.minimum(share, 1.0)


def copies_everywhere(nodes: int) -> FloatArray:
    """Return the curve of a job without experts, `(nodes + 1,)`: every node has all, and it is lost with the last."""
    curve = np.ones(nodes + 1)
    curve[nodes] = 0.0
    return curve


def _binomial(trials: int, probability: float) -> FloatArray:
    """Return how likely 0..trials of them come true, `(trials + 1,)`; below one half, each from the one before."""
    odds = probability / (1.0 - probability)
    factors = np.ones(trials + 1)
    factors[0] = (1.0 - probability) ** trials
    for more in range(trials):
        factors[more + 1] = (trials - more) / (more + 1) * odds
    return factors.cumprod()
