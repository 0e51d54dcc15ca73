"""Bytes of every rank on every rank: what differs from rank to rank and is no sum.

Each rank's bytes go in a frame with its rank. Each group gathers what its members have by then, and the owners, who all
have the same, meet those of other groups one level higher; members that own nothing are told at the end, as with sums.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

import torch

from holdfast.runtime.groups.communicator import Communicator
from holdfast.runtime.tensors import to_ints

#: of all ranks together; more is nobody's intention
MAX_GATHERED_BYTES = 1 << 30
#: the rank, and how many bytes follow
_FRAME = struct.Struct("<QQ")


def gather_bytes(comm: Communicator, mine: bytes, what: str) -> list[bytes]:
    """Return what each rank gave, in rank order, the same on every rank. All ranks must call it.

    Args:
        what: the operation's name, for messages.

    Raises:
        HaltedError, PeerLostError: abandoned or failed.
        ValueError: it is more than MAX_GATHERED_BYTES, or not one frame of each rank.
    """
    known = _FRAME.pack(comm.rank, len(mine)) + mine
    for group in comm.groups:
        known = _gather_level(group, known, what)
    for level in range(len(comm.groups) - 1, -1, -1):
        group, owners = comm.groups[level], comm.owners[level]
        if group.size > owners:
            known = _send_to_non_owners(group, owners, known, what)
    frames = dict(_iter_frames(known))
    if sorted(frames) != list(range(comm.size)):
        raise ValueError(f"{what}: gathered of ranks {sorted(frames)} in a world of {comm.size}")
    return [frames[rank] for rank in range(comm.size)]


def _gather_level(group: Communicator, mine: bytes, what: str) -> bytes:
    """Return what all members of a group have, in the group's order."""
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
    """Bring what the group's first owner knows to those who own nothing; each returns it."""
    waiting, telling = group.rank >= owners, group.rank == 0
    length = torch.zeros(int(waiting), dtype=torch.int64, device=group.device)
    mine = torch.tensor([len(known)] * (group.size - owners) * telling, dtype=torch.int64, device=group.device)
    _send(group, owners, length, mine, int(telling), what)
    (size,) = _check_sizes(to_ints(length), what) if waiting else (len(known),)
    told = torch.empty(size * waiting, dtype=torch.uint8, device=group.device)
    _send(group, owners, told, _tensor(known * (group.size - owners) * telling, group), size * telling, what)
    return _bytes(told) if waiting else known


def _send(group: Communicator, owners: int, told: torch.Tensor, mine: torch.Tensor, each: int, what: str) -> None:
    received = [told.numel()] + [0] * (group.size - 1)
    pending = group.start_all_to_all(told, mine, received, [0] * owners + [each] * (group.size - owners))
    pending.what = what
    group.wait(pending)


def _iter_frames(known: bytes) -> Iterator[tuple[int, bytes]]:
    place = 0
    while place < len(known):
        rank, length = _FRAME.unpack_from(known, place)
        place += _FRAME.size
        yield rank, known[place : place + length]
        place += length


def _check_sizes(sizes: list[int], what: str) -> list[int]:
    if min(sizes) < 0 or sum(sizes) > MAX_GATHERED_BYTES:
        raise ValueError(f"{what}: {sizes} bytes are more than {MAX_GATHERED_BYTES} in all")
    return sizes


def _tensor(data: bytes, group: Communicator) -> torch.Tensor:
    # (torch.frombuffer takes no empty buffer, and warns of one that cannot be written to)
    made = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    return made.to(group.device)


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.cpu().numpy().tobytes()
