"""The communicator on NCCL: the same interface, with `abort` in place of severing and abandoning.

Not run where it was written: there were no two GPUs. It relies on documented behaviour only: works are polled through
their CUDA events, and aborting the communicators ends what is under way on the device. The process must run with
TORCH_NCCL_ASYNC_ERROR_HANDLING=0 (the agent sets it), or NCCL's watchdog ends the process on an error.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from holdfast.runtime.groups.communicator import (
    HaltCheck,
    HaltedError,
    Operation,
    PeerLostError,
    halt_check,
)
from holdfast.runtime.groups.graveyard import Graveyard
from holdfast.runtime.groups.rendezvous import Board, BoardStore
from holdfast.runtime.groups.torch_group import GroupCommunicator

#: Nothing wakes a thread at the end of a CUDA kernel without a thread that polls.
POLL_S = 200e-6


class _NcclOperation:
    """One NCCL work, complete when its CUDA events say so."""

    __slots__ = ("_work",)

    def __init__(self, work: dist.Work) -> None:
        self._work = work

    def done(self) -> bool:
        return self._work.is_completed()

    def sleep(self, seconds: float) -> None:
        time.sleep(min(seconds, POLL_S))

    def finish(self) -> None:
        # Orders the current stream behind the operation; raises where NCCL reported an error.
        self._work.wait()


class _NcclRemains:
    """An aborted group: nothing of it is under way any more."""

    def __init__(self, group: Any) -> None:
        self._group: Any = group

    def ended(self) -> bool:
        return True

    def destroy(self) -> None:
        self._group.abort()
        self._group = None


class NcclCommunicator(GroupCommunicator):
    """All-to-all and all-gather on a raw NCCL process group. Made by `build_nccl`."""

    def sever(self) -> None:
        group = self._group
        if group is not None:
            group.abort()

    def retire(self, *, sever: bool = True) -> None:
        group = self._give_up()
        if group is not None:
            self._graveyard.bury(_NcclRemains(group))

    def _operation(self, works: Sequence[dist.Work]) -> Operation:
        (work,) = works
        return _NcclOperation(work)


def build_nccl(
    board: Board,
    rank: int,
    size: int,
    *,
    generation: int,
    device: torch.device,
    graveyard: Graveyard,
    timeout_s: float = 120.0,
    build_timeout_s: float = 10.0,
    halt: threading.Event | HaltCheck | None = None,
) -> NcclCommunicator:
    """Build the group of a generation on NCCL; arguments and errors are those of `build_gloo`."""
    from torch.distributed import ProcessGroupNCCL  # absent from builds of torch without CUDA

    options = ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout_s)
    try:
        group = ProcessGroupNCCL(BoardStore(board, timeout_s=build_timeout_s), rank, size, options)
        group.eager_connect_single_device(device)
    except (RuntimeError, TimeoutError) as error:
        raise PeerLostError(f"the group of generation {generation} could not be built: {error}") from None
    communicator = NcclCommunicator(
        group, device=device, generation=generation, timeout_s=timeout_s, halt=halt, graveyard=graveyard
    )
    if halt_check(halt)():
        communicator.retire()
        raise HaltedError(f"generation {generation} was halted while its group was built")
    return communicator
