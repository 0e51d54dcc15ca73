"""Sums over all ranks that come out alike on every rank, in every bit: one tiny all-gather, added in rank order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from holdfast.runtime.groups.communicator import Communicator, Pending
from holdfast.runtime.tensors import number_rows


@dataclass(frozen=True, kw_only=True, slots=True)
class PendingSums:
    """Sums under way; `gathered` is `(size, values)`, float64."""

    comm: Communicator
    pending: Pending
    gathered: torch.Tensor


def start_sums(comm: Communicator, values: Sequence[float], what: str) -> PendingSums:
    """Issue the all-gather of this rank's values; never blocks. All ranks must give as many.

    Args:
        what: the operation's name, for messages.
    """
    # float64 holds counts up to 2**53 exactly.
    mine = torch.tensor(values, dtype=torch.float64, device=comm.device)
    gathered = torch.empty(comm.size * len(values), dtype=torch.float64, device=comm.device)
    pending = comm.start_all_gather(gathered, mine)
    pending.what = what
    return PendingSums(comm=comm, pending=pending, gathered=gathered.view(comm.size, -1))


def finish_sums(sums: PendingSums) -> list[float]:
    """Wait for the sums and return them.

    Raises:
        HaltedError, PeerLostError: abandoned or failed.
    """
    sums.comm.wait(sums.pending)
    # Python floats, one rank after the other: no vectorised sum may regroup them.
    total = [0.0] * sums.gathered.shape[1]
    for row in number_rows(sums.gathered):
        total = [a + b for a, b in zip(total, row, strict=True)]
    return total
