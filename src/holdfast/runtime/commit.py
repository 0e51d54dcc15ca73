"""The commit operation: one tiny collective over all ranks whose completion proves that every rank was ready.

It sums five numbers per rank, so that every rank gets the same v in every bit.
"""

from __future__ import annotations

from holdfast.protocol.plan import Commit
from holdfast.runtime.communicator import Communicator
from holdfast.runtime.sums import PendingSums, finish_sums, start_sums


def start_commit(
    comm: Communicator, *, grad_square: float, loss_sum: float, samples: int, nonfinite: int, swap: int
) -> PendingSums:
    """Issue the commit operation with this rank's part; never blocks.

    Args:
        grad_square: squared norm of this rank's shard of the reduced gradients, before clipping.
        loss_sum: sum of the losses of this rank's micro-batches.
        samples: how many samples this rank computed.
        nonfinite: how many elements of the shard are not finite.
        swap: 1 if this rank is armed to swap to the pending group, else 0.
    """
    return start_sums(comm, [grad_square, loss_sum, samples, nonfinite, swap], "commit")


def finish(commit: PendingSums) -> Commit:
    """Wait for the commit operation and return v, the same on every rank in every bit.

    Raises:
        HaltedError, PeerLostError: it was abandoned or failed; whether it passed elsewhere is not known.
    """
    grad_square, loss_sum, samples, nonfinite, swap = finish_sums(commit)
    return Commit(
        grad_square=grad_square, loss_sum=loss_sum, samples=int(samples), nonfinite=int(nonfinite), swap=int(swap)
    )
