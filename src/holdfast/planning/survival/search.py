"""Hill climbing on one pattern of hosts, for clusters small enough to enumerate every loss of nodes.

Each loss of nodes is one bit of a long integer of 2**N bits. A host set is fatal for the losses that contain it. A
pattern is fatal for the losses that are fatal for any of its experts. Host sets are bits of integers, too. So trying a
trade costs a few integer operations.

Axes: E experts, N nodes.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from holdfast.planning.arrays import BoolArray, FloatArray, indices
from holdfast.planning.survival.objective import Objective
from holdfast.planning.survival.pattern import Room

#: The most nodes for this search: 2**12 losses are 512 bytes per expert.
SEARCH_UP_TO_NODES = 12
#: The least gain of a trade. On up to 12 nodes, a smaller one is a rounding error.
_BETTER = 1e-12

#: A pattern, as one number per expert: its hosts as bits.
Masks = tuple[int, ...]


class NodeLosses:
    """All 2**N losses of nodes as bits of integers; computes each host set's fatal losses once."""

    def __init__(self, nodes: int, rates: FloatArray | None = None) -> None:
        """Start with nodes that are alike, or fail at these `rates` `(N,)` (see `odds.py`)."""
        self._nodes = nodes
        masks = indices(1 << nodes)
        lost = np.bitwise_count(masks)
        # _having[n] are the losses that take node n; _of_size[k] are the losses of k nodes.
        self._having = [_as_bits((masks >> node) & 1 == 1) for node in range(nodes)]
        self._of_size = [_as_bits(lost == size) for size in range(nodes + 1)]
        self._number = [bits.bit_count() for bits in self._of_size]
        self._fatal: dict[int, int] = {}
        self._lost = lost.astype(np.int64)
        #: The probability of each loss among all losses of the same number of nodes; None if all are alike.
        self._odds: FloatArray | None = None
        if rates is not None:
            odds = np.exp(((masks[:, None] >> indices(nodes)) & 1) @ np.log(rates))
            self._odds = odds / np.bincount(self._lost, weights=odds)[self._lost]

    def fatal(self, hosts: int) -> int:
        """Return the losses that take all `hosts`, a bit mask of nodes, as an integer with one bit for each set of lost
        nodes.
        """
        known = self._fatal.get(hosts)
        if known is None:
            known = -1
            for node in range(self._nodes):
                if hosts >> node & 1:
                    known &= self._having[node]
            known &= (1 << (1 << self._nodes)) - 1
            self._fatal[hosts] = known
        return known

    def fatal_of(self, masks: Masks) -> int:
        """Return the losses that take all hosts of any expert, as an integer with one bit for each set of lost nodes.

        `masks` are the hosts of each expert, a bit for each node.
        """
        fatal = 0
        for hosts in set(masks):
            fatal |= self.fatal(hosts)
        return fatal

    def share(self, fatal: int) -> FloatArray:
        """Return the probability that a loss is one of these `fatal` losses, by number of lost nodes, `(N + 1,)`.

        `fatal` has one bit for each set of lost nodes. Without failure rates, all sets of one size are equally likely.
        """
        if self._odds is not None:
            return self._weighted_share(fatal, self._odds)
        dead = [(fatal & bits).bit_count() for bits in self._of_size]
        return np.array([number / of for number, of in zip(dead, self._number, strict=True)])

    def _weighted_share(self, fatal: int, odds: FloatArray) -> FloatArray:
        """Return the probability of the `fatal` losses, by number of lost nodes, `(N + 1,)`; `odds` are per loss."""
        flags = np.frombuffer(fatal.to_bytes(max((1 << self._nodes) // 8, 1), "little"), dtype=np.uint8)
        dead = np.unpackbits(flags, bitorder="little")[: odds.size].astype(np.bool_)
        return np.bincount(self._lost[dead], weights=odds[dead], minlength=self._nodes + 1).astype(np.float64)

    def share_of(self, hosts: BoolArray) -> FloatArray:
        """Return the share of fatal losses `(N + 1,)` for the experts' `hosts` `(E, N)`."""
        return self.share(self.fatal_of(as_masks(hosts)))


def as_masks(pattern: BoolArray) -> Masks:
    """Return the hosts of each expert of a `pattern` `(E, N)`, node n as bit n."""
    return tuple((pattern @ (1 << indices(pattern.shape[1]))).tolist())


def as_pattern(masks: Masks, nodes: int) -> BoolArray:
    """Return the pattern `(E, N)` of these hosts."""
    return (np.array(masks, dtype=np.int64)[:, None] >> indices(nodes)) & 1 == 1


def _as_bits(flags: BoolArray) -> int:
    """Pack flags into an integer, flag i as bit i."""
    return int.from_bytes(np.packbits(flags, bitorder="little").tobytes(), "little")


class Climber:
    """Improves one pattern step by step within its room, until its budget of patterns is spent.

    A step moves one expert's host to another node, into a free slot or in exchange with another expert. Or it adds a
    host, in place of another expert's host if no slot is free.
    """

    def __init__(self, losses: NodeLosses, objective: Objective, room: Room, budget: int) -> None:
        """Prepare a search that rates at most about `budget` patterns by the cost of their fatal losses."""
        self._losses = losses
        self._objective = objective
        self._most: list[int] = room.most.tolist()
        self._slots: list[int] = room.slots.tolist()
        self._threshold = room.threshold
        self._budget = budget
        #: Costs by fatal losses, which many trades do not change.
        self._costs: dict[int, float] = {}

    def climb(self, masks: Masks) -> tuple[Masks, float]:
        """Take the first step that lowers the cost, again and again, until no step does or the budget is spent.

        Return the last pattern and its cost.
        """
        cost = self._cost(masks)
        improved = True
        while improved:
            improved = False
            for candidate in self._neighbours(masks):
                if self._budget <= 0:
                    return masks, cost
                found = self._cost(candidate)
                if found < cost - _BETTER:
                    masks, cost, improved = candidate, found, True
                    break
        return masks, cost

    def explore(self, masks: Masks, cost: float, *, kicks: int) -> tuple[Masks, float]:
        """Leave a local optimum: `kicks` times, take random steps from the best pattern so far and climb again.

        It ends earlier if the budget is spent.

        Returns:
            The best pattern found and its cost.
        """
        rng = np.random.default_rng(0)
        for kick in range(kicks):
            if self._budget <= 0:
                break
            start = masks
            for _ in range(1 + kick % 3):
                steps = list(self._neighbours(start))
                start = steps[int(rng.integers(len(steps)))] if steps else start
            candidate, found = self.climb(start)
            if found < cost - _BETTER:
                masks, cost = candidate, found
        return masks, cost

    def _cost(self, masks: Masks) -> float:
        """Return the cost of a pattern, and charge the budget."""
        self._budget -= 1
        fatal = self._losses.fatal_of(masks)
        known = self._costs.get(fatal)
        if known is None:
            known = self._costs[fatal] = self._objective.cost(self._losses.share(fatal))
        return known

    def _neighbours(self, masks: Masks) -> Iterator[Masks]:
        """Yield all patterns one step away, changes of the rarest experts first."""
        hosts = [mask.bit_count() for mask in masks]
        nodes = range(len(self._slots))
        full = [sum(mask >> node & 1 for mask in masks) >= self._slots[node] for node in nodes]
        for expert in sorted(range(len(masks)), key=hosts.__getitem__):
            mask = masks[expert]
            sources = [1 << node for node in nodes if mask >> node & 1]
            # An expert below its most hosts may also get one more, possibly in place of another expert's host.
            if hosts[expert] < self._most[expert]:
                sources.append(0)
            for target in nodes:
                if not mask >> target & 1:
                    for source in sources:
                        yield from self._moves(masks, expert, source, 1 << target, full[target])

    def _moves(self, masks: Masks, expert: int, source: int, target: int, full: bool) -> Iterator[Masks]:
        """Yield the ways to move `expert` from node `source` to `target`, a bit each; source 0 adds a host.

        If the target is `full`, another expert gives up its slot there: it takes the one on `source`, or loses a host
        if it has one above the threshold.
        """
        moved = list(masks)
        moved[expert] ^= source | target
        if not full:
            yield tuple(moved)
            return
        for other, mask in enumerate(masks):
            may_leave = not mask & source if source else mask.bit_count() > self._threshold
            if mask & target and may_leave:
                traded = moved.copy()
                traded[other] ^= source | target
                yield tuple(traded)
