"""Collectives of a device's tensors through host memory: several workers can share one GPU, without NCCL.

NCCL refuses two ranks on one device. Here each operation copies its input to pinned host memory, a communicator of CPU
tensors (gloo) exchanges it, and `wait` copies the result back to the device. Starting an operation therefore waits for
the kernels that produce its input. Sums are computed on the device, as always: only copies of data pass through gloo.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from holdfast.control.link.progress_page import ProgressSlot
from holdfast.runtime.groups.communicator import Communicator, Pending
from holdfast.runtime.groups.severing import GroupSockets

_NOTHING = torch.empty(0)


class _StagedPending(Pending):
    """An operation in progress in host memory, and the device tensor for its result."""

    __slots__ = ("inner", "output", "received")

    def __init__(self, inner: Pending, output: torch.Tensor, received: torch.Tensor) -> None:
        super().__init__(inner.what, None, inner.tensors)
        self.inner = inner
        self.output = output
        self.received = received

    def done(self) -> bool:
        return self.inner.done()

    def sleep(self, seconds: float) -> None:
        self.inner.sleep(seconds)


class StagedCommunicator(Communicator):
    """A communicator of a device's tensors on top of one of CPU tensors, with the same ranks and levels."""

    def __init__(self, inner: Communicator, device: torch.device) -> None:
        """Wrap a communicator.

        Args:
            inner: exchanges CPU tensors; retired together with this one.
            device: the device of the tensors of all operations.
        """
        super().__init__(rank=inner.rank, size=inner.size, generation=inner.generation, halt=inner.halted)
        self.device = device
        self.timeout_s = inner.timeout_s
        self._inner = inner
        #: empty if all ranks meet at once
        self._levels = tuple(StagedCommunicator(group, device) for group in inner.groups if group is not inner)

    @property
    def owners(self) -> tuple[int, ...]:
        return self._inner.owners

    @property
    def groups(self) -> tuple[Communicator, ...]:
        return self._levels or (self,)

    def start_all_to_all(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: Sequence[int] | None = None,
        input_splits: Sequence[int] | None = None,
    ) -> Pending:
        return self._start(
            lambda received, sent: self._inner.start_all_to_all(received, sent, output_splits, input_splits),
            output,
            input,
        )

    def start_all_gather(self, output: torch.Tensor, input: torch.Tensor) -> Pending:
        return self._start(self._inner.start_all_gather, output, input)

    def start_gather_from_owners(self, output: torch.Tensor, input: torch.Tensor, owners: int) -> Pending:
        return self._start(
            lambda received, sent: self._inner.start_gather_from_owners(received, sent, owners),
            output,
            input,
        )

    def start_broadcast(self, tensor: torch.Tensor, root: int) -> Pending:
        host = self._to_host(tensor)
        return _StagedPending(self._inner.start_broadcast(host, root), tensor, host)

    def start_send(self, tensor: torch.Tensor, to: int, tag: int = 0) -> Pending:
        return _StagedPending(self._inner.start_send(self._to_host(tensor), to, tag), _NOTHING, _NOTHING)

    def start_receive(self, tensor: torch.Tensor, source: int | None, tag: int = 0) -> Pending:
        host = self._host_buffer(tensor)
        return _StagedPending(self._inner.start_receive(host, source, tag), tensor, host)

    def wait(self, pending: Pending) -> None:
        """Wait for the exchange in host memory, then start to copy the result into the operation's device tensor, on
        the current stream. Does not wait for this copy.

        Raises:
            TypeError: this communicator did not start the operation.
            HaltedError, PeerLostError: see `Communicator.wait`.
        """
        if not isinstance(pending, _StagedPending):
            raise TypeError(f"broken invariant: {pending.what} was not started by this communicator")
        pending.inner.what = pending.what
        self._inner.wait(pending.inner)
        output, received = pending.output, pending.received
        pending.tensors, pending.output, pending.received = (), _NOTHING, _NOTHING
        # The allocator of pinned memory reuses `received` only after this copy.
        output.copy_(received, non_blocking=True)

    def report_waits_to(self, progress: ProgressSlot) -> None:
        self._inner.report_waits_to(progress)

    @property
    def sockets(self) -> tuple[GroupSockets, ...]:
        return self._inner.sockets

    def sever(self) -> None:
        self._inner.sever()

    def retire(self, *, sever: bool = True) -> None:
        self._inner.retire(sever=sever)

    def _start(
        self, start: Callable[[torch.Tensor, torch.Tensor], Pending], output: torch.Tensor, input: torch.Tensor
    ) -> Pending:
        """Copy `input` to host memory, and start the exchange there. `wait` copies the result into `output`."""
        received = self._host_buffer(output)
        return _StagedPending(start(received, self._to_host(input)), output, received)

    def _to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy in host memory, pinned for a CUDA tensor; waits until the device has produced the tensor."""
        host = self._host_buffer(tensor)
        host.copy_(tensor, non_blocking=True)
        if tensor.is_cuda:
            torch.cuda.current_stream(tensor.device).synchronize()
        return host

    def _host_buffer(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
