"""The MODELLED policies that Lazarus compares (6.1, 6.6): replicas by loads, or fixed chunks.

A step takes a fixed time plus the computation and transfer of the busiest node's tokens. Each node has the same batch,
as in the paper, so the time of a step does not depend on the number of nodes, but its samples do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
from modelled_job import Formation
from setting import RECORDED_EVERY, SLOTS, Recording, make_testbed_plan, repair_placement

from holdfast.planning.arrays import FloatArray, IntArray
from holdfast.planning.balance.work import busiest_over_mean

#: Returns the busiest node's tokens relative to the mean, `(L,)`, from shares `(L, E)` and an EP size.
Busiest = Callable[[FloatArray, int], FloatArray]
#: Steps between rebalancings (section 6.1).
EVERY = 200


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Costs of a step on one kind of GPU."""

    recording: Recording
    #: Seconds that do not depend on the experts.
    fixed_s: float
    #: Seconds to compute the mean node's tokens.
    expert_s: float
    #: Seconds to transfer the mean node's tokens, if all are sent to other nodes.
    wire_s: float = 0.0
    #: Samples of a step on each node.
    samples: int = 4

    @cached_property
    def _shares(self) -> FloatArray:
        """Each expert's share of the tokens, `(T, L, E)`."""
        tokens = self.recording.tokens
        return tokens / tokens.sum(axis=2, keepdims=True)

    def record_index(self, step: int) -> int:
        """Return the recorded iteration for a step; the last one is used for all later steps."""
        return min(step // RECORDED_EVERY, len(self.recording.tokens) - 1)

    def loads(self, step: int) -> FloatArray:
        """Return the shares `(L, E)` at a step."""
        return self._shares[self.record_index(step)]

    def recent_tokens(self, step: int) -> IntArray:
        """Return tokens `(L, E)` of the last steps before `step`, from which a placement is planned."""
        last = self.record_index(step)
        return self.recording.tokens[max(0, last - EVERY // RECORDED_EVERY) : last + 1].sum(axis=0)

    def steps_at_same_pace(self, step: int) -> int:
        """Return the number of steps until the loads change."""
        return RECORDED_EVERY - step % RECORDED_EVERY

    def step_s(self, busiest: FloatArray, remote: FloatArray | float) -> float:
        """Return a step's seconds.

        Args:
            busiest: the busiest node's tokens relative to the mean, `(L,)`.
            remote: the share of tokens that comes from other nodes.
        """
        return self.fixed_s + float((busiest * (self.expert_s + self.wire_s * remote)).mean())


@dataclass(frozen=True, kw_only=True)
class Elastic:
    """Replicas by loads on all nodes: MRO replanned after each change (Lazarus), or `best`, which keeps replicas."""

    name: str
    workload: Workload
    strategy: str
    keeps: bool
    restarts_to_grow: bool = False
    slots: int = SLOTS

    def form(self, nodes: tuple[str, ...], step: int) -> Formation | None:
        """Train on all available nodes, if they can hold all experts."""
        if len(nodes) * self.slots < self.workload.recording.tokens.shape[2]:
            return None
        return self._make_formation(
            nodes, make_testbed_plan(self.workload.recent_tokens(step), len(nodes), self.strategy).counts
        )

    def shrink(self, before: Formation, alive: tuple[str, ...], step: int) -> Formation | None:
        """Continue with the remaining experts, if none is lost."""
        held = self._held_replicas(before, alive)
        if not held.any(axis=2).all() or len(alive) * self.slots < held.shape[1]:
            return None
        loads = self.workload.recent_tokens(step)
        counts = repair_placement(held, loads) if self.keeps else self._replan(held, loads)
        return self._make_formation(alive, counts)

    def grow(self, before: Formation, alive: tuple[str, ...], step: int) -> Formation:
        """Use all available nodes."""
        return self._make_formation(
            alive, self._replan(self._held_replicas(before, alive), self.workload.recent_tokens(step))
        )

    def rebalance(self, before: Formation, step: int) -> Formation:
        """Place by the current loads, if that changes anything."""
        if self.workload.record_index(step) == self.workload.record_index(max(0, step - EVERY)):
            return before  # the recording has ended
        held = self._held_replicas(before, before.nodes)
        counts = self._replan(held, self.workload.recent_tokens(step))
        return before if (counts == held).all() else self._make_formation(before.nodes, counts)

    def steps_at_same_pace(self, step: int) -> int:
        """See `Workload`."""
        return self.workload.steps_at_same_pace(step)

    def _replan(self, held: IntArray, loads: IntArray) -> IntArray:
        return make_testbed_plan(loads, held.shape[2], self.strategy, held=held).counts

    def _held_replicas(self, before: Formation, nodes: tuple[str, ...]) -> IntArray:
        """Return the replicas of these nodes, `(L, E, N)`; new nodes have none."""
        counts = before.counts
        assert counts is not None
        number = {node: place for place, node in enumerate(before.nodes)}
        columns = [
            counts[:, :, number[node]] if node in number else np.zeros(counts.shape[:2], dtype=np.int64)
            for node in nodes
        ]
        return np.stack(columns, axis=2)

    def _make_formation(self, nodes: tuple[str, ...], counts: IntArray) -> Formation:
        known: dict[int, float] = {}

        def step_s(step: int) -> float:
            place = self.workload.record_index(step)
            if place not in known:
                loads = self.workload.loads(step)
                known[place] = self.workload.step_s(busiest_over_mean(counts, loads), remote_share(counts, loads))
            return known[place]

        return Formation(nodes=nodes, samples=len(nodes) * self.workload.samples, step_s=step_s, counts=counts)


def remote_share(counts: IntArray, shares: FloatArray) -> FloatArray:
    """Return the share of a layer's tokens that leave their node, `(L,)`, if all nodes have the same tokens.

    Args:
        counts: replicas `(L, E, N)`.
        shares: of the tokens, `(L, E)`; each node's tokens go to its own replicas first.
    """
    capacity = counts * (shares / counts.sum(axis=2))[:, :, None]
    local = np.minimum(capacity, shares[:, :, None] / counts.shape[2]).sum(axis=(1, 2))
    return np.maximum(0.0, 1.0 - local / shares.sum(axis=1))


def padded_load(shares: FloatArray, _: int) -> FloatArray:
    """Return the load if all experts are padded to the busiest, as DeepSpeed MoE does (4.2); `(L,)` of `(L, E)`."""
    return shares.max(axis=1) * shares.shape[1]


def chunk_load(shares: FloatArray, ep_size: int) -> FloatArray:
    """Return the busiest chunk's tokens relative to the mean, `(L,)` of `(L, E)`."""
    return shares.reshape(len(shares), ep_size, -1).sum(axis=2).max(axis=1) * ep_size


class Pace(Protocol):
    """The pace of static chunks on any nodes."""

    @property
    def samples(self) -> int:
        """Samples of a step on each node."""
        ...

    def step_s(self, step: int) -> float:
        """Return a step's seconds."""
        ...

    def steps_at_same_pace(self, step: int) -> int:
        """Return the number of steps from `step` on that take as long as this one."""
        ...


@dataclass(frozen=True, kw_only=True)
class ChunkPace:
    """The pace of a workload with experts divided into `ep_size` chunks."""

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
        return self._seconds[self.workload.record_index(step)]

    def steps_at_same_pace(self, step: int) -> int:
        """See `Pace`."""
        return self.workload.steps_at_same_pace(step)


@dataclass(frozen=True, kw_only=True)
class Static:
    """Equal chunks of experts on each node, in groups of `ep_size` nodes: DS and Tutel, also with live recovery."""

    name: str
    pace: Pace
    ep_size: int
    live: bool

    @property
    def restarts_to_grow(self) -> bool:
        """Whether growing needs a restart, which is the case without live recovery."""
        return not self.live

    def form(self, nodes: tuple[str, ...], step: int) -> Formation | None:
        """Form as many full groups as possible; the remaining nodes are idle."""
        world = len(nodes) // self.ep_size * self.ep_size
        if not world:
            return None
        chunks = {node: place % self.ep_size for place, node in enumerate(nodes[:world])}
        return self._make_formation(chunks)

    def shrink(self, before: Formation, alive: tuple[str, ...], step: int) -> Formation | None:
        """Continue with the training nodes, if each chunk has a copy; idle nodes stay idle until a restart (6.2)."""
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
        return self._make_formation(stay)

    def grow(self, before: Formation, alive: tuple[str, ...], step: int) -> Formation:
        """Form as many full groups as possible now, if that is more than before."""
        chunks = dict(before.chunks)
        if len(alive) // self.ep_size * self.ep_size <= len(chunks):
            return before
        others = [node for node in alive if node not in chunks]
        number = 0
        while len(chunks) < len(alive) // self.ep_size * self.ep_size:
            chunks[others[number]] = number % self.ep_size
            number += 1
        return self._make_formation(chunks)

    def rebalance(self, before: Formation, step: int) -> Formation:
        """Keep the placement."""
        return before

    def steps_at_same_pace(self, step: int) -> int:
        """See `Pace`."""
        return self.pace.steps_at_same_pace(step)

    def _make_formation(self, chunks: dict[str, int]) -> Formation:
        nodes = tuple(chunks)
        samples = len(nodes) * self.pace.samples
        return Formation(nodes=nodes, samples=samples, step_s=self.pace.step_s, chunks=chunks)


def ep_size_of(experts: int, slots: int = SLOTS) -> int:
    """Return the smallest divisor of the number of experts for which a chunk fits a node's slots (6.1)."""
    return next(size for size in range(1, experts + 1) if experts % size == 0 and experts // size <= slots)
