"""The commit operation: one tiny collective over all ranks whose completion proves that every rank was ready.

It is an all-gather of five float64 per rank followed by a sum in rank order, so that every rank gets the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from holdfast.coordination.messages import Commit
from holdfast.runtime.communicator import Communicator, Pending

_FIELDS = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class PendingCommit:
    """A commit operation under way; `gathered` is `(size * 5,)`, rank by rank."""

    comm: Communicator
    pending: Pending
    gathered: torch.Tensor


def start_commit(
    comm: Communicator, *, grad_square: float, loss_sum: float, samples: int, nonfinite: int, swap: int
) -> PendingCommit:
    """Issue the commit operation with this rank's part; never blocks.

    Args:
        grad_square: squared norm of this rank's shard of the reduced gradients.
        loss_sum: sum of the losses of this rank's micro-batches.
        samples: how many samples this rank computed.
        nonfinite: how many elements of the shard are not finite.
        swap: 1 if this rank is armed to swap to the pending group, else 0.
    """
    # float64 holds counts up to 2**53 exactly.
    mine = torch.tensor([grad_square, loss_sum, samples, nonfinite, swap], dtype=torch.float64)
    gathered = torch.empty(comm.size * _FIELDS, dtype=torch.float64)
    pending = comm.start_all_gather(gathered, mine)
    pending.what = "commit"
    return PendingCommit(comm=comm, pending=pending, gathered=gathered)


def finish(commit: PendingCommit) -> Commit:
    """Wait for the commit operation and return v, the same on every rank in every bit.

    Raises:
        HaltedError, PeerLostError: it was abandoned or failed; whether it passed elsewhere is not known.
    """
    commit.comm.wait(commit.pending)
    # Python floats, added in rank order: no vectorised sum may regroup them.
    total = [0.0] * _FIELDS
    for row in commit.gathered.view(commit.comm.size, _FIELDS).tolist():
        total = [a + b for a, b in zip(total, row, strict=True)]
    grad_square, loss_sum, samples, nonfinite, swap = total
    return Commit(
        grad_square=grad_square, loss_sum=loss_sum, samples=int(samples), nonfinite=int(nonfinite), swap=int(swap)
    )
