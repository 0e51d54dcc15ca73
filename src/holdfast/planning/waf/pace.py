"""T(t, x) of Eq. 2: what a job achieves with x nodes, from the steps that were measured; fitted where none were.

A step of M micro-batches on N workers has ceil(M / N) rounds; then gradients are summed, which takes each worker
(N - 1) / N of their bytes twice; then all apply the same. So its time is modelled as
`a ceil(M / N) + b (N - 1) / N + c`, none of a, b and c below zero (non-negative least squares of relative errors). With
two sizes measured, b is left out; with one, the rounds are taken to explain all of it but a twentieth (`UNSHARED`): a
job is thought to grow well until it was seen not to. No size is believed to be faster than the fastest that was
measured, but in proportion to its rounds.

Where a replica is spread over p places (docs/layouts.md), which may be another number with each number of nodes, N are
the replicas, a micro-batch takes `micro_batch_share(p)` of what it takes one place alone, and a worker sums a p-th of
the gradients.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from holdfast.errors import BadInputError
from holdfast.planning.arrays import FloatArray, IntArray, indices
from holdfast.planning.solvers import least_squares_from_zero

#: where one size was measured, or none: the share of that step's time which no other size makes shorter
UNSHARED = 0.05
#: with twice as many places a micro-batch takes half as long, and so much of that longer
LOSS_PER_DOUBLING = 0.1


def micro_batch_share(places: int) -> float:
    """Return how long a micro-batch takes on so many places of a replica, as a share of what it takes one alone."""
    return (1.0 + LOSS_PER_DOUBLING) ** math.log2(places) / places


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTimes:
    """What was measured of a job's steps.

    step_s: seconds of a step, by number of nodes. micro_batches: M, of a step. workers: on each node. flop: of a step,
    all workers together. places: of a replica with 1, 2, ... nodes, with more as with the last; () for one.
    """

    step_s: Mapping[int, float]
    micro_batches: int
    workers: int
    flop: float
    places: Sequence[int] = ()

    def __post_init__(self) -> None:
        """Refuse what cannot have been measured.

        Raises:
            BadInputError: with the number that is wrong.
        """
        for name, value in (("micro_batches", self.micro_batches), ("workers", self.workers), ("flop", self.flop)):
            if not 0 < value < np.inf:
                raise BadInputError(f"{name} is {value:g}: give a number above 0")
        if not self.step_s:
            raise BadInputError("no step was measured: give the seconds of a step for one number of nodes at the least")
        for nodes, seconds in self.step_s.items():
            if nodes < 1 or not 0 < seconds < np.inf:
                raise BadInputError(
                    f"a step on {nodes} nodes took {seconds:g} s: give seconds above 0, for 1 node or more"
                )

    def predicted_s(self, nodes: int) -> FloatArray:
        """Return the seconds of a step with 1..nodes nodes as fitted, `(nodes,)`; measured or not."""
        sizes = np.array(sorted(self.step_s))
        seconds = np.array([self.step_s[int(size)] for size in sizes])
        terms = self._terms(sizes)[:, : max(2, min(len(sizes), 3))]
        if len(sizes) == 1:
            known = seconds[0] * np.array([(1 - UNSHARED) / terms[0, 0], UNSHARED])
        else:
            known = least_squares_from_zero(terms / seconds[:, None], np.ones(len(sizes)))
        fitted = self._terms(1 + indices(nodes))[:, : known.size] @ known
        fastest = int(seconds.argmin())
        # (steps that took longer with more nodes may be explained by the sum alone, which a single one does not need)
        rounds = self._terms(1 + indices(nodes))[:, 0] / self._terms(sizes)[fastest, 0]
        return np.maximum(fitted, seconds[fastest] * np.minimum(1.0, rounds))

    def throughput(self, nodes: int) -> FloatArray:
        """Return FLOP/s with 0..nodes nodes, `(nodes + 1,)`: as measured where it was, else as fitted."""
        seconds = self.predicted_s(nodes)
        for size, measured in self.step_s.items():
            if size <= nodes:
                seconds[size - 1] = measured
        return np.concatenate([[0.0], self.flop / seconds])

    def _terms(self, nodes: IntArray) -> FloatArray:
        """Return what a step's time is made of, `(sizes, 3)`: rounds, what is done once, and the sum of gradients."""
        places = self._places(nodes)
        replicas = np.maximum(1, nodes * self.workers // places)
        rounds = -(-self.micro_batches // replicas) * np.array([micro_batch_share(int(count)) for count in places])
        summed = (replicas - 1) / replicas / places
        return np.stack([rounds, np.ones(len(nodes)), summed], axis=1).astype(np.float64)

    def _places(self, nodes: IntArray) -> IntArray:
        """Return how many places a replica has with so many nodes, `(sizes,)`."""
        if not self.places:
            return np.ones_like(nodes)
        return np.maximum(1, np.array(self.places)[np.minimum(nodes, len(self.places)) - 1])
