"""The communicator on NCCL: the same interface, with `abort` instead of severing and abandoning.

It was never run on two GPUs, because its authors had none. It relies on documented behaviour only: works are polled
through their CUDA events, and aborting the communicators ends their operations on the device. The process must run with
TORCH_NCCL_ASYNC_ERROR_HANDLING=0 (`environment.for_workers` sets it); otherwise NCCL's watchdog ends the process on an
error.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from holdfast.runtime.groups.abandoned_groups import GroupReaper
from holdfast.runtime.groups.communicator import (
    OPERATION_S,
    HaltCheck,
    HaltedError,
    Operation,
    PeerLostError,
    Pending,
    make_halt_check,
)
from holdfast.runtime.groups.rendezvous import Board, BoardStore
from holdfast.runtime.groups.transports.torch_group import GroupCommunicator

#: Nothing wakes a thread at the end of a CUDA kernel, so it polls at this interval.
POLL_S = 200e-6
#: Assumptions for the choice between NCCL's reduce-scatter and our all-to-all, as no machine was available to measure
#: it: a ring's seconds per hop between ranks, and a rank's bytes per second to other nodes (400 Gbit/s).
HOP_S = 7e-6
ACROSS_BYTES_PER_S = 50e9


class _NcclOperation:
    """One NCCL work, which completes with its CUDA events."""

    __slots__ = ("_work",)

    def __init__(self, work: dist.Work) -> None:
        self._work = work

    def done(self) -> bool:
        return self._work.is_completed()

    def sleep(self, seconds: float) -> None:
        time.sleep(min(seconds, POLL_S))

    def finish(self) -> None:
        # Orders the current stream behind the operation. It raises if NCCL reported an error.
        self._work.wait()


class _AbandonedNcclGroup:
    """An aborted group: no operation is in progress."""

    def __init__(self, group: Any) -> None:
        self._group: Any = group

    def has_ended(self) -> bool:
        return True

    def destroy(self) -> None:
        self._group.abort()
        self._group = None


class NcclCommunicator(GroupCommunicator):
    """All-to-all, all-gather and reduce-scatter on a raw NCCL process group. Made by `build_nccl`."""

    #: the number of nodes of the ranks
    nodes = 1

    def prefers_reduce_scatter(self, input: torch.Tensor) -> bool:
        """Return whether a ring is faster for this tensor than one hop with all bytes: it has many hops, but sends only
        a node's sum to other nodes. False for half precision, on one node, and with one rank per node.

        Of `b` bytes, a rank's all-to-all sends `b * (1 - 1/nodes)` to other nodes. The ring sends as many for the whole
        node, over all its ranks' links, and takes one hop per rank but one. Half precision never uses the ring, which
        would round at every hop.
        """
        if input.dtype.itemsize < torch.float32.itemsize:
            return False
        saved = input.nbytes * (1 - 1 / self.nodes) * (1 - self.nodes / self.size)
        return saved / ACROSS_BYTES_PER_S > (self.size - 1) * HOP_S

    def start_reduce_scatter(self, output: torch.Tensor, input: torch.Tensor) -> Pending:
        """Start NCCL's reduce-scatter: sum part r of `input` over all ranks into the `output` of rank r. The timeout is
        this communicator's.

        Raises:
            HaltedError: this communicator is retired.
        """
        options = dist.ReduceScatterOptions()
        options.timeout = self._timeout
        work = self._require_group()._reduce_scatter_base(output, input, options)
        return self._make_pending("reduce_scatter", [work], output, input)

    def sever(self) -> None:
        """Abort the group, which ends its operations on the device. Does nothing if it is retired. `retire` is needed
        afterwards, too.
        """
        group = self._group
        if group is not None:
            group.abort()

    def retire(self, *, sever: bool = True) -> None:
        """Give the group up: pass it to the reaper, which aborts it in any case, so `sever` makes no difference. A
        second call does nothing.
        """
        group = self._detach_group()
        if group is not None:
            self._reaper.add(_AbandonedNcclGroup(group))

    def _make_operation(self, works: Sequence[dist.Work]) -> Operation:
        (work,) = works
        return _NcclOperation(work)


def build_nccl(
    board: Board,
    rank: int,
    size: int,
    *,
    generation: int,
    device: torch.device,
    reaper: GroupReaper,
    timeout_s: float = OPERATION_S,
    build_timeout_s: float = 10.0,
    halt: threading.Event | HaltCheck | None = None,
    nodes: int = 1,
    members: Sequence[int] | None = None,
    name: str = "",
) -> NcclCommunicator:
    """Build the group of a generation on NCCL, together with all its other members. Blocks. For the other arguments see
    `build_gloo`.

    Args:
        device: this worker's GPU.
        nodes: the number of nodes of the ranks.

    Raises:
        HaltedError: the generation was halted meanwhile; a group that was built is retired.
        PeerLostError: the group could not be built.
    """
    from torch.distributed import ProcessGroupNCCL  # absent from builds of torch without CUDA

    board.expect_keys(1 if rank == 0 else 0)  # the group's id
    options = ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout_s)
    try:
        ranks = range(size) if members is None else members
        store = BoardStore(board, timeout_s=build_timeout_s, rank=ranks[rank], owner=lambda _key: ranks[0], name=name)
        group = ProcessGroupNCCL(store, rank, size, options)
        group.eager_connect_single_device(device)
    except (RuntimeError, TimeoutError) as error:
        raise PeerLostError(f"the group of generation {generation} could not be built: {error}") from None
    communicator = NcclCommunicator(
        group, device=device, generation=generation, timeout_s=timeout_s, halt=halt, reaper=reaper
    )
    communicator.nodes = nodes
    if make_halt_check(halt)():
        communicator.retire()
        raise HaltedError(f"generation {generation} was halted while its group was built")
    return communicator
