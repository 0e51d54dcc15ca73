"""Classic expert parallelism, as a baseline: equal chunks of experts, full replicas of all of them, idle spare nodes.

The experts are cut into P equal chunks (P is the EP size). Each worker holds one chunk, and P workers together hold one
replica of all experts. So the world is a multiple of P, each chunk has world / P hosts whatever its load, and workers
beyond the largest multiple wait (Lazarus 6.1, as DeepSpeed's MoE does). One worker per node.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from holdfast.coordination.experts.blobs import decode_experts, encode_experts
from holdfast.planning import Shortage, plan_transfers
from holdfast.planning.arrays import IntArray
from holdfast.protocol.names import node_of
from holdfast.protocol.plan import ExpertPlan, ExpertShape


def choose_ep_size(shape: ExpertShape | None, asked: int) -> int | Shortage:
    """Return P, the number of chunks into which the experts are divided.

    It is the requested one, else the smallest divisor with chunks that fit a node's slots. For a dense model it is the
    requested one, else 1.

    Args:
        shape: the experts, or None for a dense model
        asked: the requested P, or 0

    Returns:
        P, or a `Shortage` if a requested P does not divide the experts, or its chunks do not fit.
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


def count_usable(workers: int, ep_size: int) -> int:
    """Return how many of these workers can train: the largest multiple of the EP size."""
    return workers // ep_size * ep_size


def assign_chunks(
    workers: Sequence[str], held: Mapping[str, bytes], shape: ExpertShape | None, ep_size: int
) -> dict[str, int]:
    """Choose the members, and the chunk of each: every chunk equally often, with as few moves as possible.

    Each chunk that some worker holds gets a member that holds it, so a waiting worker never has the only live copy.

    Args:
        workers: at least P workers, in order of preference
        held: the experts that each worker holds now, as a blob; a missing worker holds none
        shape: the experts, or None for a dense model
        ep_size: P, the number of chunks into which the experts are divided

    Returns:
        Worker -> chunk, for as many workers as the largest multiple of P.
    """
    quota = len(workers) // ep_size
    taken: dict[str, int] = {}
    holders: list[list[str]] = [[] for _ in range(ep_size)]
    if shape is not None:
        for worker in workers:
            counts = decode_experts(held.get(worker, b""), shape)
            for chunk, owners in enumerate(holders):
                if (counts[:, _expert_range(shape, ep_size, chunk)] > 0).all():
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
    """Return the placement: each worker's chunk, the same in all layers.

    Args:
        shape: the experts
        workers: the members, in rank order
        held: the experts that each worker holds now, as a blob; a missing worker holds none
        chunks: the chunk of each worker (`assign_chunks`)
        asked: The number of nodes that should hold each expert (f). The plan records it, and the number that is given:
            at most the fewest nodes with the same chunk.
    """
    ep_size = max(chunks.values()) + 1
    placed: IntArray = np.zeros((shape.layers, shape.experts, len(workers)), dtype=np.int64)
    for rank, worker in enumerate(workers):
        placed[:, _expert_range(shape, ep_size, chunks[worker]), rank] = 1
    now = np.stack([decode_experts(held.get(worker, b""), shape) for worker in workers], axis=2)
    moves, _ = plan_transfers(now, placed)
    hosts = [len({node_of(worker) for worker in workers if chunks[worker] == chunk}) for chunk in range(ep_size)]
    return ExpertPlan(
        layers=shape.layers,
        experts=shape.experts,
        placement=tuple(encode_experts(placed[:, :, rank]) for rank in range(len(workers))),
        held=tuple(held.get(worker, b"") for worker in workers),
        moves=len(moves) if now.any() else 0,
        asked=asked,
        given=min(asked, *hosts),
    )


def _expert_range(shape: ExpertShape, ep_size: int, chunk: int) -> slice:
    """Return the experts of a chunk."""
    size = shape.experts // ep_size
    return slice(chunk * size, (chunk + 1) * size)
