"""T(t, x) of Eq. 2: the throughput of a job with x nodes, from measured steps; fitted for other numbers of nodes.

A step of M micro-batches on N workers has ceil(M / N) rounds. Then gradients are summed, for which each worker
transfers (N - 1) / N of their bytes twice. Then all workers apply the same update. So the time of a step is modelled as
`a ceil(M / N) + b (N - 1) / N + c`, with a, b, c >= 0 (non-negative least squares of relative errors).

With two measured sizes, b is left out. With one, the rounds explain everything except a twentieth (`UNSHARED`): a job
is assumed to scale well until a measurement shows otherwise. No size is assumed to be faster than the fastest measured
one, except in proportion to its rounds.

A replica may be spread over p local ranks (docs/layouts.md); p may depend on the number of nodes. Then N is the number
of replicas. A micro-batch takes `micro_batch_share(p)` of its time on one local rank, and a worker sums 1/p of the
gradients.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from holdfast.errors import BadInputError
from holdfast.planning.arrays import FloatArray, IntArray, indices
from holdfast.planning.solvers import least_squares_from_zero

#: With one measured size: the share of its step time that no other size reduces.
UNSHARED = 0.05
#: With twice as many local ranks a micro-batch takes half the time, plus this share of that half.
LOSS_PER_DOUBLING = 0.1


def micro_batch_share(places: int) -> float:
    """Return the time of a micro-batch on this many local ranks of a replica, over the time on one."""
    return (1.0 + LOSS_PER_DOUBLING) ** math.log2(places) / places


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTimes:
    """Measurements of a job's steps."""

    #: Seconds of a step, by number of nodes.
    step_s: Mapping[int, float]
    #: M, the micro-batches of a step.
    micro_batches: int
    #: Workers on each node.
    workers: int
    #: FLOP of a step, over all workers.
    flop: float
    #: The local ranks of a replica with 1, 2, ... nodes; the last entry also holds for more nodes. Empty if a replica
    #: has one local rank.
    places: Sequence[int] = ()

    def __post_init__(self) -> None:
        """Check the measurements.

        Raises:
            BadInputError: A number is not possible; the message names it.
        """
        for name, value in (("micro_batches", self.micro_batches), ("workers", self.workers), ("flop", self.flop)):
            if not 0 < value < np.inf:
                raise BadInputError(f"{name} is {value:g}: give a number above 0")
        if not self.step_s:
            raise BadInputError("no step was measured: give the seconds of a step for at least one number of nodes")
        for nodes, seconds in self.step_s.items():
            if nodes < 1 or not 0 < seconds < np.inf:
                raise BadInputError(
                    f"a step on {nodes} nodes took {seconds:g} s: give seconds above 0, for 1 node or more"
                )

    def predicted_s(self, nodes: int) -> FloatArray:
        """Return the fitted seconds of a step with 1..nodes nodes, `(nodes,)`, also for measured sizes."""
        sizes = np.array(sorted(self.step_s))
        seconds = np.array([self.step_s[int(size)] for size in sizes])
        terms = self._terms(sizes)[:, : max(2, min(len(sizes), 3))]
        if len(sizes) == 1:
            known = seconds[0] * np.array([(1 - UNSHARED) / terms[0, 0], UNSHARED])
        else:
            known = least_squares_from_zero(terms / seconds[:, None], np.ones(len(sizes)))
        fitted = self._terms(1 + indices(nodes))[:, : known.size] @ known
        fastest = int(seconds.argmin())
        # If steps took longer with more nodes, the fit may consist of the sum of gradients alone, which one node does
        # not need.
        rounds = self._terms(1 + indices(nodes))[:, 0] / self._terms(sizes)[fastest, 0]
        return np.maximum(fitted, seconds[fastest] * np.minimum(1.0, rounds))

    def throughput(self, nodes: int) -> FloatArray:
        """Return FLOP/s with 0..nodes nodes, `(nodes + 1,)`: measured if possible, else fitted."""
        seconds = self.predicted_s(nodes)
        for size, measured in self.step_s.items():
            if size <= nodes:
                seconds[size - 1] = measured
        return np.concatenate([[0.0], self.flop / seconds])

    def _terms(self, nodes: IntArray) -> FloatArray:
        """Return the terms of a step's time, `(sizes, 3)`: the rounds, the constant, and the sum of gradients."""
        places = self._places(nodes)
        replicas = np.maximum(1, nodes * self.workers // places)
        rounds = -(-self.micro_batches // replicas) * np.array([micro_batch_share(int(count)) for count in places])
        summed = (replicas - 1) / replicas / places
        return np.stack([rounds, np.ones(len(nodes)), summed], axis=1).astype(np.float64)

    def _places(self, nodes: IntArray) -> IntArray:
        """Return the number of local ranks of a replica for each number of nodes, `(sizes,)`; 1 without `self.places`.

        With more nodes than `self.places` lists, its last number counts.
        """
        if not self.places:
            return np.ones_like(nodes)
        return np.maximum(1, np.array(self.places)[np.minimum(nodes, len(self.places)) - 1])
