"""The value of a job by its number of nodes: Unicron's Eq. 2 and the terms of Eq. 3 and 4.

Axes: `(n + 1,)` arrays are indexed by a number of nodes, from 0 to n.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from holdfast.errors import BadInputError
from holdfast.planning.arrays import BoolArray, FloatArray, indices


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """A job with the properties that the plan needs."""

    #: The name of the job.
    name: str
    #: `(n + 1,)` FLOP/s that it achieves with 0..n nodes (Eq. 2's T(t, x)). More nodes achieve as much as n.
    throughput: FloatArray
    #: Eq. 2's w(t).
    weight: float = 1.0
    #: The fewest nodes with which it has any value (T_necessary).
    least: int = 1
    #: The most nodes that it can run on; None for no limit.
    most: int | None = None
    #: The numbers of nodes that it can run on; empty for all from `least` to `most`.
    sizes: Sequence[int] = ()
    #: The plan gives it no fewer nodes, whatever other jobs could do with them. Eq. 3 as printed starves jobs (errata
    #: 4).
    floor: int = 0
    #: The nodes before the event (x_i).
    had: int = 0
    #: Whether a node of it has failed (Eq. 4).
    hit: bool = False
    #: Seconds that a change of its nodes stops its training.
    transition_s: float = 0.0
    #: Seconds that a change after a failure stops its training; None if it is `transition_s`.
    hit_s: float | None = None
    #: Additional seconds if it is left without nodes, because it is saved and started again later.
    left_s: float = 0.0
    #: `(n + 1,)` the share of its time spent to repeat work that roll-backs have undone (`survival`); None for no
    #: roll-backs.
    lost_share: FloatArray | None = None

    def __post_init__(self) -> None:
        """Check the throughput and the weight.

        Raises:
            BadInputError: One of them is wrong; the message names the job and the value.
        """
        check_throughput(self.name, self.throughput)
        if not (np.isfinite(self.weight) and self.weight > 0):
            raise BadInputError(f"the weight of {self.name} is {self.weight:g}: give a number above 0")

    def waf(self, nodes: int) -> FloatArray:
        """Return F(t, x), weighted achieved FLOP/s with 0..nodes nodes, `(nodes + 1,)`, without the share lost by
        roll-backs.

        It is 0 for numbers that the job cannot run on.
        """
        achieved = self.weight * _extend(self.throughput, nodes)
        if self.lost_share is not None:
            achieved = achieved * (1.0 - np.clip(_extend(self.lost_share, nodes), 0.0, 1.0))
        return np.where(self.fits(nodes), achieved, 0.0)

    def reward(self, nodes: int, running_s: float) -> FloatArray:
        """Return G(t, x') of Eq. 3: the weighted FLOP until the next failure, less the cost of the change, `(nodes +
        1,)`.

        It is -inf for numbers of nodes below the job's floor, and for numbers above 0 that it cannot run on.

        Args:
            nodes: The most nodes.
            running_s: Seconds until the next failure of any node (D_running).
        """
        reward = self.waf(nodes) * running_s
        changed = (indices(nodes + 1) != self.had) | self.hit
        reward[changed] -= self.loss
        reward[0] -= self.loss_with(0) - self.loss if changed[0] else 0.0
        reward[1:][~self.fits(nodes)[1:]] = -np.inf
        reward[: self.floor] = -np.inf
        return reward

    @property
    def loss(self) -> float:
        """The cost of a transition in weighted FLOP: F(t, x) of its present nodes for the length of the transition."""
        seconds = self.transition_s if self.hit_s is None or not self.hit else self.hit_s
        return float(self.waf(self.had)[self.had]) * seconds

    def loss_with(self, nodes: int) -> float:
        """Return the cost of a change to this many nodes, in weighted FLOP.

        It is 0 if nothing changes and no node has failed. Else it is `loss`, and with 0 nodes also the training missed
        in `left_s` seconds.
        """
        if nodes == self.had and not self.hit:
            return 0.0
        return self.loss + (0.0 if nodes else float(self.waf(self.had)[self.had]) * self.left_s)

    @property
    def kept(self) -> int:
        """The nodes that the plan reserves for it: 0 without a floor, else the smallest number from its floor on.

        The number is at least `least`, and one of `sizes` if one of them is large enough.
        """
        if not self.floor:
            return 0
        sizes = sorted(size for size in self.sizes if size >= max(self.floor, self.least)) if self.sizes else []
        return sizes[0] if sizes else max(self.floor, self.least)

    def fits(self, nodes: int) -> BoolArray:
        """Return whether it can run with 0..nodes nodes, `(nodes + 1,)`; never with 0."""
        held = indices(nodes + 1)
        fits = held >= max(self.least, 1)
        if self.most is not None:
            fits &= held <= self.most
        if self.sizes:
            fits &= np.isin(held, list(self.sizes))
        return fits


def check_throughput(name: str, throughput: FloatArray) -> None:
    """Check a table of throughput.

    Raises:
        BadInputError: It does not have one axis with at least two values, or a value is negative or not finite. The
            message names the job, and the shape, or the number of nodes and the value.
    """
    if throughput.ndim != 1 or throughput.size < 2:
        raise BadInputError(f"the throughput of {name} has shape {throughput.shape}: give FLOP/s for 0, 1, ... nodes")
    wrong = np.flatnonzero(~(np.isfinite(throughput) & (throughput >= 0)))
    if wrong.size:
        nodes = int(wrong[0])
        raise BadInputError(
            f"the throughput of {name} with {nodes} nodes is {float(throughput[nodes]):g}: give FLOP/s, 0 or more"
        )


def find_drops(throughput: FloatArray) -> list[int]:
    """Return the numbers of nodes with which a job achieves less than with one fewer; the plan leaves these idle."""
    return [int(at) + 1 for at in np.flatnonzero(np.diff(throughput) < 0)]


def _extend(values: FloatArray, nodes: int) -> FloatArray:
    """Return `values` with 0..nodes nodes, `(nodes + 1,)`, repeating the last one as needed."""
    return values[np.minimum(indices(nodes + 1), values.size - 1)]
