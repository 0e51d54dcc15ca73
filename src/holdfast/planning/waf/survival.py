"""The cost of a job's roll-backs by its number of nodes.

With it, a job that has few copies of its state outbids a safe one for nodes. A job loses its state if nodes fail
together, before copies are restored, and the last copy of some part is among them. Lazarus' curve (`planning.survival`)
gives the probability that k losses do that. The job then repeats the training since its last checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from holdfast.planning.arrays import FloatArray, IntArray

#: For a number of nodes N, the probabilities `(N + 1,)` that a copy of all state remains if 0..N of them fail together.
Survives = Callable[[int], FloatArray]

#: The upper limit of the probability that a node fails while copies are made; a less reliable node is useless anyway.
_MOST = 0.5
#: The number of losses considered beyond the fewest that can take a last copy; more are practically impossible.
_MORE_LOSSES = 4


def lost_share(
    nodes: int, failure_rate: float, exposed_s: float, rolled_back_s: float, survives: Survives
) -> FloatArray:
    """Return the share of a job's time that roll-backs undo, `(nodes + 1,)`, with 0..nodes nodes.

    Args:
        nodes: The most nodes.
        failure_rate: Failures per node and second.
        exposed_s: Seconds from a failure until all copies exist again. Nodes that fail in this time fail together with
            the first.
        rolled_back_s: Seconds that one roll-back costs, with the restart.
        survives: For a number of nodes N, the probabilities `(N + 1,)` that nothing is lost if 0..N of them fail.
    """
    together = min(-np.expm1(-failure_rate * exposed_s), _MOST)
    share = np.zeros(nodes + 1)
    for held in range(1, nodes + 1):
        odds = 1.0 - survives(held)[1:]
        share[held] = held * failure_rate * float(_binomial(held - 1, together) @ odds) * rolled_back_s
    return np.minimum(share, 1.0)


def lost_with_all(nodes: int, failure_rate: float, exposed_s: float, rolled_back_s: float) -> FloatArray:
    """Return `lost_share`, `(nodes + 1,)`, for a job with its whole state on every node; the arguments are the same.

    Such a job loses its state only if all its nodes fail within `exposed_s` seconds.
    """
    together = min(-np.expm1(-failure_rate * exposed_s), _MOST)
    held = np.arange(nodes + 1)
    share = held * failure_rate * together ** np.maximum(held - 1, 0) * rolled_back_s
    return np.minimum(share, 1.0)


def lost_with_experts(
    nodes: int, failure_rate: float, exposed_s: float, rolled_back_s: float, *, experts: int, slots: int
) -> FloatArray:
    """Return an upper bound of `lost_share` for a job with experts, for all sizes at once.

    Nodes form groups that hold the same `slots` experts, as Lazarus' MRO places them. Each expert is on at least r =
    floor(N slots / experts) nodes. So r nodes that fail together take a last copy if they are a group. For more nodes,
    the probability is at most the sum over all groups. With too few nodes for all experts, everything is lost.

    Args:
        nodes: The most nodes.
        failure_rate: As for `lost_share`.
        exposed_s: As for `lost_share`.
        rolled_back_s: As for `lost_share`.
        experts: The experts of a layer.
        slots: The slots of a node, in a layer.
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
    """Return the binomial coefficients "`of` choose `some`", element by element.

    Negative numbers count as 0, and a `some` above `of` as `of`, which gives 1.
    """
    of, some = np.maximum(of, 0), np.maximum(np.minimum(some, of), 0)
    return np.exp(_log_factorial(of) - _log_factorial(some) - _log_factorial(of - some))


def _log_factorial(of: FloatArray | IntArray) -> FloatArray:
    """Return the logarithm of the factorial of each element."""
    table = np.concatenate([[0.0], np.log(np.arange(1, int(of.max(initial=0)) + 1)).cumsum()])
    return table[of.astype(np.int64)]


def copies_everywhere(nodes: int) -> FloatArray:
    """Return the probability that nothing is lost if 0..nodes nodes fail, `(nodes + 1,)`, of a job without experts.

    It is 1, except 0 if all nodes fail, since each node has the whole state.
    """
    curve = np.ones(nodes + 1)
    curve[nodes] = 0.0
    return curve


def _binomial(trials: int, probability: float) -> FloatArray:
    """Return the binomial probabilities of 0..trials successes, `(trials + 1,)`; `probability` is at most one half."""
    odds = probability / (1.0 - probability)
    factors = np.ones(trials + 1)
    factors[0] = (1.0 - probability) ** trials
    for more in range(trials):
        factors[more + 1] = (trials - more) / (more + 1) * odds
    return factors.cumprod()
