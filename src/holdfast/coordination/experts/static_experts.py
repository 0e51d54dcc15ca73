"""Classic expert parallelism, as a baseline: equal chunks of experts, whole replicas of all of them, spare nodes idle.

The experts are cut into P equal chunks (P: the EP size); a worker holds one chunk, and P workers together one replica
of all experts. So the world is a multiple of P, each chunk has world / P hosts whatever its load, and workers beyond
the largest multiple wait (Lazarus 6.1, what DeepSpeed's MoE does). One worker per node.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from holdfast.coordination.experts.blobs import decode, encode
from holdfast.planning import Shortage, plan_transfers
from holdfast.planning.arrays import IntArray
from holdfast.protocol.names import node_of
from holdfast.protocol.plan import ExpertPlan, ExpertShape


def ep_size_of(shape: ExpertShape | None, asked: int) -> int | Shortage:
    """Return P: as asked, else the least that fits a node's slots; 1 for a dense model for which none is asked.

    Returns:
        P, or why the experts cannot be divided so.
    """
    if shape is None:
        return asked or 1
    sizes = [p for p in range(1, shape.experts + 1) if shape.experts % p == 0 and shape.experts // p <= shape.slots]
    if not asked:
        return sizes[0]
    if asked in sizes:
        return asked
    return Shortage(
        reason=f"an EP size of {asked} does not divide {shape.experts} experts over nodes of {shape.slots} slots",
        remedy=f"give --ep-size {' or '.join(map(str, sizes))}",
    )


def usable(workers: int, ep_size: int) -> int:
    """Return how many of so many workers can train: the largest multiple of the EP size."""
    return workers // ep_size * ep_size


def seats(workers: Sequence[str], held: Mapping[str, bytes], shape: ExpertShape | None, ep_size: int) -> dict[str, int]:
    """Choose the members, and the chunk of each: every chunk equally often, and as few chunks moved as can be.

    A chunk that somebody holds is held by a member: no live copy is left among those who wait.

    Args:
        workers: at least P, in order of preference. held: what each holds now, as blobs.

    Returns:
        Worker -> chunk.
    """
    quota = len(workers) // ep_size
    taken: dict[str, int] = {}
    holders: list[list[str]] = [[] for _ in range(ep_size)]
    if shape is not None:
        for worker in workers:
            counts = decode(held.get(worker, b""), shape)
            for chunk, owners in enumerate(holders):
                if (counts[:, _columns(shape, ep_size, chunk)] > 0).all():
                    owners.append(worker)
    # The rarest chunk chooses first: its only holder must not be given to another, or left out.
    for chunk in sorted(range(ep_size), key=lambda chunk: len(holders[chunk])):
        free = [worker for worker in holders[chunk] if worker not in taken]
        taken.update(dict.fromkeys(free[:quota], chunk))
    room = {chunk: quota - sum(mine == chunk for mine in taken.values()) for chunk in range(ep_size)}
    for worker in workers:
        chunk = max(room, key=lambda chunk: room[chunk])
        if worker not in taken and room[chunk]:
            taken[worker] = chunk
            room[chunk] -= 1
    return taken


def place_static(
    shape: ExpertShape, workers: Sequence[str], held: Mapping[str, bytes], chunks: Mapping[str, int], *, asked: int
) -> ExpertPlan:
    """Return the placement: each worker's chunk, in all layers alike.

    Args:
        workers: the members in rank order. chunks: the chunk of each (`seats`). asked: f, for the record: what is given
            is world / P, be it less.
    """
    ep_size = max(chunks.values()) + 1
    placed: IntArray = np.zeros((shape.layers, shape.experts, len(workers)), dtype=np.int64)
    for rank, worker in enumerate(workers):
        placed[:, _columns(shape, ep_size, chunks[worker]), rank] = 1
    now = np.stack([decode(held.get(worker, b""), shape) for worker in workers], axis=2)
    moves, _ = plan_transfers(now, placed)
    hosts = [len({node_of(worker) for worker in workers if chunks[worker] == chunk}) for chunk in range(ep_size)]
    return ExpertPlan(
        layers=shape.layers,
        experts=shape.experts,
        placement=tuple(encode(placed[:, :, rank]) for rank in range(len(workers))),
        held=tuple(held.get(worker, b"") for worker in workers),
        moves=len(moves) if now.any() else 0,
        asked=asked,
        given=min(asked, *hosts),
    )


def _columns(shape: ExpertShape, ep_size: int, chunk: int) -> slice:
    size = shape.experts // ep_size
    return slice(chunk * size, (chunk + 1) * size)
