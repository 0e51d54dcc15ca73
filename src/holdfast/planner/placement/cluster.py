"""The GPUs on which replicas are placed: their slots, their nodes, and their failure domains.

Axes: L layers, E experts, G live GPUs, D domains (nodes or racks), R slots.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from holdfast.errors import BadInputError
from holdfast.planning.arrays import BoolArray, FloatArray, IntArray, indices
from holdfast.planning.balance.swaps import MOST_SWAPS, swap_replicas
from holdfast.planning.placement.fill import deal_by_work


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuCluster:
    """The GPUs and the slots of each."""

    #: `(G,)` the ranks of the live GPUs
    alive: IntArray
    #: number of ranks, live or not
    ranks: int
    #: slots of each GPU
    per_gpu: int
    #: `(G,)` the node of each live GPU
    node: IntArray
    #: number of nodes
    nodes: int
    #: `(G,)` the failure domain of each live GPU: its node or rack, numbered 0, 1, ... without gaps
    domain: IntArray

    @property
    def domains(self) -> int:
        return int(self.domain.max()) + 1

    @property
    def domain_slots(self) -> IntArray:
        """`(D,)` slots of each domain."""
        return np.bincount(self.domain) * self.per_gpu

    @property
    def has_all_ranks(self) -> bool:
        """Whether all ranks are alive."""
        return self.alive.size == self.ranks

    def to_slots(self, counts: IntArray) -> IntArray:
        """Return the expert in each slot `(L, R)`, ascending on each GPU, from replicas `counts` `(L, E, G)`.

        The replicas must fill all slots of each live GPU. Slots of ranks that are not alive hold -1.
        """
        layers, experts, gpus = counts.shape
        slots = np.full((layers, self.ranks, self.per_gpu), -1, dtype=np.int64)
        by_gpu = counts.transpose(0, 2, 1)
        expert = np.repeat(np.tile(indices(experts), layers * gpus), by_gpu.ravel())
        slots[:, self.alive] = expert.reshape(layers, gpus, self.per_gpu)
        return slots.reshape(layers, -1)

    def to_counts(self, slots: IntArray, experts: int) -> IntArray:
        """Return the replicas on each live GPU `(L, E, G)` from the expert in each slot `(L, R)`, -1 for none.

        Slots of ranks that are not alive are left out.
        """
        layers = len(slots)
        held = slots.reshape(layers, self.ranks, self.per_gpu)[:, self.alive]
        cell = np.where(held < 0, experts, held)
        cell = (indices(layers)[:, None, None] * (experts + 1) + cell) * self.alive.size
        cell += indices(self.alive.size)[:, None]
        counts = np.bincount(cell.ravel(), minlength=layers * (experts + 1) * self.alive.size)
        return counts.reshape(layers, experts + 1, self.alive.size)[:, :experts]

    def to_domain_counts(self, counts: IntArray) -> IntArray:
        """Return replicas per domain `(L, E, D)` from replicas per GPU `(L, E, G)`."""
        return counts @ (self.domain[:, None] == indices(self.domains)).astype(np.int64)

    def to_gpu_counts(self, counts: IntArray, work: FloatArray) -> IntArray:
        """Return replicas per GPU `(L, E, G)` from replicas per domain `(L, E, D)`, dealt by load and balanced.

        `work` `(L, E)` is the load of one replica of each expert. Replicas stay in their domain.
        """
        found = np.zeros((*counts.shape[:2], self.alive.size), dtype=np.int64)
        for domain in range(self.domains):
            mine = np.flatnonzero(self.domain == domain)
            part = np.zeros((*counts.shape[:2], mine.size), dtype=np.int64)
            free = np.full((len(counts), mine.size), self.per_gpu, dtype=np.int64)
            deal_by_work(part, counts[:, :, domain], free, work)
            found[:, :, mine] = _swap(part, work)
        return found

    def improve_by_swaps(
        self, counts: IntArray, work: FloatArray, *, within_nodes: bool, most: int = MOST_SWAPS
    ) -> IntArray:
        """Return `counts` `(L, E, G)` after swaps of replicas that reduce the `work` `(L, E)` of the busiest GPU.

        Args:
            within_nodes: swap only between GPUs of the same node.
            most: largest number of swaps in each layer (on each node).
        """
        if not within_nodes:
            return _swap(counts, work, most)
        found = counts.copy()
        for node in np.unique(self.node):
            mine = np.flatnonzero(self.node == node)
            found[:, :, mine] = _swap(counts[:, :, mine], work, most)
        return found


def _swap(counts: IntArray, work: FloatArray, most: int = MOST_SWAPS) -> IntArray:
    return swap_replicas(counts, np.zeros(counts.shape, dtype=np.bool_), work, np.zeros(len(counts)), most)


def make_cluster(
    replicas: int, nodes: int, gpus: int, active: BoolArray | None = None, racks: IntArray | None = None
) -> GpuCluster:
    """Return the cluster of the live GPUs. `replicas` is the number of slots on all `gpus`, live or not.

    `active` flags live ranks, None all. Domains are the nodes, or with `racks`, which has each node's rack, the racks.

    Raises:
        BadInputError: a number is below 1, `nodes` does not divide `gpus` or these `replicas`, or no rank is alive.
    """
    for name, number in (("num_replicas", replicas), ("num_nodes", nodes), ("num_gpus", gpus)):
        if number < 1:
            raise BadInputError(f"{name} is {number}: give at least 1")
    if gpus % nodes:
        raise BadInputError(f"num_gpus is {gpus}: it must be a multiple of num_nodes, {nodes}")
    if replicas % gpus:
        raise BadInputError(f"num_replicas is {replicas}: it must be a multiple of num_gpus, {gpus}")
    alive = indices(gpus) if active is None else np.flatnonzero(active)
    if not alive.size:
        raise BadInputError(f"active_ranks has none of the {gpus} ranks alive: nothing can be placed")
    node = alive // (gpus // nodes)
    unit = node if racks is None else racks[node]
    domain = np.unique(unit, return_inverse=True)[1].reshape(-1).astype(np.int64)
    return GpuCluster(alive=alive, ranks=gpus, per_gpu=replicas // gpus, node=node, nodes=nodes, domain=domain)
