"""Faults that need a session's parts: its generation, its connections, its state."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from holdfast.runtime.faults.orders import Faults
from holdfast.runtime.state.state import TrainingState

if TYPE_CHECKING:
    from holdfast.runtime.generation.resources import SharedContext


def register_fault_handlers(faults: Faults, shared: SharedContext, state: TrainingState) -> None:
    """Register the session's handlers of three injected faults.

    hold blocks until the generation is over, drop breaks the connections to peers, and corrupt flips a bit of the
    state.
    """

    def hold() -> None:
        """Block the training thread until the generation is over."""
        with shared.changed:
            shared.wait_for(shared.machine.generation, lambda: None)

    def drop() -> None:
        """Break the connections to all peers, if there are groups."""
        with shared.changed:
            resources = shared.resources.of(shared.machine.generation)
            groups = resources.groups if resources is not None else None
        if groups is not None:
            groups.domain.sever()
            groups.world.sever()

    def corrupt() -> None:
        """Flip a bit of the first tensor of the state, in place."""
        flip_bit(next(tensor for tensor in state.capture().tensors if tensor.numel()))

    faults.register_actions(hold=hold, drop=drop, corrupt=corrupt)


#: In the second highest byte: a high bit of the mantissa in every common floating-point type.
_BIT = 0x08


def flip_bit(tensor: torch.Tensor) -> None:
    """Flip a high bit of the mantissa of the first element, in place; the tensor must not be empty."""
    first = (0,) * tensor.dim()
    value = tensor[first].reshape(1).clone()
    value.view(torch.uint8)[max(0, tensor.element_size() - 2)] ^= _BIT
    with torch.no_grad():
        tensor[first] = value[0]
