"""Sums over all ranks that are equal on every rank in every bit: tiny all-gathers, added in rank order.

If the communicator has levels, each group adds its members' sums first. The owners of a group, which all have the same
sum, then meet the owners of other groups one level higher. So no rank has a sum over all ranks before every rank gave
its values. After the highest level all owners have it, and they send it to members that own nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from holdfast.runtime.groups.communicator import Communicator, Pending
from holdfast.runtime.tensors import to_float_rows, to_floats


@dataclass(frozen=True, kw_only=True, slots=True)
class PendingSums:
    """Sums in progress, on the lowest level."""

    comm: Communicator
    pending: Pending
    #: `(size of the group, values)`, float64
    gathered: torch.Tensor


def start_sums(comm: Communicator, values: Sequence[float], what: str) -> PendingSums:
    """Start to add this rank's values to all others' by the all-gather of the lowest level; `finish_sums` does the
    rest. Never blocks. All ranks must give the same number of values.

    Args:
        what: the operation's name, for messages.
    """
    pending, gathered = _start_gather(comm.groups[0], values, what)
    return PendingSums(comm=comm, pending=pending, gathered=gathered)


def finish_sums(sums: PendingSums) -> list[float]:
    """Wait for the sums, level by level, and return the sum over all ranks of each value, in the order of the values
    and equal on every rank in every bit. All ranks must call it.

    Raises:
        HaltedError: the generation was halted meanwhile.
        PeerLostError: an operation failed.
    """
    groups, owners, what = sums.comm.groups, sums.comm.owners, sums.pending.what
    groups[0].wait(sums.pending)
    total = _add_rows(sums.gathered)
    for group in groups[1:]:
        pending, gathered = _start_gather(group, total, what)
        group.wait(pending)
        total = _add_rows(gathered)
    for level in range(len(groups) - 1, -1, -1):
        if groups[level].size > owners[level]:
            total = _send_to_non_owners(groups[level], owners[level], total, what)
    return total


def _start_gather(group: Communicator, values: Sequence[float], what: str) -> tuple[Pending, torch.Tensor]:
    """Start to gather the values of all members of a group, equally many of each. Return the operation, and its output
    `(members, values)`, float64.

    Args:
        what: the operation's name, for messages.
    """
    # float64 holds counts up to 2**53 exactly.
    mine = torch.tensor(values, dtype=torch.float64, device=group.device)
    gathered = torch.empty(group.size * len(values), dtype=torch.float64, device=group.device)
    pending = group.start_all_gather(gathered, mine)
    pending.what = what
    return pending, gathered.view(group.size, -1)


def _add_rows(gathered: torch.Tensor) -> list[float]:
    """Return the sum of the rows of `(members, values)`, added in the members' order."""
    # Add row by row: a sum over the rows may regroup them.
    rows = gathered.cpu()
    total = torch.zeros(gathered.shape[1], dtype=gathered.dtype)
    for row in rows:
        total.add_(row)
    return to_floats(total)


def _send_to_non_owners(group: Communicator, owners: int, total: list[float], what: str) -> list[float]:
    """Return `total` of the group's rank 0: it is sent to the ranks from `owners` on, and the others have it already.
    All ranks of the group call it; it waits for the end.

    Args:
        total: only its length is used on the ranks from `owners` on.
        what: the operation's name, for messages.
    """
    values = len(total)
    receives = group.rank >= owners
    sends = group.rank == 0
    received = torch.empty(values if receives else 0, dtype=torch.float64, device=group.device)
    mine = torch.tensor(total if sends else (), dtype=torch.float64, device=group.device).repeat(group.size - owners)
    pending = group.start_all_to_all(
        received,
        mine,
        [received.numel()] + [0] * (group.size - 1),
        [0] * owners + [values if sends else 0] * (group.size - owners),
    )
    pending.what = what
    group.wait(pending)
    return to_float_rows(received.view(1, -1))[0] if receives else total
