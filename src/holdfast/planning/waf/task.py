"""What a job is worth with so many nodes: Unicron's Eq. 2 and the terms of Eq. 3 and 4.

Axes: `(n + 1,)` arrays are indexed by a number of nodes, from none to n.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from holdfast.errors import BadInputError
from holdfast.planning.arrays import BoolArray, FloatArray, indices


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """A job as the plan sees it.

    throughput: `(n + 1,)` FLOP/s that it achieves with 0..n nodes (Eq. 2's T(t, x)); with more than the last, as many
    as with that. weight: Eq. 2's w(t). least: nodes without which it is worth nothing (T_necessary); sizes: those that
    it can run on, () for all from `least` to `most`. floor: the plan gives it no fewer, whatever the others would make
    of them: as printed, Eq. 3 starves jobs (errata 4). had: nodes before what has happened (x_i). hit: a
    node of it has failed (Eq. 4). transition_s: how long a change of its nodes keeps it from training; hit_s: likewise
    one that begins with a failure, None where that is the same; left_s: so much longer where it is left with none, for
    it is saved, and begun again some day. lost_share: `(n + 1,)`, the share of its time that goes into computing anew
    what roll-backs have undone (`survival`); None where none does.
    """

    name: str
    throughput: FloatArray
    weight: float = 1.0
    least: int = 1
    most: int | None = None
    sizes: Sequence[int] = ()
    floor: int = 0
    had: int = 0
    hit: bool = False
    transition_s: float = 0.0
    hit_s: float | None = None
    left_s: float = 0.0
    lost_share: FloatArray | None = None

    def __post_init__(self) -> None:
        """Refuse what is no throughput or no weight.

        Raises:
            BadInputError: with the job and the value.
        """
        check_throughput(self.name, self.throughput)
        if not (np.isfinite(self.weight) and self.weight > 0):
            raise BadInputError(f"the weight of {self.name} is {self.weight:g}: give a number above 0")

    def waf(self, nodes: int) -> FloatArray:
        """Return F(t, x), weighted achieved FLOP/s, `(nodes + 1,)`; 0 for what the job cannot run on."""
        achieved = self.weight * _extended(self.throughput, nodes)
        if self.lost_share is not None:
            achieved = achieved * (1.0 - np.clip(_extended(self.lost_share, nodes), 0.0, 1.0))
        return np.where(self.fits(nodes), achieved, 0.0)

    def reward(self, nodes: int, running_s: float) -> FloatArray:
        """Return G(t, x') of Eq. 3, `(nodes + 1,)` in weighted FLOP; -inf for what it is not to have.

        Args:
            running_s: until the next failure anywhere (D_running).
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
        """What a transition costs, weighted FLOP: F(t, x) of the nodes that it had, for that long."""
        seconds = self.transition_s if self.hit_s is None or not self.hit else self.hit_s
        return float(self.waf(self.had)[self.had]) * seconds

    def loss_with(self, nodes: int) -> float:
        """What it costs that it comes to have so many nodes, weighted FLOP."""
        if nodes == self.had and not self.hit:
            return 0.0
        return self.loss + (0.0 if nodes else float(self.waf(self.had)[self.had]) * self.left_s)

    @property
    def kept(self) -> int:
        """The fewest nodes that the plan gives it: the smallest number from its floor on that it can run on."""
        if not self.floor:
            return 0
        sizes = sorted(size for size in self.sizes if size >= max(self.floor, self.least)) if self.sizes else []
        return sizes[0] if sizes else max(self.floor, self.least)

    def fits(self, nodes: int) -> BoolArray:
        """Return with how many of 0..nodes nodes it can run."""
        held = indices(nodes + 1)
        fits = held >= max(self.least, 1)
        if self.most is not None:
            fits &= held <= self.most
        if self.sizes:
            fits &= np.isin(held, list(self.sizes))
        return fits


def check_throughput(name: str, throughput: FloatArray) -> None:
    """Refuse a table of throughput that is none.

    Raises:
        BadInputError: it is empty, or a value is negative or no number: with the job, the number of nodes, the value.
    """
    if throughput.ndim != 1 or throughput.size < 2:
        raise BadInputError(f"the throughput of {name} says nothing: give FLOP/s for one node at the least")
    wrong = np.flatnonzero(~(np.isfinite(throughput) & (throughput >= 0)))
    if wrong.size:
        nodes = int(wrong[0])
        raise BadInputError(
            f"the throughput of {name} with {nodes} nodes is {float(throughput[nodes]):g}: give FLOP/s, 0 or more"
        )


def falls_at(throughput: FloatArray) -> list[int]:
    """Return the numbers of nodes with which a job achieves less than with one less: the plan leaves those idle."""
    return [int(at) + 1 for at in np.flatnonzero(np.diff(throughput) < 0)]


def _extended(values: FloatArray, nodes: int) -> FloatArray:
    return values[np.minimum(indices(nodes + 1), values.size - 1)]
