"""Where the experts live from generation to generation: what survivors still hold, and the next placement.

Shape letters: L layers, E experts per layer, N nodes, W workers. On the wire a worker's experts are one blob: its slots
layer by layer, as little-endian 16-bit expert numbers, ascending, repeats allowed, each layer ended by 0xFFFF.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from holdfast.planning import (
    Shortage,
    as_slots,
    make_plan,
    plan_transfers,
    split_over_workers,
    strategy_named,
)
from holdfast.planning.arrays import FloatArray, IntArray, indices
from holdfast.protocol.messages.worker import Report
from holdfast.protocol.names import node_of
from holdfast.protocol.plan import LOADS_WINDOW, ExpertPlan, ExpertShape

_ID = np.dtype("<u2")
#: ends each layer
_END = 0xFFFF


def encode(counts: IntArray) -> bytes:
    """Return the blob of one worker's replicas per expert `(L, E)`."""
    numbers = indices(counts.shape[1]).astype(_ID)
    return b"".join(np.append(np.repeat(numbers, row), _END).astype(_ID).tobytes() for row in counts)


def decode(blob: bytes, shape: ExpertShape) -> IntArray:
    """Return a worker's replicas per expert `(L, E)`; the empty blob holds nothing.

    Raises:
        ValueError: the blob does not fit the shape.
    """
    counts = np.zeros((shape.layers, shape.experts), dtype=np.int64)
    slots = np.frombuffer(blob, dtype=_ID)
    ends = np.flatnonzero(slots == _END)
    fits = ends.size == shape.layers and int(ends[-1]) == slots.size - 1
    if slots.size and (not fits or (slots[slots != _END] >= shape.experts).any()):
        raise ValueError(f"{len(blob)} bytes do not name experts below {shape.experts} in {shape.layers} layers")
    for layer, row in enumerate(np.split(slots, ends + 1)[: shape.layers] if slots.size else ()):
        counts[layer] = np.bincount(row[:-1], minlength=shape.experts)
    return counts


def unreadable(report: Report, shape: ExpertShape | None) -> str:
    """Return why a report's experts are none of a job with these, "" where they are (or nobody looks at them)."""
    try:
        for blob in (report.state.experts, report.result.experts if report.result is not None else b""):
            if shape is not None:
                decode(blob, shape)
    except ValueError as error:
        return str(error)
    return ""


def everything(shape: ExpertShape) -> bytes:
    """Return the blob of a worker that holds every expert once."""
    return encode(np.ones((shape.layers, shape.experts), dtype=np.int64))


def experts_by_layer(blob: bytes, shape: ExpertShape) -> tuple[tuple[int, ...], ...]:
    """Return a worker's experts layer by layer, one entry per slot, ascending."""
    counts = decode(blob, shape)
    return tuple(tuple(int(e) for e in np.repeat(indices(shape.experts), row)) for row in counts)


def lost_experts(shape: ExpertShape, held: Sequence[bytes]) -> list[tuple[int, int]]:
    """Return the (layer, expert) pairs that none of these workers holds."""
    live = sum((decode(blob, shape) for blob in held), np.zeros((shape.layers, shape.experts), dtype=np.int64))
    return [(int(layer), int(expert)) for layer, expert in np.argwhere(live == 0)]


def counts_by_node(workers: Sequence[str], blobs: Sequence[bytes], shape: ExpertShape) -> IntArray:
    """Return replicas per layer, expert and node `(L, E, N)`, nodes in the order of their first workers."""
    nodes = list(dict.fromkeys(node_of(worker) for worker in workers))
    counts = np.zeros((shape.layers, shape.experts, len(nodes)), dtype=np.int64)
    for worker, blob in zip(workers, blobs, strict=True):
        counts[:, :, nodes.index(node_of(worker))] += decode(blob, shape)
    return counts


def place(
    shape: ExpertShape,
    workers: Sequence[str],
    held: Mapping[str, bytes],
    *,
    slots: Sequence[int],
    loads: FloatArray | None,
    fault_threshold: int,
    strategy: str,
    racks: Sequence[int] | None = None,
    window: int = LOADS_WINDOW,
) -> ExpertPlan | Shortage:
    """Place all experts on the workers' nodes such that few of them move, and spread each node's over its workers.

    Args:
        workers: in rank order. held: what each holds now; one that is missing holds nothing.
        slots: room per layer on each node, in the order of the nodes' first workers.
        loads: tokens per step, layer and expert `(L, E)`; None: uniform.
        fault_threshold: f, on how many distinct nodes each expert is wanted.
        racks: of each node, as 0, 1, ...; None where no two share one, or all do.
        window: over about so many steps the workers are to take the loads from now on.

    Returns:
        The plan, or why there is none: fewer slots than experts.
    """
    nodes = list(dict.fromkeys(node_of(worker) for worker in workers))
    by_node = [[rank for rank, worker in enumerate(workers) if node_of(worker) == node] for node in nodes]
    now = np.stack([decode(held.get(worker, b""), shape) for worker in workers], axis=2)
    held_by_node = np.stack([now[:, :, ranks].sum(axis=2) for ranks in by_node], axis=2)
    wanted = np.ones((shape.layers, shape.experts)) if loads is None else loads
    plan = make_plan(
        wanted,
        as_slots(slots, len(nodes)),
        fault_threshold=fault_threshold,
        strategy=strategy_named(strategy),
        held=held_by_node if held_by_node.any() else None,
        racks=None if racks is None else np.array(racks),
    )
    if isinstance(plan, Shortage):
        return plan
    dealt = split_over_workers(plan.counts, np.array([len(ranks) for ranks in by_node]))
    # The split lists the workers node by node; ranks may be in another order.
    order = np.argsort(np.concatenate([np.array(ranks) for ranks in by_node]))
    placed = dealt[:, :, order]
    moves, _ = plan_transfers(now, placed)
    return ExpertPlan(
        layers=shape.layers,
        experts=shape.experts,
        placement=tuple(encode(placed[:, :, rank]) for rank in range(len(workers))),
        held=tuple(held.get(worker, b"") for worker in workers),
        moves=len(moves) if now.any() else 0,
        asked=plan.fault_threshold.asked,
        given=plan.fault_threshold.given,
        window=window,
    )
