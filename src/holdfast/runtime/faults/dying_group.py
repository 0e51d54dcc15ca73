"""Fault injection: a communicator on which faults strike in the middle of a collective."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from holdfast.runtime.faults.orders import Faults
from holdfast.runtime.groups.communicator import Communicator, Pending


class FaultingCommunicator(Communicator):
    """Executes due faults right after an all-to-all or a reduce-scatter was issued."""

    def __init__(self, inner: Communicator, faults: Faults, step: int, phase: str) -> None:
        super().__init__(rank=inner.rank, size=inner.size, generation=inner.generation, halt=inner.halted)
        self.device = inner.device
        self._inner = inner
        self._faults = faults
        self._step = step
        self._phase = phase

    @property
    def owners(self) -> tuple[int, ...]:
        return self._inner.owners

    @property
    def groups(self) -> tuple[Communicator, ...]:
        """The inner communicator's groups, with the same faults in each."""
        inner, faults, step, phase = self._inner, self._faults, self._step, self._phase
        return tuple(
            self if group is inner else FaultingCommunicator(group, faults, step, phase) for group in inner.groups
        )

    def start_all_to_all(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: Sequence[int] | None = None,
        input_splits: Sequence[int] | None = None,
    ) -> Pending:
        """Start it on the inner communicator, then execute the fault that is due in this phase of the step."""
        pending = self._inner.start_all_to_all(output, input, output_splits, input_splits)
        self._faults.strike_at(self._phase, self._step)
        return pending

    def start_all_gather(self, output: torch.Tensor, input: torch.Tensor) -> Pending:
        return self._inner.start_all_gather(output, input)

    def start_gather_from_owners(self, output: torch.Tensor, input: torch.Tensor, owners: int) -> Pending:
        return self._inner.start_gather_from_owners(output, input, owners)

    def prefers_reduce_scatter(self, input: torch.Tensor) -> bool:
        return self._inner.prefers_reduce_scatter(input)

    def start_reduce_scatter(self, output: torch.Tensor, input: torch.Tensor) -> Pending:
        """Start it on the inner communicator, then execute the fault that is due in this phase of the step."""
        pending = self._inner.start_reduce_scatter(output, input)
        self._faults.strike_at(self._phase, self._step)
        return pending

    def wait(self, pending: Pending) -> None:
        self._inner.wait(pending)
