"""The common part of communicators on a process group of torch: operations, timeout, end."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions

from holdfast.runtime.groups.abandoned_groups import GroupReaper
from holdfast.runtime.groups.communicator import Communicator, HaltCheck, HaltedError, Operation, Pending


class GroupCommunicator(Communicator, ABC):
    """All-to-all and all-gather on a raw process group, until it is retired. Each transport defines its operations."""

    def __init__(
        self,
        group: Any,
        *,
        generation: int,
        timeout_s: float,
        halt: threading.Event | HaltCheck | None,
        reaper: GroupReaper,
        device: torch.device = Communicator.device,
    ) -> None:
        """Take ownership of a group.

        Args:
            timeout_s: seconds after which an operation fails.
            reaper: destroys the group in the end.
        """
        super().__init__(rank=group.rank(), size=group.size(), generation=generation, halt=halt)
        self.device = device
        self._group: Any = group
        self.set_timeout(timeout_s)
        self._reaper = reaper

    def set_timeout(self, timeout_s: float) -> None:
        """Set the timeout of operations that start from now on, in seconds."""
        self.timeout_s = timeout_s
        self._timeout = timedelta(seconds=timeout_s)

    def start_all_to_all(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: Sequence[int] | None = None,
        input_splits: Sequence[int] | None = None,
    ) -> Pending:
        """Start the group's all-to-all, see `Communicator`; it has this communicator's timeout.

        Raises:
            HaltedError: the communicator is retired.
        """
        options = dist.AllToAllOptions()
        options.timeout = self._timeout
        work = self._require_group().alltoall_base(
            output, input, list(output_splits or ()), list(input_splits or ()), options
        )
        return self._make_pending("all_to_all", [work], output, input)

    def start_all_gather(self, output: torch.Tensor, input: torch.Tensor) -> Pending:
        """Start the group's all-gather, see `Communicator`; it has this communicator's timeout.

        Raises:
            HaltedError: the communicator is retired.
        """
        options = AllgatherOptions()
        options.timeout = self._timeout
        work = self._require_group()._allgather_base(output, input, options)
        return self._make_pending("all_gather", [work], output, input)

    def start_broadcast(self, tensor: torch.Tensor, root: int) -> Pending:
        return self._make_pending("broadcast", [self._broadcast(tensor, root)], tensor)

    def _broadcast(self, tensor: torch.Tensor, root: int) -> dist.Work:
        """Start to broadcast `tensor` from rank `root` into the `tensor` of the other ranks, with this communicator's
        timeout. Return torch's work.

        Raises:
            HaltedError: this communicator is retired.
        """
        options = dist.BroadcastOptions()
        options.timeout = self._timeout
        options.rootRank = root
        return self._require_group().broadcast([tensor], options)

    @abstractmethod
    def _make_operation(self, works: Sequence[dist.Work]) -> Operation:
        """Return one operation of this transport, which consists of these works."""

    def _make_pending(self, what: str, works: Sequence[dist.Work], *tensors: torch.Tensor) -> Pending:
        return Pending(what, self._make_operation(works), tensors)

    def _require_group(self) -> Any:
        """Return the group.

        Raises:
            HaltedError: it is retired.
        """
        if self._group is None:
            raise HaltedError(f"the group of generation {self.generation} is retired")
        return self._group

    def _detach_group(self) -> Any:
        """Return the group and retire it; None if it was retired before."""
        group, self._group = self._group, None
        return group
