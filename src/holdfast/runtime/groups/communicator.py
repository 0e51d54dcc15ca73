"""Collectives that nobody is stuck in: start, wait a little at a time, and leave when the generation is halted.

A `Communicator` is the group of one generation. Its operations are out of place and asynchronous; `wait` returns when
one has completed, raises `HaltedError` soon after the generation is halted, and `PeerLostError` where the operation
failed. After either, the communicator is of no use any more: `retire` it. Its operations, their buffers and the group
itself then live on in the `Graveyard` until the operations have ended by themselves; never touch those buffers again.
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

#: Whether the generation is halted. Called in every round of polling, so it must be cheap and take no lock.
HaltCheck = Callable[[], bool]

#: How often to look for a halt while an operation is under way; its end wakes the waiting thread at once. With gloo a
#: look costs about 0.15 ms: it takes an exception to end a wait in C++.
HALT_POLL_S = 8e-3
#: Seconds after which an operation fails. Members legitimately wait long for one that pauses, or that computes the
#: share of a lost member; hang detection finds real hangs much earlier. The limit is needed because severing a retired
#: group does not end all its operations, and their buffers are kept until they end.
OPERATION_S = 1800.0


class CollectiveLeftError(HoldfastError):
    """A collective was left before it had completed; what it was for is to be done again, in another group."""


class HaltedError(CollectiveLeftError):
    """The generation was halted while something was waited for."""


class PeerLostError(CollectiveLeftError):
    """An operation of the group failed: a peer is gone, or the network is. The message has the transport's words.

    `timed_out`: it was waited for until its time was up.
    """

    def __init__(self, message: str, *, timed_out: bool = False) -> None:
        super().__init__(message)
        self.timed_out = timed_out


class Operation(Protocol):
    """What a transport hands out for one operation under way."""

    def done(self) -> bool:
        """Return whether it has ended, well or badly; never blocks."""
        ...

    def sleep(self, seconds: float) -> None:
        """Return once `done`, or after so many seconds."""
        ...

    def finish(self) -> None:
        """Make the results usable once `done`; raise RuntimeError where it ended badly. Never blocks."""
        ...


class Pending:
    """One operation under way, and the tensors that it reads and writes.

    It alone refers to the transport's objects: what a traceback still holds must not keep a dead group's sockets open.
    """

    __slots__ = ("_operation", "tensors", "what")

    def __init__(self, what: str, operation: Operation | None, tensors: tuple[torch.Tensor, ...] = ()) -> None:
        """Make one; `operation` None: it has completed."""
        self.what = what
        self.tensors = tensors
        self._operation = operation

    def done(self) -> bool:
        """Return whether it has ended, well or badly; never blocks."""
        return self._operation is None or self._operation.done()

    def sleep(self, seconds: float) -> None:
        """Return once it has ended, or after so many seconds."""
        if self._operation is not None:
            self._operation.sleep(seconds)

    def finish(self) -> str:
        """Make the results of an operation that is `done` usable; return "", or the words of its failure."""
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
        """Return what is under way as a new object, for the reaper; here it counts as failed from now on."""
        taken = Pending(self.what, self._operation, self.tensors)
        self._operation, self.tensors = _Retired(), ()
        return taken


class _Retired:
    """Stands in for the operation of a retired group."""

    def done(self) -> bool:
        return True

    def sleep(self, seconds: float) -> None:
        """Return at once: it is done."""

    def finish(self) -> None:
        raise RuntimeError("its group is retired")


def is_late(waited_s: float, timeout_s: float) -> bool:
    """Tell whether a wait that failed had lasted its full time; the transport's clock started a little earlier."""
    return waited_s >= 0.95 * timeout_s


def make_halt_check(halt: threading.Event | HaltCheck | None) -> HaltCheck:
    """Return the check behind an event, a callable, or nothing (never halted)."""
    if halt is None:
        return lambda: False
    return halt.is_set if isinstance(halt, threading.Event) else halt


class Communicator:
    """The group of one generation. This base class is the world of one; each transport overrides the operations.

    Not thread-safe: one thread (the training thread) starts and waits. Only `sever` may be called from another one.
    """

    #: Where the tensors of its operations must lie.
    device = torch.device("cpu")
    #: After so many seconds an operation ends by itself.
    timeout_s = math.inf
    #: where the waiting thread says so
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
        """Level by level, how many members of a group there go on with a part each (see planning.levels)."""
        return (self.size,)

    @property
    def groups(self) -> tuple[Communicator, ...]:
        """This rank's group on each level that it is on, lowest first; where all meet at once, this one alone."""
        return (self,)

    def start_all_to_all(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: Sequence[int] | None = None,
        input_splits: Sequence[int] | None = None,
    ) -> Pending:
        """Start sending part r of `input` to rank r, and receiving rank r's part as part r of `output`.

        Args:
            output, input: contiguous, same dtype; they must not overlap, and stay untouched until `wait` returns.
            output_splits, input_splits: rows (first dimension) per rank; None for equal parts.
        """
        output.copy_(input)
        return Pending("all_to_all", None)

    def start_all_gather(self, output: torch.Tensor, input: torch.Tensor) -> Pending:
        """Start gathering every rank's `input`, `(n,)`, into `output`, `(size * n,)`, in rank order.

        `input` may be this rank's own part of `output`.
        """
        if output.data_ptr() != input.data_ptr():
            output.copy_(input)
        return Pending("all_gather", None)

    def start_gather_from_owners(self, output: torch.Tensor, input: torch.Tensor, owners: int) -> Pending:
        """Start bringing the parts of the first so many ranks, each `(n,)`, to all: `output` is `(owners * n,)`.

        `input` may be this rank's own part of `output`; of another rank it is empty.
        """
        if owners == self.size:
            return self.start_all_gather(output, input)
        part = output.numel() // owners
        received = [part] * owners + [0] * (self.size - owners)
        return self.start_all_to_all(output, input.repeat(self.size), received, [input.numel()] * self.size)

    def start_broadcast(self, tensor: torch.Tensor, root: int) -> Pending:
        """Start bringing one rank's tensor to all others, in place; contiguous."""
        sending = self.rank == root
        output = tensor.new_empty(0) if sending else tensor.view(-1)
        input = tensor.view(-1).repeat(self.size - 1) if sending else tensor.new_empty(0)
        sent = [tensor.numel() * (sending and rank != root) for rank in range(self.size)]
        received = [tensor.numel() * (rank == root and not sending) for rank in range(self.size)]
        return self.start_all_to_all(output, input, received, sent)

    def start_send(self, tensor: torch.Tensor, to: int, tag: int = 0) -> Pending:
        """Start sending a contiguous tensor to one rank, which receives it under the same tag."""
        raise NotImplementedError(f"{type(self).__name__} cannot send to one rank alone")

    def start_receive(self, tensor: torch.Tensor, source: int | None, tag: int = 0) -> Pending:
        """Start receiving what one rank sends under this tag, any rank where `source` is None; in place."""
        raise NotImplementedError(f"{type(self).__name__} cannot receive from one rank alone")

    def prefers_reduce_scatter(self, input: torch.Tensor) -> bool:
        """Tell whether a sum over all ranks of this size and type is better left to `start_reduce_scatter`."""
        return False

    def start_reduce_scatter(self, output: torch.Tensor, input: torch.Tensor) -> Pending:
        """Start adding up part r of `input` over all ranks at rank r, in an order that is the transport's own.

        Of use only where `adds_up` says so. Arguments are as for `start_all_to_all` with equal parts.
        """
        raise NotImplementedError(f"{type(self).__name__} has no reduction of its own")

    def wait(self, pending: Pending) -> None:
        """Wait until an operation has completed.

        An operation that has completed counts, even if the generation was halted meanwhile.

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
        """Return once an operation is done, and say meanwhile that it is waited for."""
        self.progress.wait(pending.what, self.size, sum(tensor.nbytes for tensor in pending.tensors))
        try:
            while not pending.done():
                # It may complete between the two looks; then the promise is that it counts.
                if self.halted() and not pending.done():
                    raise HaltedError(f"generation {self.generation} was halted in {pending.what}")
                pending.sleep(HALT_POLL_S)
                self.progress.look()
        finally:
            self.progress.go_on()

    def report_waits_to(self, progress: ProgressSlot) -> None:
        """Say from now on where the thread that uses this communicator waits in it."""
        self.progress = progress

    @property
    def sockets(self) -> tuple[GroupSockets, ...]:
        """The connections of its groups, where they are known."""
        return ()

    def sever(self) -> None:
        """Break the connections to all peers, so that whoever waits for this rank learns it at once. Any thread."""

    def retire(self, *, sever: bool = True) -> None:
        """Give up the group: to be called by the thread that used it, once, after a failure or a swap.

        Args:
            sever: break the connections too. False after a swap, where peers may still finish the last operation.
        """

    def _on_ended(self, pending: Pending) -> None:
        """Called by `wait` once an operation has ended, well or badly."""


class LocalCommunicator(Communicator):
    """The world of one: nothing to send, nobody to wait for."""

    def __init__(self, *, generation: int = 0, halt: threading.Event | HaltCheck | None = None) -> None:
        super().__init__(rank=0, size=1, generation=generation, halt=halt)
