"""Sums over all ranks that come out alike on every rank, in every bit: tiny all-gathers, added in rank order.

Where the communicator has levels, each group adds up its members' sums, and the owners of a group, who all have the
same sum, meet those of other groups one level higher. So a sum over all ranks is nowhere before every rank has given
its values, and after the highest level it is everywhere, but for members that own nothing: those are told last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from holdfast.runtime.groups.communicator import Communicator, Pending
from holdfast.runtime.tensors import to_float_rows, to_floats


@dataclass(frozen=True, kw_only=True, slots=True)
class PendingSums:
    """Sums under way, on the lowest level; `gathered` is `(size of the group, values)`, float64."""

    comm: Communicator
    pending: Pending
    gathered: torch.Tensor


def start_sums(comm: Communicator, values: Sequence[float], what: str) -> PendingSums:
    """Issue the first all-gather of this rank's values; never blocks. All ranks must give as many.

    Args:
        what: the operation's name, for messages.
    """
    pending, gathered = _start_gather(comm.groups[0], values, what)
    return PendingSums(comm=comm, pending=pending, gathered=gathered)


def finish_sums(sums: PendingSums) -> list[float]:
    """Wait for the sums, level by level, and return them.

    Raises:
        HaltedError, PeerLostError: abandoned or failed.
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
    # float64 holds counts up to 2**53 exactly.
    mine = torch.tensor(values, dtype=torch.float64, device=group.device)
    gathered = torch.empty(group.size * len(values), dtype=torch.float64, device=group.device)
    pending = group.start_all_gather(gathered, mine)
    pending.what = what
    return pending, gathered.view(group.size, -1)


def _add_rows(gathered: torch.Tensor) -> list[float]:
    # One rank after the other: a sum over the rows may regroup them.
    rows = gathered.cpu()
    total = torch.zeros(gathered.shape[1], dtype=gathered.dtype)
    for row in rows:
        total.add_(row)
    return to_floats(total)


def _send_to_non_owners(group: Communicator, owners: int, total: list[float], what: str) -> list[float]:
    """Bring the sums from the group's first owner to those who own nothing; each returns them."""
    values, waiting = len(total), group.rank >= owners
    telling = group.rank == 0
    told = torch.empty(values if waiting else 0, dtype=torch.float64, device=group.device)
    mine = torch.tensor(total if telling else (), dtype=torch.float64, device=group.device).repeat(group.size - owners)
    pending = group.start_all_to_all(
        told,
        mine,
        [told.numel()] + [0] * (group.size - 1),
        [0] * owners + [values if telling else 0] * (group.size - owners),
    )
    pending.what = what
    group.wait(pending)
    return to_float_rows(told.view(1, -1))[0] if waiting else total
