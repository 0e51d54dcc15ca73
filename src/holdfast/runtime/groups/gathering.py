"""Gathers bytes of every rank on every rank, for data that is not a sum.

Each rank's bytes are in a frame with its rank. Each group gathers the frames of its members. The owners, which all have
the same frames, then meet the owners of other groups one level higher. Members that own nothing get the frames at the
end, as with sums.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

import torch

from holdfast.runtime.groups.communicator import Communicator
from holdfast.runtime.tensors import to_ints

#: of all ranks together; no correct caller needs more
MAX_GATHERED_BYTES = 1 << 30
#: the rank, and the number of bytes that follow
_FRAME = struct.Struct("<QQ")


def gather_bytes(comm: Communicator, mine: bytes, what: str) -> list[bytes]:
    """Return the bytes that each rank gave, in rank order, equal on every rank. All ranks must call it. Waits.

    Args:
        mine: this rank's bytes; may be empty.
        what: the operation's name, for messages.

    Raises:
        HaltedError: the generation was halted meanwhile.
        PeerLostError: an operation failed.
        ValueError: the bytes of all ranks exceed MAX_GATHERED_BYTES, or not exactly one frame of each rank arrived.
    """
    frames_so_far = _FRAME.pack(comm.rank, len(mine)) + mine
    for group in comm.groups:
        frames_so_far = _gather_level(group, frames_so_far, what)
    for level in range(len(comm.groups) - 1, -1, -1):
        group, owners = comm.groups[level], comm.owners[level]
        if group.size > owners:
            frames_so_far = _send_to_non_owners(group, owners, frames_so_far, what)
    frames = dict(_iter_frames(frames_so_far))
    if sorted(frames) != list(range(comm.size)):
        raise ValueError(f"{what}: got bytes of ranks {sorted(frames)} in a world of {comm.size}")
    return [frames[rank] for rank in range(comm.size)]


def _gather_level(group: Communicator, mine: bytes, what: str) -> bytes:
    """Gather the frames of all members of a group by two all-gathers, first their sizes. Return all frames, joined in
    the members' order. All members must call it. Waits.

    Args:
        mine: this member's frames.
        what: the operation's name, for messages.

    Raises:
        HaltedError, PeerLostError: see `Communicator.wait`.
        ValueError: all frames together exceed `MAX_GATHERED_BYTES`.
    """
    sizes = torch.empty(group.size, dtype=torch.int64, device=group.device)
    pending = group.start_all_gather(sizes, torch.tensor([len(mine)], dtype=torch.int64, device=group.device))
    pending.what = what
    group.wait(pending)
    lengths = _check_sizes(to_ints(sizes), what)
    room = max(lengths)
    parts = torch.empty(group.size * room, dtype=torch.uint8, device=group.device)
    pending = group.start_all_gather(parts, _tensor(mine.ljust(room, b"\0"), group))
    pending.what = what
    group.wait(pending)
    whole = _bytes(parts)
    return b"".join(whole[place * room : place * room + length] for place, length in enumerate(lengths))


def _send_to_non_owners(group: Communicator, owners: int, known: bytes, what: str) -> bytes:
    """Return `known` of the group's rank 0: it is sent to the ranks from `owners` on, and the others have it already.
    All ranks of the group call it; it waits for the end.

    Raises:
        ValueError: the size that was received is negative, or over `MAX_GATHERED_BYTES`.
    """
    receives = group.rank >= owners
    sends = group.rank == 0
    length = torch.zeros(int(receives), dtype=torch.int64, device=group.device)
    mine = torch.tensor([len(known)] * (group.size - owners) * sends, dtype=torch.int64, device=group.device)
    _send(group, owners, length, mine, int(sends), what)
    (size,) = _check_sizes(to_ints(length), what) if receives else (len(known),)
    received = torch.empty(size * receives, dtype=torch.uint8, device=group.device)
    _send(group, owners, received, _tensor(known * (group.size - owners) * sends, group), size * sends, what)
    return _bytes(received) if receives else known


def _send(group: Communicator, owners: int, output: torch.Tensor, mine: torch.Tensor, each: int, what: str) -> None:
    """Send consecutive parts of rank 0's `mine` to the ranks from `owners` on, each of which receives one into
    `output`. All ranks of the group call it; it waits for the end.

    Args:
        owners: how many ranks, from 0 on, take part in the next level, and so have the data already.
        output: empty on ranks that receive nothing.
        mine: the parts in rank order; empty except on rank 0.
        each: elements of a part; 0 except on rank 0.
        what: the operation's name, for messages.
    """
    received = [output.numel()] + [0] * (group.size - 1)
    pending = group.start_all_to_all(output, mine, received, [0] * owners + [each] * (group.size - owners))
    pending.what = what
    group.wait(pending)


def _iter_frames(known: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the rank and the content of each frame in `known`. A frame is a rank, a length, and this many bytes."""
    place = 0
    while place < len(known):
        rank, length = _FRAME.unpack_from(known, place)
        place += _FRAME.size
        yield rank, known[place : place + length]
        place += length


def _check_sizes(sizes: list[int], what: str) -> list[int]:
    """Return the sizes unchanged.

    Args:
        what: the operation's name, for the message.

    Raises:
        ValueError: one is negative, or together they exceed `MAX_GATHERED_BYTES`.
    """
    if min(sizes) < 0 or sum(sizes) > MAX_GATHERED_BYTES:
        raise ValueError(f"{what}: {sizes} bytes, together more than the limit of {MAX_GATHERED_BYTES}")
    return sizes


def _tensor(data: bytes, group: Communicator) -> torch.Tensor:
    # torch.frombuffer refuses an empty buffer, and warns of a read-only one.
    made = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    return made.to(group.device)


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.cpu().numpy().tobytes()
