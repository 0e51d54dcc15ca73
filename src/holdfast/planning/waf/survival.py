"""What a job's roll-backs cost it, by its number of nodes: so one that keeps few copies of a thing outbids a safe one.

A job loses its state when nodes fail together, before copies are made anew, and the last copy of something is among
them: Lazarus' curve (`planning.survival`) says how likely k losses do that. It then trains again what it had done since
it last saved.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from holdfast.planning.arrays import FloatArray, IntArray

#: `(k,)` -> the probability that a copy of everything is left after 0..k of so many nodes fail together
Survives = Callable[[int], FloatArray]

#: a node that is likelier than this to fail within the time that copies take is of no use in any plan
_MOST = 0.5
#: so many losses beyond those that can take a last copy are looked at: more are as good as impossible
_MORE_LOSSES = 4


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


def lost_with_experts(
    nodes: int, failure_rate: float, exposed_s: float, rolled_back_s: float, *, experts: int, slots: int
) -> FloatArray:
    """Return `lost_share` of a job with experts, for all sizes at once, none too low.

    Nodes stand in groups that hold the same `slots` experts, as Lazarus' MRO places them: each expert on
    r = floor(N slots / experts) nodes at the least. So r nodes that fail together take a last copy with them where they
    are a group; of more, at most as often as the sum over all groups. With too few nodes for all experts all is lost.

    Args:
        failure_rate, exposed_s, rolled_back_s: as of `lost_share`. experts: of a layer. slots: of a node, in a layer.
    """
    together = min(-np.expm1(-failure_rate * exposed_s), _MOST)
    held = np.arange(nodes + 1)
    copies = np.minimum(held * slots // experts, held)
    groups = -(-experts // slots)
    share = np.zeros(nodes + 1)
    for more in range(_MORE_LOSSES):
        lost = np.minimum(np.maximum(copies, 1) + more, held)
        odds = np.minimum(1.0, groups * _exp_choose(held - copies, lost - copies) / _exp_choose(held, lost))
        others = np.maximum(lost - 1, 0)
        fail = _exp_choose(held - 1, others) * together**others * (1 - together) ** (held - 1.0 - others)
        again = (more > 0) & (lost == np.minimum(np.maximum(copies, 1) + more - 1, held))
        share += np.where(again, 0.0, held * failure_rate * fail * odds)
    share *= rolled_back_s
    share[(held > 0) & (held * slots < experts)] = 1.0
    return np.minimum(share, 1.0)


def _exp_choose(of: FloatArray | IntArray, some: FloatArray | IntArray) -> FloatArray:
    """Return binomial coefficients; 1 where there is nothing to choose from."""
    of, some = np.maximum(of, 0), np.maximum(np.minimum(some, of), 0)
    return np.exp(_log_factorial(of) - _log_factorial(some) - _log_factorial(of - some))


def _log_factorial(of: FloatArray | IntArray) -> FloatArray:
    table = np.concatenate([[0.0], np.log(np.arange(1, int(of.max(initial=0)) + 1)).cumsum()])
    return table[of.astype(np.int64)]


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
