"""A stable process group for torch's objects, on a communicator that can be exchanged.

FSDP2, DTensor, meshes and functional collectives keep the groups they were made with, but a communicator lasts as long
as its generation. So torch gets an outer group, and its collectives run on the current communicator (rounds.py). If the
communicator is interrupted, `CollectiveLeftError` is raised in the forward or backward pass, or in any other caller.
After that every collective raises at once, until `swap` gives the outer group another communicator.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from holdfast.runtime.groups.communicator import CollectiveLeftError, Communicator, HaltedError, Pending
from holdfast.runtime.layouts import rounds as made
from holdfast.runtime.layouts.folding import parse_reduction
from holdfast.runtime.layouts.rounds import Rounds

#: Bound by pybind: methods are found by name at run time, and torch's stubs describe only one version.
_ProcessGroup: Any = dist.ProcessGroup
_Work: Any = dist.Work
_Future: Any = torch.futures.Future


_wait_tensor: Any = torch.ops._c10d_functional.wait_tensor


class OuterWork(_Work):
    """A collective in progress on an outer group. The communicator has the timeout."""

    def __init__(self, group: OuterGroup, communicator: Communicator, rounds: Rounds, results: Any) -> None:
        """Start the first round."""
        _Work.__init__(self)
        self._group = group
        self._communicator = communicator
        self._rounds: Rounds | None = rounds
        self._results: Any = results
        self._left: CollectiveLeftError | None = None
        self._pending: Sequence[Pending] = ()
        self._advance()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the collective's remaining rounds, and return True once its results are written. The timeout is
        ignored.

        If the collective was abandoned earlier, raise; or return False within the group's `discarding_left_work`.

        Raises:
            CollectiveLeftError: it was abandoned earlier, or is interrupted now; the latter abandons all work of the
                group.
        """
        while self._rounds is not None:
            try:
                for pending in self._pending:
                    self._communicator.wait(pending)
                self._advance()
            except CollectiveLeftError as error:
                self._group.mark_left(error)
                raise
        if self._left is not None and not self._group.is_discarding:
            raise HaltedError(str(self._left))
        return self._left is None

    def synchronize(self) -> None:
        """Wait for the end, as `wait`, which may raise."""
        self.wait()

    def is_completed(self) -> bool:
        """Return False if an operation of the present round is in progress. Otherwise run all remaining rounds, which
        waits for their operations, and return True. Also True if the collective was abandoned.

        Raises:
            CollectiveLeftError: it is interrupted now.
        """
        while self._rounds is not None:
            if not all(pending.done() for pending in self._pending):
                return False
            self.wait()
        return True

    def is_success(self) -> bool:
        """Return whether it has ended with results; False while it is in progress, and if it was abandoned."""
        return self._rounds is None and self._left is None

    def exception(self) -> CollectiveLeftError | None:
        """Return why it was abandoned; None if it was not."""
        return self._left

    def result(self) -> Any:
        """Return its output tensors, also before they are written; None after it was abandoned."""
        return self._results

    def get_future(self) -> Any:
        """Wait for the collective's end, and return a completed future with the output tensors. It is completed here,
        because gloo's threads must not call into Python.

        Raises:
            CollectiveLeftError: the collective was abandoned, or is interrupted now.
        """
        self.wait()
        future = _Future()
        future.set_result(self._results)
        return future

    def abandon(self, error: CollectiveLeftError) -> list[torch.Tensor]:
        """End this collective without results because of `error`, unless it has ended; waiting for it then raises. Drop
        all references to tensors, and return its output tensors.

        The communicator's operations in progress are not stopped.
        """
        rounds, self._rounds, self._pending = self._rounds, None, ()
        results, self._results = self._results, None
        if rounds is not None:
            self._left = error
            rounds.close()
        return _flatten_results(results)

    def _advance(self) -> None:
        """Start the next round without waiting for the present one, which must have completed. After the last one,
        write the results and remove this collective from its group's work in progress. Does nothing after the end.
        """
        if self._rounds is None:
            return
        pending = next(self._rounds, None)
        if pending is None:
            self._rounds, self._pending = None, ()
            self._group.on_work_ended(self)
        else:
            self._pending = pending


class OuterGroup(_ProcessGroup):
    """A process group for torch with an exchangeable communicator.

    One thread uses it, like its communicators. All ranks must call the same collectives in the same order.
    """

    def __init__(self, name: str, rank: int, size: int) -> None:
        """Create a group without a communicator.

        Args:
            name: unique in this process.
        """
        _ProcessGroup.__init__(self, rank, size)
        self._name = name
        self._communicator: Communicator | None = None
        self._under_way: list[OuterWork] = []
        #: a collective with a second exchange, which must come before any later collective
        self._unfinished: OuterWork | None = None
        #: why collectives raise until the next swap
        self.left_error: CollectiveLeftError | None = None
        #: whether waiting for left work is allowed, while torch discards it
        self.is_discarding = False
        #: output tensors of left work, until they are discarded
        self._void: list[torch.Tensor] = []

    @property
    def communicator(self) -> Communicator | None:
        """The current communicator; None before the first swap, and after `retire_communicator`."""
        return self._communicator

    def swap(self, communicator: Communicator, *, sever: bool = True) -> None:
        """Continue on another communicator. The previous one, if there is one, is retired, and collectives that are in
        progress on it are abandoned.

        Args:
            sever: whether to break the connections of the previous one; False if peers may still finish their last
                operation.

        Raises:
            ValueError: the communicator has another rank or size than this group, or is the present one.
        """
        if (communicator.rank, communicator.size) != (self.rank(), self.size()):
            raise ValueError(
                f"rank {communicator.rank} of {communicator.size} cannot serve rank {self.rank()} of "
                f"{self.size()} in group {self._name}"
            )
        if communicator is self._communicator:
            raise ValueError(f"group {self._name} is on this communicator already")
        self.retire_communicator(sever=sever)
        self._communicator, self.left_error = communicator, None

    def retire_communicator(self, *, sever: bool = True) -> None:
        """Retire the communicator, if there is one, and abandon its collectives in progress. Until the next swap, all
        collectives raise `HaltedError`.

        Args:
            sever: whether to break its connections, too.
        """
        communicator, self._communicator = self._communicator, None
        if self.left_error is None:
            self.mark_left(HaltedError(f"group {self._name} has no connections now"))
        if communicator is not None:
            communicator.retire(sever=sever)

    def mark_left(self, error: CollectiveLeftError) -> None:
        """Make every collective raise `HaltedError` with this error's message until the next swap, and abandon all that
        are in progress: ranks may not agree which collective is next.

        Their output tensors are kept until `discarding_left_work`.
        """
        # not the error itself, because its traceback refers to the script's tensors
        self.left_error = HaltedError(str(error))
        under_way, self._under_way, self._unfinished = self._under_way, [], None
        for work in under_way:
            self._void.extend(work.abandon(self.left_error))

    @contextmanager
    def discarding_left_work(self) -> Generator[None]:
        """Return a context in which `OuterWork.wait` returns False for collectives that were abandoned, instead of
        raising an error.

        On entry, make torch drop the abandoned collectives that it still keeps by their output tensors.
        """
        self.is_discarding = True
        try:
            # torch keeps works of functional collectives by their results until they are waited for
            while self._void:
                _wait_tensor(self._void.pop())
            yield
        finally:
            self.is_discarding = False

    def on_work_ended(self, work: OuterWork) -> None:
        """Remove a completed collective from those in progress, so that later ones do not wait for it. The collective
        itself calls this.
        """
        self._under_way = [one for one in self._under_way if one is not work]
        if self._unfinished is work:
            self._unfinished = None

    # -- what torch calls -------------------------------------------------------------------------------------------

    def getGroupName(self) -> str:
        return self._name

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupDesc(self) -> str:
        return "holdfast"

    def getBackendName(self) -> str:
        return "holdfast"

    @property
    def group_name(self) -> str:
        return self._name

    @property
    def group_desc(self) -> str:
        return "holdfast"

    @property
    def _device_types(self) -> list[torch.device]:
        return [self._communicator.device if self._communicator is not None else Communicator.device]

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> OuterWork:
        return self._start_work(made.all_gather(self._require_communicator(), output, input), output)

    def all_gather_single_coalesced(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> OuterWork:
        """Start to gather several tensors at the same time: all ranks' `inputs[i]`, in rank order, into `outputs[i]`.
        `opts` is ignored.

        Raises:
            CollectiveLeftError: no communicator is usable, or the collective is interrupted at once.
        """
        comm = self._require_communicator()
        each = [made.all_gather(comm, one, other) for one, other in zip(outputs, inputs, strict=True)]
        return self._start_work(made.run_together(each), outputs)

    def allgather(
        self, outputs: Sequence[Sequence[torch.Tensor]], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> OuterWork:
        """Start to gather each input: `outputs[i][r]` receives `inputs[i]` of rank r. `opts` is ignored.

        Raises:
            CollectiveLeftError: no communicator is usable, or the collective is interrupted at once.
        """
        comm = self._require_communicator()
        each = [made.all_gather_lists(comm, one, other) for one, other in zip(outputs, inputs, strict=True)]
        return self._start_work(made.run_together(each), outputs)

    def allgather_coalesced(
        self, outputs: Sequence[Sequence[torch.Tensor]], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> OuterWork:
        """Start `allgather` with the outputs listed by rank, then by input, instead of the other way round."""
        by_input = list(zip(*outputs, strict=True))
        return self.allgather(by_input, inputs, opts)

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any) -> OuterWork:
        reduction = parse_reduction(opts.reduceOp, self.size())
        return self._start_work(made.reduce_scatter(self._require_communicator(), output, input, reduction), output)

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any
    ) -> OuterWork:
        """Start to reduce and scatter several tensors at the same time: `outputs[i]` of rank r receives part r of all
        ranks' `inputs[i]`, reduced by `opts.reduceOp`.

        Raises:
            CollectiveLeftError: no communicator is usable, or the collective is interrupted at once.
        """
        comm, reduction = self._require_communicator(), parse_reduction(opts.reduceOp, self.size())
        each = [made.reduce_scatter(comm, one, other, reduction) for one, other in zip(outputs, inputs, strict=True)]
        return self._start_work(made.run_together(each), outputs)

    def reduce_scatter(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[Sequence[torch.Tensor]], opts: Any
    ) -> OuterWork:
        """Start `reduce_scatter_single_coalesced` with each input given as a list of parts, one for each rank; the
        parts are copied together.
        """
        joined = [torch.cat([part.reshape(-1) for part in parts]) for parts in inputs]
        return self.reduce_scatter_single_coalesced(outputs, joined, opts)

    def allreduce(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> OuterWork:
        """Start to reduce several tensors at the same time on all ranks, in place, by `opts.reduceOp`. Without options
        they are summed.

        Raises:
            CollectiveLeftError: no communicator is usable, or the collective is interrupted at once.
        """
        comm = self._require_communicator()
        reduction = parse_reduction(opts.reduceOp if opts is not None else dist.ReduceOp.SUM, comm.size)
        each = [made.all_reduce(comm, one, reduction) for one in tensors]
        goes_on = any(made.needs_two_rounds(comm.size, one) for one in tensors)
        return self._start_work(made.run_together(each), tensors, two_rounds=goes_on)

    allreduce_coalesced = allreduce

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        opts: Any = None,
    ) -> OuterWork:
        return self._start_work(
            made.all_to_all(self._require_communicator(), output, input, output_splits, input_splits), output
        )

    def alltoall(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any = None) -> OuterWork:
        return self._start_work(made.all_to_all_lists(self._require_communicator(), outputs, inputs), outputs)

    def broadcast(self, tensors: Sequence[torch.Tensor], opts: Any) -> OuterWork:
        """Start to send the tensors of rank `opts.rootRank` to all ranks, in place."""
        comm = self._require_communicator()
        return self._start_work(
            made.run_together([made.broadcast(comm, one, opts.rootRank) for one in tensors]), tensors
        )

    def scatter(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[Sequence[torch.Tensor]], opts: Any
    ) -> OuterWork:
        """Start to send part r of `inputs[0]` on rank `opts.rootRank` to rank r, into `outputs[0]`; other ranks have no
        inputs.
        """
        parts = inputs[0] if inputs else ()
        return self._start_work(made.scatter(self._require_communicator(), outputs[0], parts, opts.rootRank), outputs)

    def gather(self, outputs: Sequence[Sequence[torch.Tensor]], inputs: Sequence[torch.Tensor], opts: Any) -> OuterWork:
        """Start to send each rank's `inputs[0]` to rank `opts.rootRank`, into the tensors of `outputs[0]`; other ranks
        have no outputs.
        """
        into = outputs[0] if outputs else ()
        return self._start_work(made.gather(self._require_communicator(), into, inputs[0], opts.rootRank), into)

    def reduce(self, tensors: Sequence[torch.Tensor], opts: Any) -> OuterWork:
        """Start to reduce several tensors at the same time by `opts.reduceOp` on rank `opts.rootRank`, in place; other
        ranks' tensors stay unchanged.

        Raises:
            CollectiveLeftError: no communicator is usable, or the collective is interrupted at once.
        """
        comm, reduction = self._require_communicator(), parse_reduction(opts.reduceOp, self.size())
        each = [made.reduce(comm, one, reduction, opts.rootRank) for one in tensors]
        return self._start_work(made.run_together(each), tensors)

    def barrier(self, opts: Any = None) -> OuterWork:
        return self._start_work(
            made.all_reduce(self._require_communicator(), torch.zeros(1), parse_reduction(dist.ReduceOp.SUM, 1)), []
        )

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        self.barrier().wait()

    def send(self, tensors: Sequence[torch.Tensor], to: int, tag: int = 0) -> OuterWork:
        return self._start_work(made.send(self._require_communicator(), tensors[0], to, tag), tensors, in_order=False)

    def recv(self, tensors: Sequence[torch.Tensor], source: int, tag: int = 0) -> OuterWork:
        return self._start_work(
            made.receive(self._require_communicator(), tensors[0], source, tag), tensors, in_order=False
        )

    def recv_anysource(self, tensors: Sequence[torch.Tensor], tag: int = 0) -> OuterWork:
        return self._start_work(
            made.receive(self._require_communicator(), tensors[0], None, tag), tensors, in_order=False
        )

    # their names before torch 2.13
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    def _require_communicator(self) -> Communicator:
        """Return the present communicator.

        Raises:
            HaltedError: no communicator was given yet, or the last one was retired, or a collective on it was
                interrupted.
        """
        if self.left_error is not None:
            raise HaltedError(str(self.left_error))
        if self._communicator is None:
            raise HaltedError(f"group {self._name} has no connections yet")
        return self._communicator

    def _start_work(
        self, rounds: Rounds, results: Any, *, two_rounds: bool = False, in_order: bool = True
    ) -> OuterWork:
        """Start a collective's first round, and return the collective as work to wait for. If an earlier collective
        still has a second exchange in progress, wait for its end first, unless this one is not `in_order`.

        Args:
            rounds: the collective, from `rounds.py`.
            results: its output tensors.
            two_rounds: whether it may have a second exchange, which ranks could otherwise order differently from the
                next collective.
            in_order: whether it has the same position in all ranks' order; point-to-point operations do not.

        Raises:
            CollectiveLeftError: no communicator is usable, or this collective or the earlier one is interrupted now.
                Then all work of the group is abandoned.
        """
        communicator = self._require_communicator()
        if in_order and self._unfinished is not None:
            self._unfinished.wait()
        try:
            work = OuterWork(self, communicator, rounds, results)
        except CollectiveLeftError as error:
            self.mark_left(error)
            raise
        if not work.is_success():
            self._under_way.append(work)
            if two_rounds:
                self._unfinished = work
        return work


def _flatten_results(results: Any) -> list[torch.Tensor]:
    """Return all tensors in nested lists, in order; [] for None. A tensor alone is returned as a list of one."""
    if isinstance(results, torch.Tensor):
        return [results]
    return [tensor for one in results or () for tensor in _flatten_results(one)]
