"""The commit operation: one tiny collective over all ranks whose completion proves that every rank was ready."""

from __future__ import annotations

from collections.abc import Collection

from holdfast.protocol.commit import Commit, Flag, Wish, flag_contribution, with_flags
from holdfast.runtime.groups.communicator import Communicator
from holdfast.runtime.groups.sums import PendingSums, finish_sums, start_sums


def start_commit(comm: Communicator, flags: Collection[Flag] = (), wishes: Collection[Wish] = ()) -> PendingSums:
    """Issue the commit operation with what this rank raises; never blocks."""
    return start_sums(comm, flag_contribution(flags, wishes), "commit")


def finish_commit(commit: PendingSums, v: Commit) -> Commit:
    """Wait for the commit operation and return v with its flags, the same on every rank in every bit.

    Args:
        v: what the reduction has brought, the same everywhere.

    Raises:
        HaltedError, PeerLostError: it was abandoned or failed; whether it passed elsewhere is not known.
    """
    return with_flags(v, finish_sums(commit), commit.comm.size)
