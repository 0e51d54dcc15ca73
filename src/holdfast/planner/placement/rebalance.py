"""`rebalance_experts`: a replacement for EPLB with the same arguments and results.

Axes: L layers, E experts, R slots, G live GPUs, D domains (nodes or racks), X replicas of an expert.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from holdfast.errors import BadInputError
from holdfast.planner.placement.cluster import GpuCluster, make_cluster
from holdfast.planner.placement.following import choose_within_budget, keep_slots, match_parts_to_gpus
from holdfast.planner.placement.repairing import mend_placement
from holdfast.planner.placement.tensors import as_flags, as_integer, as_loads, as_racks, as_slot_map, convert_like
from holdfast.planning.arrays import FloatArray, IntArray, indices
from holdfast.planning.balance.eplb import EplbShape, eplb
from holdfast.planning.balance.work import busiest_over_mean, work_per_replica
from holdfast.planning.placement.allocation import Allocation, allocate
from holdfast.planning.placement.front import find_options_for_replicas
from holdfast.planning.placement.strategy import PlacementProblem
from holdfast.planning.survival.objective import default_weights
from holdfast.planning.survival.recovery_probability import fatal_share

#: Decimal places to which the busiest GPU's load over the mean is compared.
_DIGITS = 9
#: Numbers of swaps in a layer that are tried if a budget limits the copies.
_SWAPS = (1, 2, 4, 8, 64)


@dataclass(frozen=True, slots=True, kw_only=True)
class RebalanceRequest:
    """The checked arguments of `rebalance_experts`."""

    #: `(L, E)`
    loads: FloatArray
    cluster: GpuCluster
    #: number of expert groups
    groups: int
    #: whether EPLB must keep each group of experts on one node
    hierarchical: bool
    #: number of different domains on which each expert must live
    fault_threshold: int
    #: `(L, R)` the expert in each slot now, or None to ignore it
    held: IntArray | None
    #: largest number of copies, or None for no limit
    move_budget: int | None


def rebalance_experts(
    weight: Any,
    num_replicas: int,
    num_groups: int,
    num_nodes: int,
    num_gpus: int,
    *,
    fault_threshold: int = 1,
    racks: Any = None,
    move_budget: int | None = None,
    old_indices: Any = None,
    active_ranks: Any = None,
) -> tuple[Any, Any, Any]:
    """Place replicas of experts on GPUs so that the GPUs have equal loads. A replacement for EPLB.

    The positional arguments and the results are those of EPLB. Without further arguments, the busiest GPU is never
    busier than EPLB's.

    Args:
        weight: `(L, E)` loads: a numpy array, lists, or a torch tensor (then the results are tensors, too).
        num_replicas: slots on all GPUs, a multiple of `num_gpus`.
        num_groups: groups of experts. Each group stays on one node if `num_nodes` divides the number of groups,
            `fault_threshold` is 1, and all ranks are alive.
        num_nodes, num_gpus: GPUs are numbered node by node, slots GPU by GPU.
        fault_threshold: number of different nodes on which each expert lives. Among placements that satisfy it, the
            result has the least sum of fatal losses and the busiest GPU's load over the mean.
        racks: the rack of each node. Each expert then lives in this many different racks instead of nodes.
        move_budget: how many copies GPUs may receive, beyond those that the threshold requires; None: any number. The
            layers that gain most from their copies change, the others stay. It needs `old_indices`.
        old_indices: `(L, R)` the expert in each slot now, -1 for none. Experts keep GPUs and slots if possible.
        active_ranks: `(num_gpus,)` which ranks are alive. None: all. Slots of other ranks are returned with expert 0,
            as SGLang expects, and are left out of the other results.

    Returns:
        The expert in each slot `(L, R)`; the slots of each expert `(L, E, X)`, padded with -1; the replicas of each
        expert `(L, E)`.

    Raises:
        BadInputError: an argument is wrong. The message names it and its value.
    """
    num_replicas, num_groups = as_integer(num_replicas, "num_replicas"), as_integer(num_groups, "num_groups")
    num_nodes, num_gpus = as_integer(num_nodes, "num_nodes"), as_integer(num_gpus, "num_gpus")
    fault_threshold = as_integer(fault_threshold, "fault_threshold")
    move_budget = None if move_budget is None else as_integer(move_budget, "move_budget")
    cluster = _make_cluster(num_replicas, num_nodes, num_gpus, active_ranks, racks)
    loads = as_loads(weight)
    question = RebalanceRequest(
        loads=loads,
        cluster=cluster,
        groups=num_groups,
        hierarchical=_is_hierarchical(num_groups, num_nodes, loads.shape[1], cluster, fault_threshold),
        fault_threshold=fault_threshold,
        held=_read_held_slots(old_indices, loads, num_replicas, move_budget),
        move_budget=move_budget,
    )
    slots = place_replicas(question)
    slot_lists, number = list_expert_slots(slots, loads.shape[1])
    return convert_like(weight, np.maximum(slots, 0)), convert_like(weight, slot_lists), convert_like(weight, number)


def _make_cluster(replicas: int, nodes: int, gpus: int, active_ranks: Any, racks: Any) -> GpuCluster:
    """Check `active_ranks` and `racks`, each optional, and return the cluster. Raises `BadInputError`."""
    active = None if active_ranks is None else as_flags(active_ranks, "active_ranks", gpus)
    return make_cluster(replicas, nodes, gpus, active, None if racks is None else as_racks(racks, nodes))


def _is_hierarchical(groups: int, nodes: int, experts: int, cluster: GpuCluster, threshold: int) -> bool:
    """Whether to place groups on nodes as EPLB does: they divide evenly, all ranks are alive, and the threshold is 1.

    Raises:
        BadInputError: `groups` does not divide the experts.
    """
    if groups < 1 or experts % groups:
        raise BadInputError(f"num_groups is {groups}: it must divide the {experts} experts")
    return groups % nodes == 0 and cluster.has_all_ranks and threshold == 1


def _read_held_slots(old_indices: Any, loads: FloatArray, replicas: int, move_budget: int | None) -> IntArray | None:
    """Return the expert in each slot now `(L, R)`, -1 for none, or None without `old_indices`.

    Raises:
        BadInputError: the move budget is negative or given without `old_indices`, or these have a wrong shape or
            expert.
    """
    if move_budget is not None and (move_budget < 0 or old_indices is None):
        what = "give old_indices, too: moves are counted from there" if move_budget >= 0 else "give at least 0"
        raise BadInputError(f"move_budget is {move_budget}: {what}")
    if old_indices is None:
        return None
    return as_slot_map(old_indices, "old_indices", (len(loads), replicas), loads.shape[1])


def place_replicas(question: RebalanceRequest) -> IntArray:
    """Return the expert in each slot `(L, R)`, or -1 on ranks that are not alive.

    If experts are held now, they keep their GPUs and slots if possible, and moves stay within the budget if there is
    one.

    Raises:
        BadInputError: there are too few slots, or the fault threshold is below 1 or cannot be reached.
    """
    cluster, experts = question.cluster, question.loads.shape[1]
    _check_room(question)
    counts = _plan_counts(question)
    held = None if question.held is None else cluster.to_counts(question.held, experts)
    if question.held is None or held is None or not held.any():
        return cluster.to_slots(counts)
    counts = match_parts_to_gpus(counts, held, _find_exchange_blocks(question))
    if question.move_budget is not None:
        counts = _plan_within_budget(question, counts, held)
    slots = cluster.to_slots(counts)
    return keep_slots(slots, question.held, cluster.per_gpu)


def _check_room(question: RebalanceRequest) -> None:
    """Refuse requests that no placement can satisfy.

    Raises:
        BadInputError: live slots are fewer than experts, `fault_threshold` is below 1, or each expert cannot be on that
            many domains.
    """
    cluster, experts, threshold = question.cluster, question.loads.shape[1], question.fault_threshold
    slots = cluster.alive.size * cluster.per_gpu
    if slots < experts:
        alive = "" if cluster.has_all_ranks else f" on {cluster.alive.size} ranks that are alive"
        raise BadInputError(f"num_replicas gives {slots} slots{alive} for {experts} experts: each needs at least one")
    if threshold < 1:
        raise BadInputError(f"fault_threshold is {threshold}: give at least 1 (each expert needs one replica)")
    fits = min(cluster.domains, int(np.minimum(cluster.domain_slots, experts).sum()) // experts)
    if threshold > fits:
        raise BadInputError(
            f"fault_threshold is {threshold}: {experts} experts fit on {fits} different nodes or racks each, with "
            f"{cluster.domains} of these and {slots} slots"
        )


def _plan_counts(question: RebalanceRequest) -> IntArray:
    """Return the best placement `(L, E, G)`, from EPLB's and others, without regard to the current one.

    With a fault threshold above 1, only placements that reach it count, and fatal losses are weighed against balance.
    Otherwise, the balance decides.
    """
    cluster, loads, threshold = question.cluster, question.loads, question.fault_threshold
    found = _make_eplb_counts(question)
    if threshold > 1:
        found += _make_tolerant_counts(question)
    kept = [counts for counts in found if _count_fewest_domains(cluster, counts) >= threshold]
    # If each expert needs one node only, as with EPLB, equal work is all that counts.
    weight = 1.0 if threshold > 1 else np.inf

    def price(counts: IntArray) -> tuple[float, float]:
        """Return a key by which placements are compared, smaller is better.

        It is the sum of the share of fatal losses and `weight` times the busiest GPU's load over the mean, then that
        load. With infinite weight, the load counts first, then the share.
        """
        busiest = round(float(busiest_over_mean(counts, loads).mean()), _DIGITS)
        hosts = cluster.to_domain_counts(counts) > 0
        fatal = float(fatal_share(hosts).most @ default_weights(cluster.domains))
        return (busiest, fatal) if np.isinf(weight) else (fatal + weight * busiest, busiest)

    return min(kept, key=price)


def _make_eplb_counts(question: RebalanceRequest) -> list[IntArray]:
    """Return EPLB's own placement `(L, E, G)`, and the same improved by swaps."""
    cluster, loads = question.cluster, question.loads
    nodes = cluster.nodes if question.hierarchical else 1
    shape = EplbShape(
        replicas=cluster.alive.size * cluster.per_gpu,
        groups=question.groups if question.hierarchical else 1,
        nodes=nodes,
        gpus=cluster.alive.size,
    )
    slots = np.full((len(loads), cluster.ranks, cluster.per_gpu), -1, dtype=np.int64)
    slots[:, cluster.alive] = eplb(loads, shape).reshape(len(loads), cluster.alive.size, cluster.per_gpu)
    counts = cluster.to_counts(slots.reshape(len(loads), -1), loads.shape[1])
    work = work_per_replica(loads, counts.sum(axis=2))
    return [counts, cluster.improve_by_swaps(counts, work, within_nodes=question.hierarchical)]


def _make_tolerant_counts(question: RebalanceRequest) -> list[IntArray]:
    """Return placements `(L, E, G)` that satisfy the threshold, from the most fault-tolerant to the most balanced."""
    cluster, loads = question.cluster, question.loads
    slots = cluster.domain_slots
    allocation = allocate(loads, slots, fault_threshold=question.fault_threshold, least_busy=True)
    assert isinstance(allocation, Allocation)  # `_check_room` has checked it.
    problem = PlacementProblem(
        replicas=allocation.replicas, slots=slots, fault_threshold=question.fault_threshold, loads=loads
    )
    work = work_per_replica(loads, allocation.replicas)
    return [cluster.to_gpu_counts(option.counts, work) for option in find_options_for_replicas(problem)]


def _count_fewest_domains(cluster: GpuCluster, counts: IntArray) -> int:
    return int((cluster.to_domain_counts(counts) > 0).sum(axis=2).min())


def _find_exchange_blocks(question: RebalanceRequest) -> list[IntArray]:
    """Return the sets of live GPUs that may exchange parts.

    These are the nodes if EPLB's groups stay on nodes, the failure domains with a fault threshold above 1, else all
    GPUs in one set.
    """
    cluster = question.cluster
    if question.hierarchical:
        return [np.flatnonzero(cluster.node == node) for node in range(cluster.nodes)]
    if question.fault_threshold > 1:
        return [np.flatnonzero(cluster.domain == domain) for domain in range(cluster.domains)]
    return [indices(cluster.alive.size)]


def _plan_within_budget(question: RebalanceRequest, counts: IntArray, held: IntArray) -> IntArray:
    """Return a placement `(L, E, G)` within the budget of copies, or as few beyond it as mending the current one needs.

    Each layer is the current one mended, the same with swaps, or that of the new `counts`. The layers that gain most
    for their copies change. `held` `(L, E, G)` is the current placement.
    """
    cluster, loads = question.cluster, question.loads
    assert question.held is not None
    assert question.move_budget is not None
    stays = cluster.to_counts(
        mend_placement(question.held, cluster, loads, question.fault_threshold).slots, loads.shape[1]
    )
    work = work_per_replica(loads, stays.sum(axis=2))
    within = question.hierarchical or question.fault_threshold > 1
    swapped = [cluster.improve_by_swaps(stays, work, within_nodes=within, most=most) for most in _SWAPS]
    choices = [stays, *swapped, counts]
    return choose_within_budget(
        choices, [busiest_over_mean(each, loads) for each in choices], held, question.move_budget
    )


def list_expert_slots(slots: IntArray, experts: int) -> tuple[IntArray, IntArray]:
    """Return the slots of each expert `(L, E, X)`, ascending and padded with -1, and how many each has `(L, E)`.

    `slots` `(L, R)` is the expert in each slot, -1 for none. X is the largest number of slots of one expert.
    """
    layers, number_of_slots = slots.shape
    placed = np.where(slots < 0, experts, slots)
    order = np.argsort(placed, axis=1, kind="stable")
    in_order = np.take_along_axis(placed, order, axis=1)
    row = indices(layers)[:, None]
    number = np.bincount((row * (experts + 1) + placed).ravel(), minlength=layers * (experts + 1))
    number = number.reshape(layers, experts + 1)
    first = np.cumsum(number, axis=1) - number
    nth = indices(number_of_slots) - np.take_along_axis(first, in_order, axis=1)
    number = number[:, :experts]
    lists = np.full((layers, experts, int(number.max())), -1, dtype=np.int64)
    real = in_order < experts
    lists[np.broadcast_to(row, slots.shape)[real], in_order[real], nth[real]] = order[real]
    return lists, number
