"""Hill climbing on one pattern of hosts, for clusters small enough to look at every loss of nodes.

A loss of nodes is a bit of one long integer (2**N bits): a host set is fatal for the losses that contain it,
a pattern for those that are fatal for any of its experts. So trying an exchange costs a few operations on integers.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from holdfast.planning.arrays import BoolArray, FloatArray, indices
from holdfast.planning.objective import Objective
from holdfast.planning.pattern import Room

#: 2**12 losses are 512 bytes an expert.
SEARCH_UP_TO_NODES = 12


class Losses:
    """All 2**N losses of nodes as bits of integers; computes each host set's fatal losses once."""

    def __init__(self, nodes: int) -> None:
        self._nodes = nodes
        masks = indices(1 << nodes)
        lost = np.bitwise_count(masks)
        # having[n]: the losses that take node n; of_size[k]: those that take k nodes.
        self._having = [_as_bits((masks >> node) & 1 == 1) for node in range(nodes)]
        self._of_size = [_as_bits(lost == size) for size in range(nodes + 1)]
        self._number = [bits.bit_count() for bits in self._of_size]
        self._fatal: dict[int, int] = {}

    def fatal(self, hosts: int) -> int:
        """Return the losses that take all *hosts* (a bit mask of nodes)."""
        known = self._fatal.get(hosts)
        if known is None:
            known = -1
            for node in range(self._nodes):
                if hosts >> node & 1:
                    known &= self._having[node]
            known &= (1 << (1 << self._nodes)) - 1
            self._fatal[hosts] = known
        return known

    def curve_of(self, pattern: BoolArray) -> FloatArray:
        """Return the recovery curve `[N + 1]` of a *pattern* `[E, N]`."""
        fatal = 0
        for hosts in set((pattern @ (1 << indices(self._nodes))).tolist()):
            fatal |= self.fatal(hosts)
        dead = [(fatal & bits).bit_count() for bits in self._of_size]
        return np.array([1.0 - number / of for number, of in zip(dead, self._number, strict=True)])


def _as_bits(flags: BoolArray) -> int:
    """Pack flags into an integer, flag i as bit i."""
    return int.from_bytes(np.packbits(flags, bitorder="little").tobytes(), "little")


class Climber:
    """Improves one pattern `[E, N]` step by step within its room, until its budget of patterns tried is spent.

    A step moves one expert's host to another node, into a free slot or in exchange with another expert; or adds a host,
    in place of another expert's where there is no free slot.
    """

    def __init__(self, losses: Losses, objective: Objective, room: Room, budget: int) -> None:
        self._losses = losses
        self._objective = objective
        self._room = room
        self._budget = budget

    def climb(self, pattern: BoolArray) -> tuple[BoolArray, float]:
        """Return the best pattern found and its value, within the budget of patterns tried."""
        pattern = pattern.copy()
        value = self._value(pattern)
        improved = True
        while improved:
            improved = False
            for candidate in self._neighbours(pattern):
                if self._budget <= 0:
                    return pattern, value
                found = self._value(candidate)
                if found > value + 1e-12:
                    pattern, value, improved = candidate, found, True
                    break
        return pattern, value

    def explore(self, pattern: BoolArray, value: float, *, kicks: int) -> tuple[BoolArray, float]:
        """Leave a local optimum: *kicks* times, take random steps from the best pattern so far and climb again."""
        rng = np.random.default_rng(0)
        for kick in range(kicks):
            if self._budget <= 0:
                break
            start = pattern
            for _ in range(1 + kick % 3):
                steps = list(self._neighbours(start))
                start = steps[int(rng.integers(len(steps)))] if steps else start
            candidate, found = self.climb(start)
            if found > value + 1e-12:
                pattern, value = candidate, found
        return pattern, value

    def _value(self, pattern: BoolArray) -> float:
        self._budget -= 1
        return self._objective.value(self._losses.curve_of(pattern))

    def _neighbours(self, pattern: BoolArray) -> Iterator[BoolArray]:
        """Yield all patterns one step away, those that touch the rarest experts first."""
        hosts = pattern.sum(axis=1)
        free = self._room.slots > pattern.sum(axis=0)
        for expert in np.argsort(hosts, kind="stable"):
            for target in np.flatnonzero(~pattern[expert]):
                # An expert with hosts to spare may also grow: at the price of another's host.
                sources: list[int | None] = [int(source) for source in np.flatnonzero(pattern[expert])]
                if hosts[expert] < self._room.most[expert]:
                    sources.append(None)
                for source in sources:
                    yield from self._steps(pattern, int(expert), source, int(target), bool(free[target]))

    def _steps(
        self, pattern: BoolArray, expert: int, source: int | None, target: int, has_room: bool
    ) -> Iterator[BoolArray]:
        """Yield the ways to move *expert* from *source* (None: from nowhere) to *target*."""
        moved = pattern.copy()
        moved[expert, target] = True
        if source is not None:
            moved[expert, source] = False
        if has_room:
            yield moved
            return
        if source is None:
            gives = pattern[:, target] & (pattern.sum(axis=1) > self._room.threshold)
        else:
            gives = pattern[:, target] & ~pattern[:, source]
        for other in np.flatnonzero(gives):
            exchanged = moved.copy()
            exchanged[other, target] = False
            if source is not None:
                exchanged[other, source] = True
            yield exchanged
