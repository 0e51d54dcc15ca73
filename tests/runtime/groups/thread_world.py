"""Communicators of threads in one process, with random delays, for tests of code that uses collectives."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import torch

from holdfast.planning.levels import compute_levels
from holdfast.runtime.groups.communicator import Communicator, HaltCheck, Operation, Pending
from holdfast.runtime.groups.hierarchical import HierarchicalCommunicator


class _Exchange:
    """The inputs of a group's members, operation by operation."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.changed = threading.Condition()
        self.operations: list[dict[int, list[torch.Tensor]]] = []
        #: Outputs of operations that no thread has waited for until their end.
        self.unfinished: dict[_ThreadOperation, Sequence[torch.Tensor]] = {}

    def put(self, number: int, rank: int, parts: list[torch.Tensor]) -> dict[int, list[torch.Tensor]]:
        with self.changed:
            while len(self.operations) <= number:
                self.operations.append({})
            self.operations[number][rank] = parts
            self.changed.notify_all()
            return self.operations[number]


class _ThreadOperation(Operation):
    def __init__(
        self, exchange: _Exchange, came: dict[int, list[torch.Tensor]], rank: int, outputs: Sequence[torch.Tensor]
    ) -> None:
        self._exchange, self._came, self._rank, self._outputs = exchange, came, rank, outputs
        exchange.unfinished[self] = outputs

    def done(self) -> bool:
        return len(self._came) == self._exchange.size

    def sleep(self, seconds: float) -> None:
        with self._exchange.changed:
            self._exchange.changed.wait_for(self.done, seconds)

    def finish(self) -> None:
        del self._exchange.unfinished[self]
        for rank, output in enumerate(self._outputs):
            output.copy_(self._came[rank][self._rank])


class ThreadCommunicator(Communicator):
    """One thread's end of a group."""

    def __init__(
        self, exchange: _Exchange, rank: int, rng: Random, halt: HaltCheck | None, haunted: Sequence[torch.Tensor] = ()
    ) -> None:
        super().__init__(rank=rank, size=exchange.size, generation=1, halt=halt)
        self.issued = 0
        self._exchange = exchange
        self._rng = rng
        self._haunted = haunted

    def start_all_to_all(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: Sequence[int] | None = None,
        input_splits: Sequence[int] | None = None,
    ) -> Pending:
        time.sleep(self._rng.choice((0.0, 0.0, 3e-4)))
        assert output.dtype == input.dtype
        for buffer in self._haunted:
            buffer.fill_(torch.nan)
        sent = input.clone().split(list(input_splits or [len(input) // self.size] * self.size))
        outputs = output.split(list(output_splits or [len(output) // self.size] * self.size))
        came = self._exchange.put(self.issued, self.rank, list(sent))
        self.issued += 1
        return Pending("all_to_all", _ThreadOperation(self._exchange, came, self.rank, outputs), (output, input))

    def start_all_gather(self, output: torch.Tensor, input: torch.Tensor) -> Pending:
        return self.start_all_to_all(output, input.repeat(self.size))


def run_threads(
    nodes: Sequence[str],
    body: Callable[[Communicator], Any],
    *,
    seed: int,
    flat_up_to: int,
    fan_out: int,
    halts: dict[int, HaltCheck] | None = None,
    remains: list[torch.Tensor] | None = None,
) -> list[Any]:
    """Return the results of `body` in one thread per rank; raise the exception of any rank.

    Args:
        seed: determines the delays of the ranks.
        remains: buffers that earlier abandoned operations may still write to. Each operation issued here fills them
        with
            nonsense. Buffers abandoned here are added.
    """
    exchanges: dict[tuple[int, tuple[int, ...]], _Exchange] = {}
    lock = threading.Lock()
    results: dict[int, Any] = {}
    left: list[torch.Tensor] = [] if remains is None else remains
    haunted = list(left)

    def run(rank: int) -> None:
        halt = (halts or {}).get(rank)
        levels = compute_levels(nodes, rank, flat_up_to=flat_up_to, fan_out=fan_out)
        groups: list[Communicator] = []
        for number, group in enumerate(levels.groups):
            with lock:
                exchange = exchanges.setdefault((number, group), _Exchange(len(group)))
            groups.append(ThreadCommunicator(exchange, group.index(rank), Random(seed * 1009 + rank), halt, haunted))
        comm = HierarchicalCommunicator(
            groups, None, owners=levels.owners, rank=rank, size=len(nodes), generation=1, halt=halt
        )
        try:
            results[rank] = body(comm)
        except BaseException as error:  # noqa: BLE001 (raised again below)
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(nodes))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for exchange in exchanges.values():
        for outputs in exchange.unfinished.values():
            left.extend(outputs)
    for result in results.values():
        if isinstance(result, BaseException):
            raise result
    return [results[rank] for rank in range(len(nodes))]
