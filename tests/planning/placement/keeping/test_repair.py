"""Repair keeps the guarantee of f for any remaining replicas, uses every slot, and moves little."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from planning_cases import tables

from holdfast.planning import Allocation, allocate
from holdfast.planning.placement.keeping.repair import Repair, Replicas, WorkerRoom, keep_and_repair, make_worker_room


@dataclass(frozen=True)
class Case:
    """The remaining replicas of a job with experts: `counts` `(L, E, W)` on the workers."""

    counts: np.ndarray
    slots: np.ndarray
    node: np.ndarray
    allocation: Allocation

    @property
    def room(self) -> WorkerRoom:
        return make_worker_room(self.slots, self.node)

    @property
    def threshold(self) -> int:
        return self.allocation.fault_threshold.given

    def repaired(self) -> np.ndarray | None:
        held = as_replicas(self.counts)
        found = keep_and_repair(held, self.allocation.replicas, self.room, self.threshold)
        return None if found is None else after(held, found, self.counts.shape)


def as_replicas(counts: np.ndarray) -> Replicas:
    layer, expert, worker = (np.repeat(axis, counts[counts > 0]) for axis in np.nonzero(counts))
    return Replicas(layer=layer, expert=expert, worker=worker)


def after(held: Replicas, found: Repair, shape: tuple[int, ...]) -> np.ndarray:
    replicas = held.select(found.stays).concatenate(found.added)
    counts = np.zeros(shape, dtype=np.int64)
    np.add.at(counts, (replicas.layer, replicas.expert, replicas.worker), 1)
    return counts


def by_node(counts: np.ndarray, node: np.ndarray) -> np.ndarray:
    return np.stack([counts[:, :, node == number].sum(axis=2) for number in range(node.max() + 1)], axis=2)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Draw any possible state of the workers.

    A worker may fill its slots with arbitrary experts, fill only some of them, hold all experts at once, or hold
    nothing.
    """
    layers, experts = draw(st.integers(1, 3)), draw(st.integers(1, 8))
    nodes, per_node = draw(st.integers(1, 7)), draw(st.integers(1, 3))
    slots = 1 + draw(tables(1, nodes, 5))[0]
    slots[0] += max(0, experts - slots.sum())
    node = np.repeat(np.arange(nodes), per_node)
    rng = np.random.default_rng(draw(st.integers(0, 1 << 16)))
    node = rng.permutation(node)
    room = make_worker_room(slots, node).slots
    loads = draw(tables(layers, experts, 99))
    allocation = allocate(loads, slots, fault_threshold=draw(st.integers(1, 4)))
    assert isinstance(allocation, Allocation)
    counts = np.zeros((layers, experts, node.size), dtype=np.int64)
    for worker, size in enumerate(room):
        kind = rng.choice(("full", "full", "partly", "all", "nothing"))
        for layer in range(layers if kind in ("full", "partly") else 0):
            number = int(size) if kind == "full" else rng.integers(0, int(size), endpoint=True)
            np.add.at(counts[layer, :, worker], rng.integers(0, experts, number), 1)
        if kind == "all":
            counts[:, :, worker] = 1
    return Case(counts, slots, node, allocation)


@given(cases())
def test_the_guarantee_holds_and_every_slot_is_used(case: Case) -> None:
    placed = case.repaired()
    if placed is None:
        crowded = (case.counts.sum(axis=1) > case.room.slots).any(axis=0)
        assert not case.counts[:, :, ~crowded].any(), "there was something to keep"
        return
    assert (placed.sum(axis=1) == case.room.slots).all()
    assert ((by_node(placed, case.node) > 0).sum(axis=2) >= case.threshold).all()


@given(cases())
def test_only_replicas_that_make_room_for_the_guarantee_are_evicted(case: Case) -> None:
    placed = case.repaired()
    if placed is None:
        return
    kept = case.counts.copy()
    kept[:, :, (case.counts.sum(axis=1) > case.room.slots).any(axis=0)] = 0
    missing = np.maximum(case.threshold - (by_node(kept, case.node) > 0).sum(axis=2), 0).sum(axis=1)
    evicted = np.maximum(kept - placed, 0).sum(axis=(1, 2))
    # Each missing host evicts at most one replica in the end: an expert that makes room for another is placed
    # elsewhere.
    assert (np.maximum(kept.sum(axis=2) - placed.sum(axis=2), 0).sum(axis=1) <= missing).all()
    assert (evicted[missing == 0] == 0).all()


@pytest.mark.parametrize(("experts", "slots", "nodes"), [(6, 4, 4), (8, 6, 5), (16, 6, 10)])
def test_the_loss_of_a_node_causes_at_most_as_many_copies_as_it_held(experts: int, slots: int, nodes: int) -> None:
    """Only copies of experts with too few hosts move, unless every slot is needed."""
    layers, f = 2, 2
    rng = np.random.default_rng(experts)
    loads = rng.pareto(1.2, (layers, experts)) * 1000 + 1
    whole = allocate(loads, np.full(nodes, slots), fault_threshold=f)
    assert isinstance(whole, Allocation)
    empty = np.zeros((layers, experts, nodes), dtype=np.int64)
    empty[:, 0, 0] = 1  # Repair needs at least one replica to keep.
    node = np.arange(nodes)
    before = Case(empty, np.full(nodes, slots), node, whole).repaired()
    assert before is not None
    for lost in range(nodes):
        left = np.delete(before, lost, axis=2)
        rest = allocate(loads, np.full(nodes - 1, slots), fault_threshold=f)
        assert isinstance(rest, Allocation)
        placed = Case(left, np.full(nodes - 1, slots), node[:-1], rest).repaired()
        assert placed is not None
        moved = int(((placed > 0) & (left == 0)).sum())
        short = int(np.maximum(rest.fault_threshold.given - (left > 0).sum(axis=2), 0).sum())
        tight = experts * rest.fault_threshold.given == slots * (nodes - 1)  # Then no slot can be spared.
        assert short <= moved <= (2 if tight else 1) * short
        assert moved <= layers * slots


def test_a_joining_node_gets_the_loaded_experts_and_no_other_replica_moves() -> None:
    loads = np.array([[80.0, 10.0, 10.0]])
    slots, node = np.array([3, 3, 3]), np.arange(3)
    counts = np.zeros((1, 3, 3), dtype=np.int64)
    counts[0, :, :2] = 1
    allocation = allocate(loads, slots, fault_threshold=2)
    assert isinstance(allocation, Allocation)
    placed = Case(counts, slots, node, allocation).repaired()
    assert placed is not None
    assert (placed[:, :, :2] == counts[:, :, :2]).all()
    assert placed[0, :, 2].tolist() == [3, 0, 0]


def test_a_chain_of_moves_is_found_if_no_slot_is_spare() -> None:
    """Expert 2 is on one node. The other nodes hold only experts that need both hosts, so one of those experts moves
    on.
    """
    slots, node = np.array([2, 2, 2]), np.arange(3)
    counts = np.zeros((1, 3, 3), dtype=np.int64)
    for expert, place in ((0, 0), (0, 1), (1, 0), (1, 1), (2, 2), (2, 2)):
        counts[0, expert, place] += 1
    allocation = allocate(np.ones((1, 3)), slots, fault_threshold=2)
    assert isinstance(allocation, Allocation)
    placed = Case(counts, slots, node, allocation).repaired()
    assert placed is not None
    assert ((placed > 0).sum(axis=2) == 2).all()
    assert int(np.maximum(placed - counts, 0).sum()) == 2


def test_copies_go_to_racks_that_have_none_where_there_is_a_choice() -> None:
    slots, node, racks = np.full(4, 2), np.arange(4), np.array([0, 0, 1, 1])
    counts = np.zeros((1, 2, 4), dtype=np.int64)
    counts[0, 0, :2] = 1
    counts[0, 1, [0, 2]] = 1
    counts[0, 1, 3] = 2
    counts[0, 1, 2] = 2
    room = WorkerRoom(slots=make_worker_room(slots, node).slots, node=node, racks=racks)
    held = as_replicas(counts)
    found = keep_and_repair(held, np.array([[4, 4]]), room, 3)
    assert found is not None
    placed = after(held, found, counts.shape)
    assert (placed[0, 0] > 0).sum() == 3
    assert (placed[0, 0, 2:] > 0).any()


@pytest.mark.parametrize("workers", [1, 2, 3, 8])
def test_workers_share_the_room_of_their_node(workers: int) -> None:
    node = np.array(list(itertools.chain.from_iterable(itertools.repeat(range(3), workers))))
    room = make_worker_room(np.array([6, 7, 1]), node)
    for number, slots in enumerate((6, 7, 1)):
        mine = room.slots[node == number]
        assert mine.sum() == slots
        assert mine.max() - mine.min() <= 1
