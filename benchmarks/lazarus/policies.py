"""The policies that Lazarus compares (6.1, 6.6), for jobs that are MODELLED: replicas by loads, or fixed chunks.

A step's time is that of what does not depend on the experts, plus the busiest node's tokens, computed and sent. Nodes
have the same batch each, as in the paper, so a step's time does not depend on how many they are; samples do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
from modelled_job import Formation
from setting import RECORDED_EVERY, SLOTS, Recording, kept, planned

from holdfast.planning.arrays import FloatArray, IntArray
from holdfast.planning.balance.work import busiest_over_mean

#: the busiest node's tokens over the mean one's `(L,)`, of shares `(L, E)` and an EP size
Busiest = Callable[[FloatArray, int], FloatArray]
#: steps from one rebalancing to the next (6.1)
EVERY = 200


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What a step costs on one kind of GPU: `fixed_s`; `expert_s` for a mean node's tokens; `wire_s` if all travel."""

    recording: Recording
    fixed_s: float
    expert_s: float
    wire_s: float = 0.0
    #: samples of a step on each node
    samples: int = 4

    @cached_property
    def _shares(self) -> FloatArray:
        """Each expert's share `(T, L, E)`."""
        tokens = self.recording.tokens
        return tokens / tokens.sum(axis=2, keepdims=True)

    def place(self, step: int) -> int:
        """Return which recorded iteration a step has; the last one serves for all that follow."""
        return min(step // RECORDED_EVERY, len(self.recording.tokens) - 1)

    def loads(self, step: int) -> FloatArray:
        """Return the shares `(L, E)` at a step."""
        return self._shares[self.place(step)]

    def seen(self, step: int) -> IntArray:
        """Return tokens `(L, E)` of the last steps before `step`, what a placement is planned by."""
        last = self.place(step)
        return self.recording.tokens[max(0, last - EVERY // RECORDED_EVERY) : last + 1].sum(axis=0)

    def same_pace(self, step: int) -> int:
        """Return for how many steps the loads stay."""
        return RECORDED_EVERY - step % RECORDED_EVERY

    def step_s(self, busiest: FloatArray, remote: FloatArray | float) -> float:
        """Return a step's seconds.

        Args:
            busiest: the busiest node's tokens over the mean one's, `(L,)`. remote: the share that comes from elsewhere.
        """
        return self.fixed_s + float((busiest * (self.expert_s + self.wire_s * remote)).mean())


@dataclass(frozen=True, kw_only=True)
class Elastic:
    """Replicas by loads on all nodes: MRO planned anew with every change (Lazarus), or `best`, keeping what is held."""

    name: str
    workload: Workload
    strategy: str
    keeps: bool
    restarts_to_grow: bool = False
    slots: int = SLOTS

    def begin(self, nodes: tuple[str, ...], step: int) -> Formation | None:
        """All train who are there, if they can hold all experts."""
        if len(nodes) * self.slots < self.workload.recording.tokens.shape[2]:
            return None
        return self._with(nodes, planned(self.workload.seen(step), len(nodes), self.strategy).counts)

    def lose(self, before: Formation, alive: tuple[str, ...], step: int) -> Formation | None:
        """Go on with the experts that are left, if none is lost."""
        held = self._held(before, alive)
        if not held.any(axis=2).all() or len(alive) * self.slots < held.shape[1]:
            return None
        loads = self.workload.seen(step)
        counts = kept(held, loads) if self.keeps else self._anew(held, loads)
        return self._with(alive, counts)

    def grow(self, before: Formation, alive: tuple[str, ...], step: int) -> Formation:
        """Use everybody."""
        return self._with(alive, self._anew(self._held(before, alive), self.workload.seen(step)))

    def rebalance(self, before: Formation, step: int) -> Formation:
        """Place by the loads of now, where that changes anything."""
        if self.workload.place(step) == self.workload.place(max(0, step - EVERY)):
            return before  # the recording is over
        held = self._held(before, before.nodes)
        counts = self._anew(held, self.workload.seen(step))
        return before if (counts == held).all() else self._with(before.nodes, counts)

    def same_pace(self, step: int) -> int:
        """See `Workload`."""
        return self.workload.same_pace(step)

    def _anew(self, held: IntArray, loads: IntArray) -> IntArray:
        return planned(loads, held.shape[2], self.strategy, held=held).counts

    def _held(self, before: Formation, nodes: tuple[str, ...]) -> IntArray:
        """Return what these nodes hold `(L, E, N)`; who was not there, nothing."""
        counts = before.counts
        assert counts is not None
        number = {node: place for place, node in enumerate(before.nodes)}
        columns = [
            counts[:, :, number[node]] if node in number else np.zeros(counts.shape[:2], dtype=np.int64)
            for node in nodes
        ]
        return np.stack(columns, axis=2)

    def _with(self, nodes: tuple[str, ...], counts: IntArray) -> Formation:
        known: dict[int, float] = {}

        def step_s(step: int) -> float:
            place = self.workload.place(step)
            if place not in known:
                loads = self.workload.loads(step)
                known[place] = self.workload.step_s(busiest_over_mean(counts, loads), remote_share(counts, loads))
            return known[place]

        return Formation(nodes=nodes, samples=len(nodes) * self.workload.samples, step_s=step_s, counts=counts)


def remote_share(counts: IntArray, shares: FloatArray) -> FloatArray:
    """Return which share of a layer's tokens leave their node `(L,)`, if all nodes have the same ones.

    Args:
        counts: replicas `(L, E, N)`. shares: of the tokens, `(L, E)`; each node's own go to its own replicas first.
    """
    capacity = counts * (shares / counts.sum(axis=2))[:, :, None]
    local = np.minimum(capacity, shares[:, :, None] / counts.shape[2]).sum(axis=(1, 2))
    return np.maximum(0.0, 1.0 - local / shares.sum(axis=1))


def padded(shares: FloatArray, _: int) -> FloatArray:
    """All experts count as the busiest one: what DeepSpeed MoE sends and computes (4.2), `(L,)` of `(L, E)`."""
    return shares.max(axis=1) * shares.shape[1]


def unpadded(shares: FloatArray, ep_size: int) -> FloatArray:
    """The busiest chunk's tokens over the mean one's, `(L,)` of `(L, E)`."""
    return shares.reshape(len(shares), ep_size, -1).sum(axis=2).max(axis=1) * ep_size


class Pace(Protocol):
    """How fast static chunks are, whoever trains."""

    @property
    def samples(self) -> int:
        """Of a step, on each node."""
        ...

    def step_s(self, step: int) -> float:
        """Return a step's seconds."""
        ...

    def same_pace(self, step: int) -> int:
        """Return how many steps from `step` on take as long as this one."""
        ...


@dataclass(frozen=True, kw_only=True)
class ChunkPace:
    """That of a workload whose experts are cut into `ep_size` chunks."""

    workload: Workload
    ep_size: int
    busiest: Busiest

    @property
    def samples(self) -> int:
        """See `Pace`."""
        return self.workload.samples

    @cached_property
    def _seconds(self) -> list[float]:
        """A step's seconds by recorded iteration."""
        steps = range(0, RECORDED_EVERY * len(self.workload.recording.tokens), RECORDED_EVERY)
        every = (self.busiest(self.workload.loads(step), self.ep_size) for step in steps)
        return [self.workload.step_s(busiest, 1.0 - 1.0 / self.ep_size) for busiest in every]

    def step_s(self, step: int) -> float:
        """See `Pace`."""
        return self._seconds[self.workload.place(step)]

    def same_pace(self, step: int) -> int:
        """See `Pace`."""
        return self.workload.same_pace(step)


@dataclass(frozen=True, kw_only=True)
class Static:
    """Equal chunks of experts on each node, in groups of `ep_size` nodes: DS, Tutel, and those with live recovery."""

    name: str
    pace: Pace
    ep_size: int
    live: bool

    @property
    def restarts_to_grow(self) -> bool:
        """Only live ones grow without."""
        return not self.live

    def begin(self, nodes: tuple[str, ...], step: int) -> Formation | None:
        """As many groups as there are; the others are idle."""
        world = len(nodes) // self.ep_size * self.ep_size
        if not world:
            return None
        chunks = {node: place % self.ep_size for place, node in enumerate(nodes[:world])}
        return self._with(chunks)

    def lose(self, before: Formation, alive: tuple[str, ...], step: int) -> Formation | None:
        """Go on with those that trained, if each chunk has a copy; who was idle stays so until a restart (6.2)."""
        if not self.live:
            return None
        there = set(alive)
        left = {node: chunk for node, chunk in before.chunks.items() if node in there}
        if set(left.values()) != set(range(self.ep_size)):
            return None
        each = len(left) // self.ep_size
        stay: dict[str, int] = {}
        for chunk in range(self.ep_size):
            stay |= dict.fromkeys([node for node, own in left.items() if own == chunk][:each], chunk)
        spare = [node for node in left if node not in stay]
        for chunk in range(self.ep_size):
            while sum(own == chunk for own in stay.values()) < each:
                stay[spare.pop()] = chunk
        return self._with(stay)

    def grow(self, before: Formation, alive: tuple[str, ...], step: int) -> Formation:
        """Use as many whole groups as there are now, if they are more."""
        chunks = dict(before.chunks)
        if len(alive) // self.ep_size * self.ep_size <= len(chunks):
            return before
        others = [node for node in alive if node not in chunks]
        number = 0
        while len(chunks) < len(alive) // self.ep_size * self.ep_size:
            chunks[others[number]] = number % self.ep_size
            number += 1
        return self._with(chunks)

    def rebalance(self, before: Formation, step: int) -> Formation:
        """Never."""
        return before

    def same_pace(self, step: int) -> int:
        """See `Pace`."""
        return self.pace.same_pace(step)

    def _with(self, chunks: dict[str, int]) -> Formation:
        nodes = tuple(chunks)
        samples = len(nodes) * self.pace.samples
        return Formation(nodes=nodes, samples=samples, step_s=self.pace.step_s, chunks=chunks)


def ep_size_of(experts: int, slots: int = SLOTS) -> int:
    """Return the least divisor of the experts whose chunks fit a node's slots (6.1)."""
    return next(size for size in range(1, experts + 1) if experts % size == 0 and experts // size <= slots)
