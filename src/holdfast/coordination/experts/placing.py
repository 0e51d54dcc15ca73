"""Places experts from generation to generation: at once by keeping held replicas, or later by a search.

Shape letters: L layers, E experts per layer, N nodes, W workers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from holdfast.coordination.experts.blobs import (
    count_fewest_nodes,
    decode_experts,
    decode_replicas,
    encode_experts,
    encode_replicas,
)
from holdfast.planning import (
    Shortage,
    allocate,
    as_slots,
    make_plan,
    plan_transfers,
    split_over_workers,
    strategy_named,
)
from holdfast.planning.arrays import FloatArray, IntArray, indices
from holdfast.planning.placement.keeping.repair import Replicas, keep_and_repair, make_worker_room
from holdfast.protocol.names import index_of, node_and_index_of, node_of
from holdfast.protocol.plan import LOADS_WINDOW, ExpertPlan, ExpertShape, GenerationPlan

_TOKENS = np.dtype("<f8")


class PlacementQuestion(msgspec.Struct, frozen=True, kw_only=True):
    """All inputs of a placement. It shares nothing with the job, so it can be answered anywhere and at any time."""

    shape: ExpertShape
    #: in rank order
    workers: tuple[str, ...]
    #: the experts that each worker holds now, as blobs
    held: tuple[bytes, ...]
    #: slots per layer of each node, in the order of the nodes' first workers
    slots: tuple[int, ...]
    #: f: on how many distinct nodes each expert should live
    fault_threshold: int
    #: name of the placement strategy
    strategy: str
    #: result of `encode_loads`
    loads: bytes = b""
    #: rack of each node, as 0, 1, ...; None if all nodes share one, or no two do
    racks: tuple[int, ...] | None = None
    #: of each node; None if all are equal
    failure_rates: tuple[float, ...] | None = None
    #: number of steps over which workers average the loads
    window: int = LOADS_WINDOW

    @property
    def tokens(self) -> FloatArray:
        """Tokens per step, layer and expert `(L, E)`; ones if unknown."""
        cells = self.shape.layers, self.shape.experts
        return np.frombuffer(self.loads, dtype=_TOKENS).reshape(cells) if self.loads else np.ones(cells)

    @property
    def worker_nodes(self) -> IntArray:
        """The number of each worker's node `(W,)`, nodes numbered in the order of their first workers."""
        number: dict[str, int] = {}
        return np.array([number.setdefault(node_of(worker), len(number)) for worker in self.workers], dtype=np.int64)

    @property
    def node_slots(self) -> IntArray:
        """Slots per layer of each node `(N,)`."""
        return as_slots(self.slots, len(self.slots))

    @property
    def node_racks(self) -> IntArray | None:
        """Each node's rack `(N,)`."""
        return None if self.racks is None else np.array(self.racks, dtype=np.int64)

    @property
    def node_failure_rates(self) -> FloatArray | None:
        """Failure rate of each node `(N,)`."""
        return None if self.failure_rates is None else np.array(self.failure_rates, dtype=np.float64)


def encode_loads(tokens: FloatArray | None) -> bytes:
    """Return tokens per step, layer and expert `(L, E)` in the format of a question; None if unknown."""
    return b"" if tokens is None else tokens.astype(_TOKENS).tobytes()


def count_by_node(workers: Sequence[str], blobs: Sequence[bytes], shape: ExpertShape) -> IntArray:
    """Return replicas per layer, expert and node `(L, E, N)`, nodes in the order of their first workers."""
    number: dict[str, int] = {}
    home = np.array([number.setdefault(node_of(worker), len(number)) for worker in workers], dtype=np.int64)
    return _count_replicas_by_node(decode_replicas(blobs, shape), home, shape)


def _count_replicas_by_node(replicas: Replicas, home: IntArray, shape: ExpertShape) -> IntArray:
    """Return the number of replicas per layer, expert and node `(L, E, N)`.

    Args:
        home: the number of each worker's node `(W,)`.
    """
    nodes = int(home.max()) + 1
    cells = (replicas.layer * shape.experts + replicas.expert) * nodes + home[replicas.worker]
    size = shape.layers, shape.experts, nodes
    return np.bincount(cells, minlength=shape.layers * shape.experts * nodes).reshape(size)


def inherit_placement(
    question: PlacementQuestion, plan: GenerationPlan | None, takes: Mapping[str, str]
) -> ExpertPlan | None:
    """Return a placement in which each node that replaces another one gets exactly its experts, and all others stay.

    It may replace the other node now, or once that has left.

    Args:
        question: workers and held experts
        plan: the current plan
        takes: replacing nodes, with the nodes that they replace

    Returns:
        The plan, or None if no node replaces another, if a rank stays empty or a worker is new, if other workers do not
            hold the experts of their plan, or if an expert would live on fewer nodes than possible.
    """
    before, shape = plan.expert_plan if plan is not None else None, question.shape
    if before is None or plan is None or not takes:
        return None
    known = {
        node_and_index_of(worker): (worker, blob) for worker, blob in zip(plan.workers, before.placement, strict=True)
    }
    placement: list[bytes] = []
    filled: set[str] = set()
    moves = 0
    for worker, held in zip(question.workers, question.held, strict=True):
        taken = takes.get(node_of(worker))
        seat = node_and_index_of(worker) if taken is None else f"{taken}/{index_of(worker)}"
        other, placed = known.get(seat, ("", b""))
        if not other or (taken is None and (worker != other or held != placed)):
            return None
        moves += int(((decode_experts(placed, shape) > 0) & (decode_experts(held, shape) == 0)).sum())
        filled.add(seat)
        placement.append(placed)
    if filled != {seat for seat, (worker, _) in known.items() if node_of(worker) not in takes}:
        return None
    nodes = list(map(node_of, question.workers))
    if count_fewest_nodes(shape, list(zip(nodes, placement, strict=True))) < before.given:
        return None
    if len(nodes) > len(plan.workers) and before.given < before.asked:
        return None  # Another node has room for more copies.
    return msgspec.structs.replace(
        before, placement=tuple(placement), held=question.held, moves=moves, repaired=False, beside=False
    )


def keep_placement(question: PlacementQuestion) -> ExpertPlan | Shortage | None:
    """Place experts without a search: held replicas stay, and the replicas are added without which an expert would live
    on too few nodes (f).

    Every slot is used. Workers with more replicas than slots keep only replicas that they are assigned again.

    Returns:
        The plan; a `Shortage` if there are fewer slots than experts; or None if no held replica can be kept.
    """
    shape = question.shape
    allocation = allocate(question.tokens, question.node_slots, fault_threshold=question.fault_threshold)
    if isinstance(allocation, Shortage):
        return allocation
    held, threshold = decode_replicas(question.held, shape), allocation.fault_threshold
    found = keep_and_repair(
        held,
        allocation.replicas,
        make_worker_room(question.node_slots, question.worker_nodes, question.node_racks),
        threshold.given,
    )
    if found is None:
        return None
    # Only blobs of workers with changes are encoded again.
    number = np.full(len(question.workers), -1, dtype=np.int64)
    touched = np.unique(np.concatenate((held.worker[~found.stays], found.added.worker)))
    number[touched] = indices(touched.size)
    before = held.select(number[held.worker] >= 0)
    after = held.select(found.stays & (number[held.worker] >= 0)).concatenate(found.added)
    fresh = Replicas(layer=after.layer, expert=after.expert, worker=number[after.worker])
    placement = list(question.held)
    blobs = encode_replicas(fresh, shape.layers, touched.size)
    for worker, blob in zip(touched.tolist(), blobs, strict=True):
        placement[worker] = blob
    return ExpertPlan(
        layers=shape.layers,
        experts=shape.experts,
        placement=tuple(placement),
        held=question.held,
        moves=np.setdiff1d(_cell_numbers(after, shape), _cell_numbers(before, shape)).size,
        asked=threshold.asked,
        given=threshold.given,
        window=question.window,
        repaired=True,
    )


def _cell_numbers(replicas: Replicas, shape: ExpertShape) -> IntArray:
    """Return a number for each (worker, layer, expert) of the replicas."""
    return (replicas.worker * shape.layers + replicas.layer) * shape.experts + replicas.expert


def compute_placement(question: PlacementQuestion) -> ExpertPlan | Shortage:
    """Place all experts by the strategy, with few moves, and spread the experts of a node over its workers.

    Returns:
        The plan, or a `Shortage` if there are fewer slots than experts.
    """
    shape, home = question.shape, question.worker_nodes
    held = decode_replicas(question.held, shape)
    plan = make_plan(
        question.tokens,
        question.node_slots,
        fault_threshold=question.fault_threshold,
        strategy=strategy_named(question.strategy),
        held=_count_replicas_by_node(held, home, shape) if len(held) else None,
        racks=question.node_racks,
        failure_rates=question.node_failure_rates,
    )
    if isinstance(plan, Shortage):
        return plan
    now = np.stack([decode_experts(blob, shape) for blob in question.held], axis=2)
    # The split lists the workers node by node; ranks may be in another order.
    order = np.argsort(home, kind="stable")
    placed = np.empty_like(now)
    placed[:, :, order] = split_over_workers(plan.counts, np.bincount(home), held=now[:, :, order])
    moves, _ = plan_transfers(now, placed)
    return ExpertPlan(
        layers=shape.layers,
        experts=shape.experts,
        placement=tuple(encode_experts(placed[:, :, rank]) for rank in range(len(question.workers))),
        held=question.held,
        moves=len(moves) if now.any() else 0,
        asked=plan.fault_threshold.asked,
        given=plan.fault_threshold.given,
        window=question.window,
    )
