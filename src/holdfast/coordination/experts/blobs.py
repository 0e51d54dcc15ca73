"""Encodes the experts of workers for the wire: one blob each, for all workers at once.

Shape letters: L layers, E experts per layer, W workers. A blob contains a worker's slots layer by layer: little-endian
16-bit expert numbers, ascending, repeats allowed, each layer ended by 0xFFFF.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from holdfast.planning.arrays import IntArray, indices
from holdfast.planning.placement.keeping.repair import Replicas
from holdfast.protocol.messages.worker import Report
from holdfast.protocol.plan import ExpertShape

_ID = np.dtype("<u2")
#: the number that ends each layer
_END = 0xFFFF


def encode_experts(counts: IntArray) -> bytes:
    """Return the blob of one worker from its number of replicas of each expert `(L, E)`."""
    layers, experts = counts.shape
    cells = np.repeat(indices(counts.size), counts.ravel())
    mine = Replicas(layer=cells // experts, expert=cells % experts, worker=np.zeros_like(cells))
    return encode_replicas(mine, layers, 1)[0]


def decode_experts(blob: bytes, shape: ExpertShape) -> IntArray:
    """Return a worker's replicas per expert `(L, E)`; the empty blob holds nothing.

    Raises:
        ValueError: The blob does not fit the shape.
    """
    slots = _parse_blob(blob, shape)
    layer = np.cumsum(slots == _END)
    cells = (layer * shape.experts + slots)[slots != _END]
    return np.bincount(cells, minlength=shape.layers * shape.experts).reshape(shape.layers, shape.experts)


def decode_replicas(blobs: Sequence[bytes], shape: ExpertShape) -> Replicas:
    """Return the replicas of all these workers, the first of them as worker 0.

    Raises:
        ValueError: A blob does not fit the shape.
    """
    parts = [_parse_blob(blob, shape) for blob in blobs]
    slots = np.concatenate([*parts, np.empty(0, dtype=np.int64)])
    worker = np.repeat(indices(len(parts)), [part.size for part in parts])
    is_end = slots == _END
    # Each blob that is not empty has one end for each layer.
    layer = (np.cumsum(is_end) - is_end) % shape.layers
    return Replicas(layer=layer[~is_end], expert=slots[~is_end], worker=worker[~is_end])


def encode_replicas(replicas: Replicas, layers: int, workers: int) -> list[bytes]:
    """Return the blobs of workers 0 to `workers` - 1, in which these replicas are listed by layer and expert.

    Args:
        layers: the number of layers, also of those without replicas.
    """
    rows = workers * layers
    keys = (replicas.worker * layers + replicas.layer) * (_END + 1)
    keys = np.sort(np.concatenate((keys + replicas.expert, indices(rows) * (_END + 1) + _END)))
    data = (keys & _END).astype(_ID).tobytes()
    sizes = layers + np.bincount(replicas.worker, minlength=workers)
    ends = np.cumsum(sizes) * _ID.itemsize
    return [data[end - size * _ID.itemsize : end] for end, size in zip(ends.tolist(), sizes.tolist(), strict=True)]


def explain_unreadable(report: Report, shape: ExpertShape | None) -> str:
    """Return why a report's experts do not fit the job, or "" if they do, or the job has none."""
    try:
        for blob in (report.state.experts, report.result.experts if report.result is not None else b""):
            if shape is not None:
                _parse_blob(blob, shape)
    except ValueError as error:
        return str(error)
    return ""


def encode_all_experts(shape: ExpertShape) -> bytes:
    """Return the blob of a worker that holds every expert once."""
    return encode_experts(np.ones((shape.layers, shape.experts), dtype=np.int64))


def experts_by_layer(blob: bytes, shape: ExpertShape) -> tuple[tuple[int, ...], ...]:
    """Return a worker's experts layer by layer, ascending; an expert with several replicas is repeated."""
    counts = decode_experts(blob, shape)
    return tuple(tuple(int(e) for e in np.repeat(indices(shape.experts), row)) for row in counts)


def find_lost_experts(shape: ExpertShape, held: Sequence[bytes]) -> list[tuple[int, int]]:
    """Return the (layer, expert) pairs that none of these workers holds."""
    replicas = decode_replicas(held, shape)
    live = np.bincount(replicas.layer * shape.experts + replicas.expert, minlength=shape.layers * shape.experts)
    return [divmod(int(cell), shape.experts) for cell in np.flatnonzero(live == 0)]


def count_fewest_nodes(shape: ExpertShape, held: Sequence[tuple[str, bytes]]) -> int:
    """Return on how many nodes the expert with the fewest lives; 0 without workers.

    Args:
        held: for each worker its node and its blob.
    """
    by_node: dict[str, IntArray] = {}
    for node, blob in held:
        by_node[node] = by_node.get(node, 0) + decode_experts(blob, shape)
    living = [(counts > 0).astype(np.int64) for counts in by_node.values()]
    return int(np.sum(living, axis=0).min()) if living else 0


def _parse_blob(blob: bytes, shape: ExpertShape) -> IntArray:
    """Return the numbers in a blob, the ends of layers included; none for an empty blob.

    Raises:
        ValueError: The blob does not fit the shape.
    """
    slots = np.frombuffer(blob, dtype=_ID).astype(np.int64)
    ends = np.flatnonzero(slots == _END)
    fits = ends.size == shape.layers and int(ends[-1]) == slots.size - 1
    if slots.size and (not fits or (slots[slots != _END] >= shape.experts).any()):
        raise ValueError(f"{len(blob)} bytes do not name experts below {shape.experts} in {shape.layers} layers")
    return slots
