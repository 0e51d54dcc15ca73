"""Collectives that never block forever: start one, poll it, and leave it when the generation is halted.

A `Communicator` is the group of one generation. Its operations are out of place and asynchronous. `wait` returns when
one has completed. It raises `HaltedError` soon after the generation is halted, and `PeerLostError` if the operation
failed. After either error the communicator is unusable: call `retire`. The `GroupReaper` then keeps its operations,
their buffers and the group until the operations have ended. Never touch those buffers again.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from holdfast.control.link.progress_page import NoProgress, ProgressSlot
from holdfast.errors import HoldfastError
from holdfast.runtime.groups.severing import GroupSockets

#: Whether the generation is halted. It is called in every round of polling, so it must be cheap and lock-free.
HaltCheck = Callable[[], bool]

#: Seconds between two halt checks while an operation is in progress; its end wakes the waiting thread at once. With
#: gloo a check costs about 0.15 ms, because ending a wait in C++ takes an exception.
HALT_POLL_S = 8e-3
#: Seconds after which an operation fails. Members legitimately wait long for one that pauses, or that computes the
#: share of a lost member; hang detection finds real hangs much earlier. The limit is needed because severing a retired
#: group does not end all its operations, and their buffers are kept until they end.
OPERATION_S = 1800.0


class CollectiveLeftError(HoldfastError):
    """A collective was left before it completed. Its work must be repeated in another group."""


class HaltedError(CollectiveLeftError):
    """The generation was halted during a wait."""


class PeerLostError(CollectiveLeftError):
    """An operation of the group failed: a peer or the network is lost. The message is the transport's."""

    def __init__(self, message: str, *, timed_out: bool = False) -> None:
        """Create the error.

        Args:
            timed_out: whether the wait lasted its full time.
        """
        super().__init__(message)
        self.timed_out = timed_out


class Operation(Protocol):
    """One collective or transfer of a transport, in progress."""

    def done(self) -> bool:
        """Return whether it has ended, successfully or not. Never blocks."""
        ...

    def sleep(self, seconds: float) -> None:
        """Return when it is `done`, or after this many seconds."""
        ...

    def finish(self) -> None:
        """Make the results usable once it is `done`. Never blocks.

        Raises:
            RuntimeError: it failed.
        """
        ...


class Pending:
    """One operation in progress, and the tensors that it reads and writes.

    Only this object refers to the transport's objects, so that a traceback cannot keep a dead group's sockets open.
    """

    __slots__ = ("_operation", "tensors", "what")

    def __init__(self, what: str, operation: Operation | None, tensors: tuple[torch.Tensor, ...] = ()) -> None:
        """Create one; without an `operation` it has completed."""
        self.what = what
        self.tensors = tensors
        self._operation = operation

    def done(self) -> bool:
        """Return whether it has ended, successfully or not. Never blocks."""
        return self._operation is None or self._operation.done()

    def sleep(self, seconds: float) -> None:
        """Return when it has ended, or after this many seconds."""
        if self._operation is not None:
            self._operation.sleep(seconds)

    def finish(self) -> str:
        """Make the results of an operation that is `done` usable; return "", or the failure's message. Drops the
        operation and its tensors, so a second call returns "".
        """
        operation, self._operation = self._operation, None
        self.tensors = ()
        if operation is None:
            return ""
        try:
            operation.finish()
        except RuntimeError as error:
            return str(error).split("\n", 1)[0][:512] or "failed"
        return ""

    def detach(self) -> Pending:
        """Return the operation, with its tensors, as a new object for the reaper. This object is `done` and counts as
        failed from now on.
        """
        taken = Pending(self.what, self._operation, self.tensors)
        self._operation, self.tensors = _Retired(), ()
        return taken


class _Retired:
    """Replaces the operation of a retired group."""

    def done(self) -> bool:
        return True

    def sleep(self, seconds: float) -> None:
        """Return at once."""

    def finish(self) -> None:
        raise RuntimeError("its group is retired")


def is_late(waited_s: float, timeout_s: float) -> bool:
    """Return whether a failed wait lasted its full time. The transport's clock started slightly earlier."""
    return waited_s >= 0.95 * timeout_s


def make_halt_check(halt: threading.Event | HaltCheck | None) -> HaltCheck:
    """Return the check for an event, a callable, or None (never halted)."""
    if halt is None:
        return lambda: False
    return halt.is_set if isinstance(halt, threading.Event) else halt


class Communicator:
    """The group of one generation. This base class is the world of one; each transport overrides the operations.

    Not thread-safe: one thread (the training thread) starts and waits. Only `sever` may be called from another thread.
    """

    #: The device of its operations' tensors.
    device = torch.device("cpu")
    #: An operation fails after this many seconds.
    timeout_s = math.inf
    #: where the waiting thread reports its waits
    progress: ProgressSlot = NoProgress()

    def __init__(
        self, *, rank: int = 0, size: int = 1, generation: int = 0, halt: threading.Event | HaltCheck | None = None
    ) -> None:
        if not 0 <= rank < size:
            raise ValueError(f"rank {rank} is outside a world of {size}")
        self.rank = rank
        self.size = size
        self.generation = generation
        self.halted: HaltCheck = make_halt_check(halt)

    @property
    def owners(self) -> tuple[int, ...]:
        """For each level, how many members of a group own a part at the next level (see planning.levels)."""
        return (self.size,)

    @property
    def groups(self) -> tuple[Communicator, ...]:
        """This rank's group on each of its levels, lowest first; only this communicator if all ranks meet at once."""
        return (self,)

    def start_all_to_all(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: Sequence[int] | None = None,
        input_splits: Sequence[int] | None = None,
    ) -> Pending:
        """Start to send part r of `input` to rank r, and to receive rank r's part as part r of `output`. The base
        class, a world of one, copies at once.

        Args:
            output, input: contiguous, of the same dtype. They must not overlap, and stay untouched until `wait`
                returns.
            output_splits, input_splits: rows (first dimension) per rank; None for equal parts.
        """
        output.copy_(input)
        return Pending("all_to_all", None)

    def start_all_gather(self, output: torch.Tensor, input: torch.Tensor) -> Pending:
        """Start to gather every rank's `input`, `(n,)`, into `output`, `(size * n,)`, in rank order. The base class, a
        world of one, copies at once.

        `input` may be this rank's own part of `output`.
        """
        if output.data_ptr() != input.data_ptr():
            output.copy_(input)
        return Pending("all_gather", None)

    def start_gather_from_owners(self, output: torch.Tensor, input: torch.Tensor, owners: int) -> Pending:
        """Start to gather the parts of the first `owners` ranks into `output` on all ranks, in rank order. All ranks
        must call it.

        Args:
            output: `(owners * n,)`.
            input: an owner's part, `(n,)`; may be its own part of `output`. Empty on other ranks.
        """
        if owners == self.size:
            return self.start_all_gather(output, input)
        part = output.numel() // owners
        received = [part] * owners + [0] * (self.size - owners)
        return self.start_all_to_all(output, input.repeat(self.size), received, [input.numel()] * self.size)

    def start_broadcast(self, tensor: torch.Tensor, root: int) -> Pending:
        """Start to send the contiguous `tensor` of rank `root` to all other ranks, which receive it into their
        `tensor`, of the same shape and type. All ranks must call it. Do not touch `tensor` until `wait` returns.
        """
        sending = self.rank == root
        output = tensor.new_empty(0) if sending else tensor.view(-1)
        input = tensor.view(-1).repeat(self.size - 1) if sending else tensor.new_empty(0)
        sent = [tensor.numel() * (sending and rank != root) for rank in range(self.size)]
        received = [tensor.numel() * (rank == root and not sending) for rank in range(self.size)]
        return self.start_all_to_all(output, input, received, sent)

    def start_send(self, tensor: torch.Tensor, to: int, tag: int = 0) -> Pending:
        """Start to send a contiguous tensor to one rank, which receives it under the same tag."""
        raise NotImplementedError(f"{type(self).__name__} cannot send to one rank alone")

    def start_receive(self, tensor: torch.Tensor, source: int | None, tag: int = 0) -> Pending:
        """Start to receive a tensor with this tag from one rank, or from any rank if `source` is None; in place."""
        raise NotImplementedError(f"{type(self).__name__} cannot receive from one rank alone")

    def prefers_reduce_scatter(self, input: torch.Tensor) -> bool:
        """Return whether to sum a tensor of this size and type over all ranks with `start_reduce_scatter`."""
        return False

    def start_reduce_scatter(self, output: torch.Tensor, input: torch.Tensor) -> Pending:
        """Start to sum part r of `input` over all ranks at rank r, in the transport's own order.

        Use it only if `prefers_reduce_scatter` is true. Arguments are as for `start_all_to_all` with equal parts.
        """
        raise NotImplementedError(f"{type(self).__name__} has no reduction of its own")

    def wait(self, pending: Pending) -> None:
        """Wait until an operation has completed.

        A completed operation counts, even if the generation was halted meanwhile.

        Raises:
            HaltedError: the generation was halted first. Retire this communicator.
            PeerLostError: the operation failed. Retire this communicator.
        """
        began = time.monotonic()
        if not pending.done():
            self._poll_until_done(pending)
        failure = pending.finish()
        self._on_ended(pending)
        if failure:
            timed_out = is_late(time.monotonic() - began, self.timeout_s)
            raise PeerLostError(
                f"{pending.what} in generation {self.generation} failed: {failure}", timed_out=timed_out
            )

    def _poll_until_done(self, pending: Pending) -> None:
        """Return when an operation has ended, successfully or not. Meanwhile report the wait to `progress`.

        Raises:
            HaltedError: the generation was halted first.
        """
        self.progress.start_wait(pending.what, self.size, sum(tensor.nbytes for tensor in pending.tensors))
        try:
            while not pending.done():
                # It may complete between the two checks; then it counts.
                if self.halted() and not pending.done():
                    raise HaltedError(f"generation {self.generation} was halted in {pending.what}")
                pending.sleep(HALT_POLL_S)
                self.progress.renew_wait()
        finally:
            self.progress.end_wait()

    def report_waits_to(self, progress: ProgressSlot) -> None:
        """Report from now on the waits of the thread that uses this communicator."""
        self.progress = progress

    @property
    def sockets(self) -> tuple[GroupSockets, ...]:
        """The connections of its groups, if they are known."""
        return ()

    def sever(self) -> None:
        """Break the connections to all peers, so that peers that wait for this rank notice it at once. Any thread."""

    def retire(self, *, sever: bool = True) -> None:
        """Give the group up. The thread that used it calls this once, after a failure or a swap.

        Args:
            sever: also break the connections. False after a swap, because peers may still finish the last operation.
        """

    def _on_ended(self, pending: Pending) -> None:
        """Called by `wait` when an operation has ended, successfully or not."""


class LocalCommunicator(Communicator):
    """The world of one: its operations complete at once."""

    def __init__(self, *, generation: int = 0, halt: threading.Event | HaltCheck | None = None) -> None:
        super().__init__(rank=0, size=1, generation=generation, halt=halt)
