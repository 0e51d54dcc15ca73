"""Migration of experts: weights and optimizer state go to the ranks that lack them, with checksums.

A migration has two parts. `stage_migration` receives the missing experts into new buffers and changes nothing, so it
can be abandoned at any moment. When all ranks have staged, `StagedMigration.apply` changes the placement locally and
cannot fail half-way. The caller makes sure that all ranks have staged. A sender may drop an expert only then, because
until then it may have the only copy.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec
import torch

from holdfast.errors import HoldfastError
from holdfast.planning import Transfers, plan_transfers
from holdfast.runtime.groups.communicator import Communicator
from holdfast.runtime.moe.expert_shards.shards import ExpertShards, LayerSpec, RowSpec
from holdfast.runtime.moe.hosts import Placement, count_replicas, experts_of_rank
from holdfast.runtime.state.memory import host_bytes
from holdfast.runtime.state.tree import dtype_of
from holdfast.runtime.tensors import to_int_rows

#: bytes that a rank sends in one all-to-all, approximately
WAVE_BYTES = 256 << 20
MAX_SPEC_BYTES = 16 << 20
#: Every piece starts at a multiple of this, so that it can be viewed in its own dtype.
_ALIGNMENT = 16

#: (layer, expert, source, destination)
Move = tuple[int, int, int, int]


class LostExpertsError(HoldfastError):
    """Experts without a live copy: only a checkpoint can restore them."""

    def __init__(self, lost: Sequence[tuple[int, int]]) -> None:
        """Name the lost experts, as (layer, expert)."""
        self.lost = tuple(lost)
        names = ", ".join(f"expert {expert} of MoE layer {layer}" for layer, expert in self.lost)
        super().__init__(f"no live copy is left of {names}")


class CorruptExpertError(HoldfastError):
    """An expert arrived with a wrong checksum."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StagedMigration:
    """All new experts of this rank, received and checked; nothing is changed yet."""

    shards: ExpertShards
    specs: tuple[LayerSpec, ...]
    #: this rank's new experts per layer
    wanted: tuple[tuple[int, ...], ...]
    #: new number of rows per layer; None to keep it
    rows: tuple[int, ...] | None
    #: per layer, received rows by (expert, name of the tensor)
    arrived: tuple[dict[tuple[int, str], torch.Tensor], ...]
    received_bytes: int

    def apply(self) -> None:
        """Add the received experts, drop the ones that moved to other ranks, and set the shared optimizer values."""
        for layer, (spec, experts) in enumerate(zip(self.specs, self.wanted, strict=True)):
            self.shards.set_optimizer_state(layer, spec)
            rows = None if self.rows is None else self.rows[layer]
            self.shards.rearrange(layer, experts, rows=rows, arrived=self.arrived[layer])


def plan_moves(held: Placement, wanted: Placement, experts: Sequence[int]) -> Transfers:
    """Plan which rank sends which experts, balanced over the owners.

    Args:
        held: experts of each rank of the new group; a joiner has none.
        wanted: experts that each rank will host.
        experts: number of experts of each layer.

    Raises:
        LostExpertsError: no rank has an expert that is wanted.
    """
    transfers, lost = plan_transfers(count_replicas(held, experts), count_replicas(wanted, experts))
    if lost:
        raise LostExpertsError(lost)
    return transfers


def stage_migration(
    comm: Communicator,
    shards: ExpertShards,
    *,
    held: Placement,
    wanted: Placement,
    transfers: Transfers,
    rows: Sequence[int] | None = None,
    wave_bytes: int = WAVE_BYTES,
) -> StagedMigration:
    """Receive all experts that this rank lacks into new buffers; all ranks must call it with the same plan.

    The ranks exchange descriptions first, then send in waves.

    Args:
        comm: the new group.
        shards: the experts of this rank.
        held, wanted: per layer and rank of the new group.
        transfers: from `plan_moves`; numbered as in the new group.
        rows: new number of rows per layer on this rank; None to keep it.
        wave_bytes: bytes that a rank sends in one collective.

    Raises:
        LostExpertsError: a rank would lack an expert; all ranks raise it.
        CorruptExpertError: a checksum is wrong.
        ValueError: this rank lacks experts of `held`, `rows` are too few, or the ranks' states are of different kinds.
        HaltedError, PeerLostError: abandoned. Nothing is changed.
    """
    moves = transfers.as_tuples()
    _check_moves(held, wanted, moves)
    expected = experts_of_rank(held, comm.rank)
    if any(set(need) - set(have) for need, have in zip(expected, shards.hosted, strict=True)):
        raise ValueError(f"experts {shards.hosted} live here, but the plan says {expected}")
    mine = experts_of_rank(wanted, comm.rank)
    if rows is not None and any(len(experts) > room for experts, room in zip(mine, rows, strict=True)):
        raise ValueError(f"experts {mine} do not fit into {tuple(rows)} rows")
    specs = _agree_on_specs(comm, shards, held)
    arrived: tuple[dict[tuple[int, str], torch.Tensor], ...] = tuple({} for _ in specs)
    received = 0
    for wave in _split_into_waves(moves, specs, wave_bytes):
        buffer, incoming = _send_wave(comm, shards, specs, wave)
        received += buffer.numel()
        _unpack(buffer, incoming, specs, arrived)
    return StagedMigration(
        shards=shards,
        specs=specs,
        wanted=mine,
        rows=None if rows is None else tuple(rows),
        arrived=arrived,
        received_bytes=received,
    )


def _check_moves(held: Placement, wanted: Placement, moves: Sequence[Move]) -> None:
    """Check that after the moves each rank has its wanted experts, and that each sender has the experts it sends.

    Raises:
        LostExpertsError: not so; it names the experts.
    """
    owned = {(layer, e, rank) for layer, ranks in enumerate(held) for rank, es in enumerate(ranks) for e in es}
    wrong = [(layer, expert) for layer, expert, source, _ in moves if (layer, expert, source) not in owned]
    owned |= {(layer, expert, to) for layer, expert, _, to in moves}
    needed = ((layer, e, rank) for layer, ranks in enumerate(wanted) for rank, es in enumerate(ranks) for e in es)
    wrong += [(layer, expert) for layer, expert, rank in needed if (layer, expert, rank) not in owned]
    if wrong:
        raise LostExpertsError(sorted(set(wrong)))


def _agree_on_specs(comm: Communicator, shards: ExpertShards, held: Placement) -> tuple[LayerSpec, ...]:
    """Return the specification of the ranks that hold experts: a joiner's optimizer has no state yet.

    All ranks compare size and checksum of theirs. Only if they differ, the specifications are sent.

    Raises:
        ValueError: on all ranks, if the holders have different kinds of state, or no rank holds an expert.
    """
    own = tuple(shards.describe(layer) for layer in range(len(shards.layers)))
    mine = msgspec.msgpack.encode(own)
    device = shards.layers[0].experts.device if shards.layers else torch.device("cpu")
    gathered = torch.empty(2 * comm.size, dtype=torch.int64, device=device)
    comm.wait(comm.start_all_gather(gathered, torch.tensor([len(mine), zlib.crc32(mine)], device=device)))
    reported = [(size, checksum) for size, checksum in to_int_rows(gathered.view(-1, 2))]
    holders = [rank for rank in range(comm.size) if any(ranks[rank] for ranks in held)]
    if len({reported[rank] for rank in holders}) > 1:
        raise ValueError(f"the ranks {holders} keep different kinds of state for their experts")
    if len(set(reported)) == 1:
        return own
    if not holders:
        raise ValueError("no rank holds an expert, and the ranks keep different kinds of state")
    return _gather_specs(comm, mine, [size for size, _ in reported], device)[holders[0]]


def _gather_specs(
    comm: Communicator, mine: bytes, sizes: Sequence[int], device: torch.device
) -> dict[int, tuple[LayerSpec, ...]]:
    """Return every rank's specification.

    Args:
        mine: this rank's, encoded.
        sizes: of all ranks' encoded ones, in bytes.

    Raises:
        ValueError: the largest has more than `MAX_SPEC_BYTES`.
    """
    longest = max(sizes)
    if longest > MAX_SPEC_BYTES:
        raise ValueError(f"the description of the experts has {longest} bytes: at most {MAX_SPEC_BYTES}")
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: len(mine)] = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
    gathered = torch.empty(comm.size * longest, dtype=torch.uint8, device=device)
    comm.wait(comm.start_all_gather(gathered, padded.to(device)))
    table = gathered.view(comm.size, longest).cpu()
    encoded = {rank: bytes(table[rank, :size].numpy()) for rank, size in enumerate(sizes)}
    return {rank: msgspec.msgpack.decode(text, type=tuple[LayerSpec, ...]) for rank, text in encoded.items()}


def _split_into_waves(moves: Sequence[Move], specs: Sequence[LayerSpec], most: int) -> Iterator[list[Move]]:
    """Yield the moves, in order, in waves: in each, a rank sends and receives at most `most` bytes.

    A single move that is larger is a wave of its own.
    """
    wave: list[Move] = []
    load: dict[tuple[str, int], int] = {}
    for move in moves:
        size = _parcel_size(specs[move[0]])
        ends = (("out", move[2]), ("in", move[3]))
        if wave and any(load.get(end, 0) + size > most for end in ends):
            yield wave
            wave, load = [], {}
        wave.append(move)
        for end in ends:
            load[end] = load.get(end, 0) + size
    if wave:
        yield wave


def _send_wave(
    comm: Communicator, shards: ExpertShards, specs: Sequence[LayerSpec], wave: Sequence[Move]
) -> tuple[torch.Tensor, list[Move]]:
    """Send and receive the experts of a wave by one all-to-all.

    Returns:
        The received bytes, and the moves to this rank in their order, by sender.
    """
    device = shards.layers[0].experts.device
    outgoing = sorted((m for m in wave if m[2] == comm.rank), key=lambda m: m[3])
    incoming = sorted((m for m in wave if m[3] == comm.rank), key=lambda m: m[2])
    send_splits, receive_splits = [0] * comm.size, [0] * comm.size
    for move in outgoing:
        send_splits[move[3]] += _parcel_size(specs[move[0]])
    for move in incoming:
        receive_splits[move[2]] += _parcel_size(specs[move[0]])
    sent = torch.empty(sum(send_splits), dtype=torch.uint8, device=device)
    offset = 0
    for layer, expert, _, _ in outgoing:
        offset = _pack(sent, offset, shards, layer, expert, specs[layer])
    buffer = torch.empty(sum(receive_splits), dtype=torch.uint8, device=device)
    comm.wait(comm.start_all_to_all(buffer, sent, receive_splits, send_splits))
    return buffer, incoming


def _pack(buffer: torch.Tensor, offset: int, shards: ExpertShards, layer: int, expert: int, spec: LayerSpec) -> int:
    """Write one expert's rows and their checksum at `offset`, padded to alignment; return the next expert's offset."""
    start = offset
    for row in spec.rows:
        data = shards.row(layer, expert, row).reshape(-1).view(torch.uint8)
        end = offset + _align(row.nbytes)
        buffer[offset : offset + row.nbytes].copy_(data)
        buffer[offset + row.nbytes : end].zero_()
        offset = end
    checksum = torch.tensor([_checksum(buffer[start:offset], layer, expert)], dtype=torch.int64).view(torch.uint8)
    buffer[offset : offset + checksum.numel()].copy_(checksum)
    buffer[offset + checksum.numel() : offset + _ALIGNMENT].zero_()
    return offset + _ALIGNMENT


def _unpack(
    buffer: torch.Tensor,
    moves: Sequence[Move],
    specs: Sequence[LayerSpec],
    arrived: Sequence[dict[tuple[int, str], torch.Tensor]],
) -> None:
    """Check the received experts, and record views of their rows.

    Args:
        buffer: from `_send_wave`.
        arrived: per layer, gets the rows by (expert, name of the tensor).

    Raises:
        CorruptExpertError: a checksum is wrong.
    """
    offset = 0
    for layer, expert, source, _ in moves:
        end = offset + _parcel_size(specs[layer]) - _ALIGNMENT
        expected = int(buffer[end : end + 8].cpu().view(torch.int64))
        if expected != _checksum(buffer[offset:end], layer, expert):
            raise CorruptExpertError(f"expert {expert} of MoE layer {layer} from rank {source} has a wrong checksum")
        for row in specs[layer].rows:
            arrived[layer][expert, row.name] = _view_row(buffer[offset : offset + row.nbytes], row)
            offset += _align(row.nbytes)
        offset = end + _ALIGNMENT


def _view_row(data: torch.Tensor, row: RowSpec) -> torch.Tensor:
    return data.view(dtype_of(row.dtype)).view(row.shape)


def _checksum(data: torch.Tensor, layer: int, expert: int) -> int:
    # The checksum includes the names, so that another expert's bytes are detected, too.
    return zlib.crc32(host_bytes(data), zlib.crc32(f"{layer}/{expert}".encode()))


def _parcel_size(spec: LayerSpec) -> int:
    return sum(_align(row.nbytes) for row in spec.rows) + _ALIGNMENT


def _align(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
