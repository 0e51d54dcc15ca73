"""The commit operation: a tiny collective over all ranks. Its completion proves that every rank was ready."""

from __future__ import annotations

from collections.abc import Collection

from holdfast.protocol.commit import Commit, Flag, Wish, flag_contribution, with_flags
from holdfast.runtime.groups.communicator import Communicator
from holdfast.runtime.groups.sums import PendingSums, finish_sums, start_sums


def start_commit(comm: Communicator, flags: Collection[Flag] = (), wishes: Collection[Wish] = ()) -> PendingSums:
    """Issue the commit operation with this rank's flags and wishes. Never blocks."""
    return start_sums(comm, flag_contribution(flags, wishes), "commit")


def finish_commit(commit: PendingSums, v: Commit) -> Commit:
    """Wait for the commit operation and return the step result with its flags, equal on every rank in every bit.

    Args:
        v: the step result of the reduction, equal on every rank.

    Raises:
        HaltedError, PeerLostError: it was abandoned or failed; it may have passed on other ranks.
    """
    return with_flags(v, finish_sums(commit), commit.comm.size)
