"""Check of the test mode: all copies of an expert are the same in every bit."""

from __future__ import annotations

import zlib

import torch

from holdfast.errors import HoldfastError
from holdfast.runtime.groups.communicator import Communicator
from holdfast.runtime.moe.expert_shards.shards import ExpertShards
from holdfast.runtime.state.memory import host_bytes
from holdfast.runtime.tensors import to_ints

_ABSENT = -1


class ReplicasDifferError(HoldfastError):
    """Two ranks hold different versions of one expert."""


def compute_checksums(shards: ExpertShards) -> dict[tuple[int, int], int]:
    """Return a checksum (CRC-32) of each (layer, expert) on this rank: weights and optimizer state."""
    found: dict[tuple[int, int], int] = {}
    for layer, experts in enumerate(shards.hosted):
        rows = shards.describe(layer).rows
        for expert in experts:
            value = 0
            for row in rows:
                value = zlib.crc32(host_bytes(shards.row(layer, expert, row)), value)
            found[layer, expert] = value
    return found


def verify_replicas(comm: Communicator, shards: ExpertShards) -> None:
    """Compare the checksums of all replicas of each expert; every rank must call it.

    Raises:
        ReplicasDifferError: on all ranks, naming the first expert that differs, and its hosts.
        HaltedError, PeerLostError: abandoned or failed.
    """
    mine = compute_checksums(shards)
    pairs = [(layer, expert) for layer, number in enumerate(shards.expert_counts) for expert in range(number)]
    own = torch.tensor([mine.get(pair, _ABSENT) for pair in pairs], dtype=torch.int64)
    device = shards.layers[0].experts.device if shards.layers else torch.device("cpu")
    gathered = torch.empty(comm.size * len(pairs), dtype=torch.int64, device=device)
    comm.wait(comm.start_all_gather(gathered, own.to(device)))
    table = gathered.view(comm.size, len(pairs)).cpu()
    for place, (layer, expert) in enumerate(pairs):
        versions = {rank: value for rank, value in enumerate(to_ints(table[:, place])) if value != _ABSENT}
        if len(set(versions.values())) > 1:
            raise ReplicasDifferError(f"expert {expert} of MoE layer {layer} differs between ranks: {versions}")
