"""`repair`: the placement that all remaining ranks compute when ranks are lost, without communication.

Axes: L layers, E experts, R slots, G live GPUs, M moves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from holdfast.errors import BadInputError
from holdfast.planner.placement.cluster import GpuCluster, make_cluster
from holdfast.planner.placement.tensors import as_integer, as_loads, as_racks, as_ranks, as_slot_map, convert_like
from holdfast.planning.arrays import FloatArray, IntArray, indices
from holdfast.planning.placement.allocation import Allocation, allocate
from holdfast.planning.placement.keeping.repair import Replicas, WorkerRoom, keep_and_repair


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairedPlacement:
    """A placement after the loss of ranks, and the moves that lead to it. Arrays have the type of `repair`'s."""

    #: `(L, R)` the expert in each slot, -1 on dead ranks
    physical_to_logical_map: Any
    #: `(M, 4)` layer, expert, slot to copy from, slot to copy to. The slot to copy from is -1 if no live rank has the
    #: expert. All slots are read as they were before the first move: a slot may be copied both from and to.
    moves: Any
    #: smallest number of different nodes (or racks) on which an expert now lives
    fault_threshold: int
    #: (layer, expert) that no live rank has; the weights must come from elsewhere
    lost: tuple[tuple[int, int], ...]


def repair(
    physical_to_logical_map: Any,
    dead: Any,
    *,
    num_gpus: int,
    num_nodes: int | None = None,
    weight: Any = None,
    fault_threshold: int = 1,
    racks: Any = None,
) -> RepairedPlacement:
    """Mend a placement after ranks are lost, with as few copies as possible.

    The result is deterministic: all ranks that know the placement and the dead ranks compute the same. Replicas on live
    ranks stay in their slots, with one exception: an expert on too few nodes replaces a replica of an expert that can
    spare one, and that needs it least by the loads.

    Args:
        physical_to_logical_map: `(L, R)` the expert in each slot, slots rank by rank; -1 for an empty slot.
        dead: the ranks that are lost. Ranks without experts may be among them.
        num_gpus: number of ranks, dead or alive.
        num_nodes: number of nodes, each with consecutive ranks. None: each rank is its own node.
        weight: `(L, E)` loads. None: keep the number of replicas of each expert.
        fault_threshold: number of different nodes on which each expert should live. If they do not fit, as many as fit.
        racks: the rack of each node. Each expert should then live in this many different racks.

    Raises:
        BadInputError: more ranks are dead than alive, fewer live slots are left than experts, no live rank holds an
            expert, `fault_threshold` is below 1, or arrays do not match.
    """
    num_gpus, fault_threshold = as_integer(num_gpus, "num_gpus"), as_integer(fault_threshold, "fault_threshold")
    num_nodes = num_gpus if num_nodes is None else as_integer(num_nodes, "num_nodes")
    if num_gpus < 1:
        raise BadInputError(f"num_gpus is {num_gpus}: give at least 1")
    given = as_slot_map(physical_to_logical_map, "physical_to_logical_map", None, None)
    gone = as_ranks(dead, "dead", num_gpus)
    if 2 * gone.size > num_gpus:
        raise BadInputError(
            f"dead has {gone.size} of {num_gpus} ranks: with more dead than alive, plan again with rebalance_experts"
        )
    alive = np.ones(num_gpus, dtype=np.bool_)
    alive[gone] = False
    of_nodes = None if racks is None else as_racks(racks, num_nodes)
    cluster = make_cluster(given.shape[1], num_nodes, num_gpus, alive, of_nodes)
    loads = _read_loads(weight, given)
    found = mend_placement(given, cluster, loads, fault_threshold)
    return RepairedPlacement(
        physical_to_logical_map=convert_like(physical_to_logical_map, found.slots),
        moves=convert_like(physical_to_logical_map, _find_moves(given, found.slots, cluster)),
        fault_threshold=found.fault_threshold,
        lost=_find_lost(given, loads, cluster),
    )


def _read_loads(weight: Any, slots: IntArray) -> FloatArray:
    """Return the loads `(L, E)`: the given ones, or the current numbers of replicas, at least 1 each.

    Raises:
        BadInputError: the loads do not match the slots, or these hold no expert or too high an expert number.
    """
    experts = int(slots.max()) + 1
    if weight is not None:
        loads = as_loads(weight)
        if len(loads) != len(slots) or loads.shape[1] < experts:
            raise BadInputError(
                f"weight has shape {loads.shape}: the placement has {len(slots)} layers and expert {experts - 1}"
            )
        return loads
    if not experts:
        raise BadInputError("physical_to_logical_map holds no expert at all: there is nothing to mend")
    if experts > slots.shape[1]:
        raise BadInputError(
            f"physical_to_logical_map names expert {experts - 1}: {slots.shape[1]} slots have no room for {experts}"
        )
    cell = np.where(slots < 0, experts, slots) + indices(len(slots))[:, None] * (experts + 1)
    number = np.bincount(cell.ravel(), minlength=len(slots) * (experts + 1)).reshape(len(slots), -1)
    return np.maximum(number[:, :experts], 1).astype(np.float64)


@dataclass(frozen=True, slots=True, kw_only=True)
class MendedPlacement:
    """A mended placement."""

    #: `(L, R)` the expert in each slot, -1 on ranks that are not alive
    slots: IntArray
    #: the threshold that it satisfies
    fault_threshold: int


def mend_placement(given: IntArray, cluster: GpuCluster, loads: FloatArray, threshold: int) -> MendedPlacement:
    """Return the placement `(L, R)` for the live ranks, and the threshold that it satisfies: `threshold`, or what fits.

    Replicas stay in their slots, unless an expert on too few domains, or without a live replica, needs the slot. Free
    slots are filled by an allocation by `loads`. Slots of dead ranks get -1.

    Raises:
        BadInputError: there are more experts than live slots, the live ranks hold no expert at all, or the threshold is
            below 1.
    """
    slots = given.reshape(len(given), cluster.ranks, cluster.per_gpu)[:, cluster.alive].reshape(len(given), -1)
    room = WorkerRoom(slots=np.full(cluster.alive.size, cluster.per_gpu), node=cluster.domain, racks=None)
    allocation = allocate(loads, cluster.domain_slots, fault_threshold=threshold, least_busy=True)
    if not isinstance(allocation, Allocation):
        left = cluster.alive.size * cluster.per_gpu
        raise BadInputError(
            f"{left} slots on {cluster.alive.size} live ranks are left for {loads.shape[1]} experts: each needs one"
        )
    layer, place = np.nonzero(slots >= 0)
    held = Replicas(layer=layer, expert=slots[layer, place], worker=place // cluster.per_gpu)
    given_threshold = allocation.fault_threshold.given
    found = keep_and_repair(held, allocation.replicas, room, given_threshold) if len(held) else None
    if found is None:
        raise BadInputError("no live rank holds any expert: plan again with rebalance_experts")
    now = slots.copy()
    now[layer[~found.stays], place[~found.stays]] = -1
    _fill_slots(now, found.added, cluster.per_gpu)
    whole = np.full((len(given), cluster.ranks, cluster.per_gpu), -1, dtype=np.int64)
    whole[:, cluster.alive] = now.reshape(len(given), cluster.alive.size, cluster.per_gpu)
    return MendedPlacement(slots=whole.reshape(given.shape), fault_threshold=given_threshold)


def _fill_slots(slots: IntArray, added: Replicas, per_gpu: int) -> None:
    """Put added replicas into the free slots of their ranks, in order. Changes `slots` `(L, G S)` in place."""
    free_layer, free_place = np.nonzero(slots < 0)
    by_home = np.lexsort((added.expert, added.worker, added.layer))
    # Both are in the order of layers and ranks, and each rank gets as many as it has room for.
    home = added.layer[by_home] * (slots.shape[1] // per_gpu) + added.worker[by_home]
    free_home = free_layer * (slots.shape[1] // per_gpu) + free_place // per_gpu
    first = np.asarray(np.searchsorted(free_home, home), dtype=np.int64)
    turn = indices(home.size) - np.asarray(np.searchsorted(home, home), dtype=np.int64)
    slots[free_layer[first + turn], free_place[first + turn]] = added.expert[by_home]


def _find_moves(given: IntArray, found: IntArray, cluster: GpuCluster) -> IntArray:
    """Return (layer, expert, from slot, to slot) `(M, 4)` for each rank that gets an expert that it does not have.

    The source is the live rank with the expert that is on the same node if possible, then has sent least so far. It
    copies from a slot in which the expert stays, if there is one. The source is -1 if no live rank has the expert.
    """
    layers = len(given)
    before = given.reshape(layers, cluster.ranks, cluster.per_gpu)
    after = found.reshape(layers, cluster.ranks, cluster.per_gpu)
    node = np.full(cluster.ranks, -1, dtype=np.int64)
    node[cluster.alive] = cluster.node
    sent = np.zeros(cluster.ranks, dtype=np.int64)
    moves: list[tuple[int, int, int, int]] = []
    for layer, rank, slot in np.argwhere((after != before) & (after >= 0)).tolist():
        expert = int(after[layer, rank, slot])
        if (before[layer, rank] == expert).any() or (after[layer, rank, :slot] == expert).any():
            continue  # The rank has another replica of the expert.
        had = (before[layer] == expert) & (node >= 0)[:, None]
        stays = had & (after[layer] == expert)
        places = stays if stays.any() else had
        owners = np.flatnonzero(places.any(axis=1))
        source = -1
        if owners.size:
            owner = int(owners[np.lexsort((sent[owners], node[owners] != node[rank]))[0]])
            sent[owner] += 1
            source = owner * cluster.per_gpu + int(places[owner].argmax())
        moves.append((layer, expert, source, rank * cluster.per_gpu + slot))
    return np.array(moves, dtype=np.int64).reshape(-1, 4)


def _find_lost(given: IntArray, loads: FloatArray, cluster: GpuCluster) -> tuple[tuple[int, int], ...]:
    """Return (layer, expert) of each expert without a replica on a live rank."""
    live = cluster.to_counts(given, loads.shape[1]).sum(axis=2)
    return tuple((int(layer), int(expert)) for layer, expert in np.argwhere(live == 0))
