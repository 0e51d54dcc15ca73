"""The commit operation: one tiny collective over all ranks whose completion proves that every rank was ready."""

from __future__ import annotations

from holdfast.protocol.commit import Commit, from_sums, to_numbers
from holdfast.runtime.groups.communicator import Communicator
from holdfast.runtime.groups.sums import PendingSums, finish_sums, start_sums


def start_commit(comm: Communicator, part: Commit) -> PendingSums:
    """Issue the commit operation with this rank's part of v; never blocks."""
    return start_sums(comm, to_numbers(part), "commit")


def finish(commit: PendingSums) -> Commit:
    """Wait for the commit operation and return v, the same on every rank in every bit.

    Raises:
        HaltedError, PeerLostError: it was abandoned or failed; whether it passed elsewhere is not known.
    """
    return from_sums(finish_sums(commit), commit.comm.size)
