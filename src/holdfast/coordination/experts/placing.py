"""Where the experts live from generation to generation: at once by keeping what is held, at leisure by a search.

Shape letters: L layers, E experts per layer, N nodes, W workers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from holdfast.coordination.experts.blobs import blobs_of, decode, encode, fewest_nodes, replicas_of
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
from holdfast.planning.placement.keeping.repair import Replicas, repair, room_of
from holdfast.protocol.names import index_of, node_and_index_of, node_of
from holdfast.protocol.plan import LOADS_WINDOW, ExpertPlan, ExpertShape, GenerationPlan

_TOKENS = np.dtype("<f8")


class PlacementQuestion(msgspec.Struct, frozen=True, kw_only=True):
    """All that a placement depends on. It shares nothing with the job: it can be answered anywhere, and at any time.

    `workers`: in rank order; `held`: what each holds now. `slots`: room per layer on each node, in the order of the
    nodes' first workers; `racks`: of each node, as 0, 1, ..., None where no two share one, or all do.
    `failure_rates`: of each node, None where all are alike. `loads`: of `loads_blob`. `fault_threshold`: f, on how many
    distinct nodes each expert is wanted. `window`: over about so many steps the workers are to take the loads from now
    on.
    """

    shape: ExpertShape
    workers: tuple[str, ...]
    held: tuple[bytes, ...]
    slots: tuple[int, ...]
    fault_threshold: int
    strategy: str
    loads: bytes = b""
    racks: tuple[int, ...] | None = None
    failure_rates: tuple[float, ...] | None = None
    window: int = LOADS_WINDOW

    @property
    def tokens(self) -> FloatArray:
        """Tokens per step, layer and expert `(L, E)`; ones where they are not known."""
        cells = self.shape.layers, self.shape.experts
        return np.frombuffer(self.loads, dtype=_TOKENS).reshape(cells) if self.loads else np.ones(cells)

    @property
    def home(self) -> IntArray:
        """The number of each worker's node `(W,)`, nodes numbered in the order of their first workers."""
        number: dict[str, int] = {}
        return np.array([number.setdefault(node_of(worker), len(number)) for worker in self.workers], dtype=np.int64)

    @property
    def room(self) -> IntArray:
        """Slots per layer of each node `(N,)`."""
        return as_slots(self.slots, len(self.slots))

    @property
    def rack(self) -> IntArray | None:
        """Each node's rack `(N,)`."""
        return None if self.racks is None else np.array(self.racks, dtype=np.int64)

    @property
    def rates(self) -> FloatArray | None:
        """How often each node fails `(N,)`."""
        return None if self.failure_rates is None else np.array(self.failure_rates, dtype=np.float64)


def loads_blob(tokens: FloatArray | None) -> bytes:
    """Return tokens per step, layer and expert `(L, E)` as a question has them; None: not known."""
    return b"" if tokens is None else tokens.astype(_TOKENS).tobytes()


def counts_by_node(workers: Sequence[str], blobs: Sequence[bytes], shape: ExpertShape) -> IntArray:
    """Return replicas per layer, expert and node `(L, E, N)`, nodes in the order of their first workers."""
    number: dict[str, int] = {}
    home = np.array([number.setdefault(node_of(worker), len(number)) for worker in workers], dtype=np.int64)
    return _by_node(replicas_of(blobs, shape), home, shape)


def _by_node(replicas: Replicas, home: IntArray, shape: ExpertShape) -> IntArray:
    nodes = int(home.max()) + 1
    cells = (replicas.layer * shape.experts + replicas.expert) * nodes + home[replicas.worker]
    size = shape.layers, shape.experts, nodes
    return np.bincount(cells, minlength=shape.layers * shape.experts * nodes).reshape(size)


def as_before(question: PlacementQuestion, plan: GenerationPlan | None, takes: Mapping[str, str]) -> ExpertPlan | None:
    """Give whoever takes another's place, now or once that has gone, its experts, one to one.

    Args:
        takes: the nodes that take others' places, with those.

    Returns:
        None where nobody does, where others have not what the plan says, or where each expert would live on fewer nodes
        than it could.
    """
    before, shape = plan.expert_plan if plan is not None else None, question.shape
    if before is None or plan is None or not takes:
        return None
    known = {
        node_and_index_of(worker): (worker, blob) for worker, blob in zip(plan.workers, before.placement, strict=True)
    }
    placement, filled, moves = list[bytes](), set[str](), 0
    for worker, held in zip(question.workers, question.held, strict=True):
        taken = takes.get(node_of(worker))
        seat = node_and_index_of(worker) if taken is None else f"{taken}/{index_of(worker)}"
        other, placed = known.get(seat, ("", b""))
        if not other or (taken is None and (worker != other or held != placed)):
            return None
        moves += int(((decode(placed, shape) > 0) & (decode(held, shape) == 0)).sum())
        filled.add(seat)
        placement.append(placed)
    if filled != {seat for seat, (worker, _) in known.items() if node_of(worker) not in takes}:
        return None
    nodes = list(map(node_of, question.workers))
    if fewest_nodes(shape, list(zip(nodes, placement, strict=True))) < before.given:
        return None
    if len(nodes) > len(plan.workers) and before.given < before.asked:
        return None  # (with another node there is room for more copies)
    return msgspec.structs.replace(
        before, placement=tuple(placement), held=question.held, moves=moves, repaired=False, beside=False
    )


def keep(question: PlacementQuestion) -> ExpertPlan | Shortage | None:
    """Place the experts without any search: what is held stays, and what the guarantee of f lacks is mended.

    Returns:
        The plan; why there is none: fewer slots than experts; or None where there is nothing to keep.
    """
    shape = question.shape
    allocation = allocate(question.tokens, question.room, fault_threshold=question.fault_threshold)
    if isinstance(allocation, Shortage):
        return allocation
    held, threshold = replicas_of(question.held, shape), allocation.fault_threshold
    found = repair(held, allocation.replicas, room_of(question.room, question.home, question.rack), threshold.given)
    if found is None:
        return None
    # Only the blobs of workers of which something changes are written anew.
    number = np.full(len(question.workers), -1, dtype=np.int64)
    touched = np.unique(np.concatenate((held.worker[~found.stays], found.added.worker)))
    number[touched] = indices(touched.size)
    before = held.only(number[held.worker] >= 0)
    after = held.only(found.stays & (number[held.worker] >= 0)).and_those(found.added)
    fresh = Replicas(layer=after.layer, expert=after.expert, worker=number[after.worker])
    placement = list(question.held)
    blobs = blobs_of(fresh, shape.layers, touched.size)
    for worker, blob in zip(touched.tolist(), blobs, strict=True):
        placement[worker] = blob
    return ExpertPlan(
        layers=shape.layers,
        experts=shape.experts,
        placement=tuple(placement),
        held=question.held,
        moves=np.setdiff1d(_cells(after, shape), _cells(before, shape)).size,
        asked=threshold.asked,
        given=threshold.given,
        window=question.window,
        repaired=True,
    )


def _cells(replicas: Replicas, shape: ExpertShape) -> IntArray:
    """Number who has which expert of which layer."""
    return (replicas.worker * shape.layers + replicas.layer) * shape.experts + replicas.expert


def place(question: PlacementQuestion) -> ExpertPlan | Shortage:
    """Place all experts by the strategy, such that few of them move, and spread each node's over its workers.

    Returns:
        The plan, or why there is none: fewer slots than experts.
    """
    shape, home = question.shape, question.home
    held = replicas_of(question.held, shape)
    plan = make_plan(
        question.tokens,
        question.room,
        fault_threshold=question.fault_threshold,
        strategy=strategy_named(question.strategy),
        held=_by_node(held, home, shape) if len(held) else None,
        racks=question.rack,
        failure_rates=question.rates,
    )
    if isinstance(plan, Shortage):
        return plan
    now = np.stack([decode(blob, shape) for blob in question.held], axis=2)
    # The split lists the workers node by node; ranks may be in another order.
    order = np.argsort(home, kind="stable")
    placed = np.empty_like(now)
    placed[:, :, order] = split_over_workers(plan.counts, np.bincount(home), held=now[:, :, order])
    moves, _ = plan_transfers(now, placed)
    return ExpertPlan(
        layers=shape.layers,
        experts=shape.experts,
        placement=tuple(encode(placed[:, :, rank]) for rank in range(len(question.workers))),
        held=question.held,
        moves=len(moves) if now.any() else 0,
        asked=plan.fault_threshold.asked,
        given=plan.fault_threshold.given,
        window=question.window,
    )
