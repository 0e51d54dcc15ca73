"""The communicator on gloo: a raw process group bound to one address, without torch.distributed's global state."""

from __future__ import annotations

import contextlib
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
    is_late,
)
from holdfast.runtime.groups.rendezvous import Board, BoardStore
from holdfast.runtime.groups.severing import GroupSockets, find_group_sockets, socket_inodes
from holdfast.runtime.groups.transports.torch_group import GroupCommunicator
from holdfast.runtime.groups.transports.waiters import WaitThreads

#: torch's type stubs know few of its members.
ProcessGroupGloo: Any = dist.ProcessGroupGloo
#: gloo's threads per group: how many operations progress at once. One thread per broadcast of an all-gather was not
#: faster, nor did severing then end more of them.
THREADS = 2
#: A group retired after a swap is destroyed only after this time: closing its sockets could break a peer's operation
#: that has all its data but has not ended.
LINGER_S = 1.0
#: gloo waits this many times its timeout for a connection.
CONNECT_FACTOR = 5
#: From this size on, an all-gather consists of broadcasts.
BROADCAST_BYTES = 1 << 16


class _GlooOperation:
    """The works of one operation.

    The wait is in C++, a short time at once. A callback from gloo's threads would cost 0.1 ms more processor time per
    operation, because the interpreter's lock must move between threads.
    """

    __slots__ = ("_works",)

    def __init__(self, works: Sequence[dist.Work]) -> None:
        self._works = works

    def sleep(self, seconds: float) -> None:
        """Wait until the first work that has not ended does so, at most this many seconds; return at once if all have
        ended. Other works may still be in progress then. A failure is not raised.
        """
        for work in self._works:
            if not work.is_completed():
                # It raises on a timeout, and if the work failed. `finish` reports which.
                with contextlib.suppress(RuntimeError):
                    work.wait(timedelta(seconds=seconds))
                return

    def done(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def finish(self) -> None:
        for work in self._works:
            work.wait()


class _AbandonedGlooGroup:
    """A retired group with its operations in progress and their buffers."""

    def __init__(self, group: Any, pending: Sequence[Pending]) -> None:
        self._group: Any = group
        self._pending = [entry.detach() for entry in pending]

    def has_ended(self) -> bool:
        return all(pending.done() for pending in self._pending)

    def destroy(self) -> None:
        self._pending.clear()
        self._group = None


class GlooCommunicator(GroupCommunicator):
    """All-to-all and all-gather on a process group of gloo. Made by `build_gloo`."""

    def __init__(
        self,
        group: Any,
        sockets: GroupSockets,
        *,
        generation: int,
        timeout_s: float,
        halt: threading.Event | HaltCheck | None,
        reaper: GroupReaper,
    ) -> None:
        super().__init__(group, generation=generation, timeout_s=timeout_s, halt=halt, reaper=reaper)
        self._under_way: list[Pending] = []
        self._sockets = sockets
        self._waiters = WaitThreads(f"holdfast-waits-{generation}")

    def set_timeout(self, timeout_s: float) -> None:
        super().set_timeout(timeout_s)
        # Point-to-point operations have no timeout of their own.
        self._require_group()._set_default_timeout(self._timeout)

    def start_all_gather(self, output: torch.Tensor, input: torch.Tensor) -> Pending:
        """Start to gather every rank's `input` into `output`, in rank order, see `Communicator`. Inputs below
        `BROADCAST_BYTES` use an all-to-all, larger ones a broadcast from each rank.

        Raises:
            HaltedError: this communicator is retired.
        """
        if input.nbytes < BROADCAST_BYTES:
            # gloo's all-gather uses a ring: as many sequential waits as there are ranks.
            return self.start_all_to_all(output, input.repeat(self.size))
        return self._gather_in_place(output, input, self.size)

    def start_gather_from_owners(self, output: torch.Tensor, input: torch.Tensor, owners: int) -> Pending:
        """Start to gather the parts of the first `owners` ranks into `output` on all ranks, see `Communicator`. Parts
        below `BROADCAST_BYTES` use an all-to-all, larger ones a broadcast from each owner.

        Raises:
            HaltedError: this communicator is retired.
        """
        if output.nbytes < owners * BROADCAST_BYTES:
            return super().start_gather_from_owners(output, input, owners)
        return self._gather_in_place(output, input, owners)

    def _gather_in_place(self, output: torch.Tensor, input: torch.Tensor, owners: int) -> Pending:
        """Start one broadcast from each of the first `owners` ranks, and return them as one operation: gloo's
        all-gather would copy the whole output.

        Args:
            output: `(owners * n,)`; part r receives the data of owner r.
            input: an owner's data, first copied to its part of `output` if it is elsewhere; ignored on other ranks.
        """
        parts = output.view(owners, -1)
        if self.rank < owners and parts[self.rank].data_ptr() != input.data_ptr():
            parts[self.rank].copy_(input.view(-1))
        works = [self._broadcast(parts[rank], rank) for rank in range(owners)]
        return self._make_pending("all_gather", works, output, input)

    def start_send(self, tensor: torch.Tensor, to: int, tag: int = 0) -> Pending:
        return self._wait_in_thread("send", self._require_group().send([tensor], to, tag), tensor)

    def start_receive(self, tensor: torch.Tensor, source: int | None, tag: int = 0) -> Pending:
        """Start to receive a tensor with this tag into `tensor`, from rank `source`, or from any rank if it is None. A
        thread waits for the end, because gloo cannot be polled for it.

        Raises:
            HaltedError: this communicator is retired.
        """
        group = self._require_group()
        work = group.recv_anysource([tensor], tag) if source is None else group.recv([tensor], source, tag)
        return self._wait_in_thread("receive", work, tensor)

    @property
    def sockets(self) -> tuple[GroupSockets, ...]:
        return (self._sockets,)

    def sever(self) -> None:
        self._sockets.sever()

    def retire(self, *, sever: bool = True) -> None:
        """Give the group up: break its connections if `sever`, and pass it with its operations in progress to the
        reaper. These operations count as failed from now on. A second call does nothing.

        Without severing, the reaper keeps the group for at least `LINGER_S` seconds.
        """
        group = self._detach_group()
        if group is None:
            return
        if sever:
            self.sever()
        self._waiters.close()
        under_way, self._under_way = self._under_way, []
        self._reaper.add(_AbandonedGlooGroup(group, under_way), linger_s=0.0 if sever else LINGER_S)

    def _make_operation(self, works: Sequence[dist.Work]) -> Operation:
        return _GlooOperation(works)

    def _make_pending(self, what: str, works: Sequence[dist.Work], *tensors: torch.Tensor) -> Pending:
        return self._track(super()._make_pending(what, works, *tensors))

    def _wait_in_thread(self, what: str, work: dist.Work, tensor: torch.Tensor) -> Pending:
        return self._track(Pending(what, self._waiters.wait_for(work), (tensor,)))

    def _track(self, pending: Pending) -> Pending:
        self._under_way.append(pending)
        return pending

    def _on_ended(self, pending: Pending) -> None:
        if pending in self._under_way:
            self._under_way.remove(pending)


def build_gloo(
    board: Board,
    rank: int,
    size: int,
    *,
    generation: int,
    reaper: GroupReaper,
    name: str = "",
    members: Sequence[int] | None = None,
    host: str = "127.0.0.1",
    timeout_s: float = OPERATION_S,
    build_timeout_s: float = 10.0,
    halt: threading.Event | HaltCheck | None = None,
) -> GlooCommunicator:
    """Build the group of a generation together with all its other members, and run its first operations. Blocks, so
    call it in a background thread.

    Args:
        board: the generation's rendezvous.
        rank, size: this worker's rank among the members, and their number.
        name: the prefix of its keys there, if the generation has several groups.
        members: the members' ranks in the generation; None if it has all of them.
        host: the address to bind to, at which peers reach this worker.
        timeout_s: seconds after which an operation fails, so that the reaper can destroy its group in the end.
        build_timeout_s: seconds to wait for a member in rendezvous, then to connect, then in the first operations.
        halt: interrupts the rendezvous and every wait on the communicator.

    Raises:
        HaltedError: the generation was halted meanwhile.
        PeerLostError: a member did not join, or was lost again.
    """
    before, began = socket_inodes(), time.monotonic()
    ranks = range(size) if members is None else members

    def owner(key: str) -> int:
        return ranks[int(key.rpartition("/")[2])]  # gloo's keys end with the rank that sets them

    store = BoardStore(board, timeout_s=build_timeout_s, rank=ranks[rank], owner=owner, name=name)
    group = _make_group(store, rank, size, host, build_timeout_s)
    if isinstance(group, str):
        late = is_late(time.monotonic() - began, build_timeout_s)
        raise PeerLostError(f"the group of generation {generation} could not be built: {group}", timed_out=late)
    sockets = find_group_sockets(before, store.values().values(), generation=generation)
    communicator = GlooCommunicator(
        group, sockets, generation=generation, timeout_s=build_timeout_s, halt=halt, reaper=reaper
    )
    del group
    try:
        _warm_up(communicator)
    except (HaltedError, PeerLostError):
        communicator.retire()
        raise
    communicator.set_timeout(timeout_s)
    return communicator


def _make_group(store: BoardStore, rank: int, size: int, host: str, timeout_s: float) -> Any:
    """Return a raw group, or the failure's message as a str, also after a timeout: an exception would keep the group's
    sockets open. Blocks until all members are connected.

    Args:
        store: the group's rendezvous.
        rank, size: this worker's rank in the group, and the number of its members.
        host: the address to bind to.
        timeout_s: seconds to wait for the connections.

    Raises:
        HaltedError: the generation was halted during the rendezvous.
    """
    options = ProcessGroupGloo._Options()
    options._devices = [ProcessGroupGloo.create_device(hostname=host)]
    options._timeout = timedelta(seconds=timeout_s / CONNECT_FACTOR)
    options._threads = THREADS
    try:
        return ProcessGroupGloo(store, rank, size, options)
    except (RuntimeError, TimeoutError) as error:
        return str(error).split("\n", 1)[0][:512] or "failed"


def _warm_up(communicator: GlooCommunicator) -> None:
    """Run one all-to-all and one all-gather, because a group's first operations are slow. Blocks.

    Raises:
        HaltedError, PeerLostError: see `Communicator.wait`.
    """
    size = communicator.size
    sent, received = torch.zeros(size), torch.empty(size)
    communicator.wait(communicator.start_all_to_all(received, sent))
    communicator.wait(communicator.start_all_gather(received, sent[:1].clone()))
