"""Faults that need a session's parts: its generation, its connections, its state."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.runtime.faults.flipping import flip_bit
from holdfast.runtime.faults.orders import Faults
from holdfast.runtime.state.state import TrainingState

if TYPE_CHECKING:
    from holdfast.runtime.generation.resources import SharedContext


def register_fault_handlers(faults: Faults, shared: SharedContext, state: TrainingState) -> None:
    """Register the session's handlers of the faults hold, drop and corrupt."""

    def hold() -> None:
        """Wait until the generation is over."""
        with shared.changed:
            shared.wait_for(shared.machine.generation, lambda: None)

    def drop() -> None:
        """Break the connections to all peers."""
        with shared.changed:
            resources = shared.resources.of(shared.machine.generation)
            groups = resources.groups if resources is not None else None
        if groups is not None:
            groups.domain.sever()
            groups.world.sever()

    def corrupt() -> None:
        """Flip a bit of a parameter."""
        flip_bit(next(tensor for tensor in state.capture().tensors if tensor.numel()))

    faults.register_actions(hold=hold, drop=drop, corrupt=corrupt)
