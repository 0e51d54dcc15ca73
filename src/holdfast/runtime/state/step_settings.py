"""What a script may change in its loop before a step, kept so that an undone attempt at the step leaves nothing of it.

The script's loop body runs again with each attempt, and with each shadow step of a standby: a learning rate that it
halves would be halved twice, a parameter group that it adds would be added twice. So before each attempt, and before
the state is sent or saved, these settings are again as they were when the step was first given to the script.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeGuard, cast

import torch
from torch.nn import Parameter
from torch.optim import Optimizer

Group = dict[str, Any]


class StepSettings:
    """Parameter groups and their options, and which parameters require a gradient, before the step under way."""

    def __init__(self, optimizers: Iterable[Optimizer], parameters: Iterable[Parameter]) -> None:
        """Keep nothing yet.

        Args:
            parameters: all that the script may freeze or unfreeze.
        """
        self._optimizers = list(optimizers)
        self._parameters = list(parameters)
        #: gives back what was kept; None after a step was applied
        self._undo: Callable[[], None] | None = None

    def begin(self) -> None:
        """Begin an attempt: keep the settings if it is the first one at its step, else restore them."""
        if self._undo is None:
            self.keep()
        else:
            self._undo()

    def keep(self) -> None:
        """Keep the settings as they are now."""
        groups = [[_KeptGroup(group) for group in optimizer.param_groups] for optimizer in self._optimizers]
        required = [parameter.requires_grad for parameter in self._parameters]
        self._undo = lambda: self._restore(groups, required)

    def restore(self) -> None:
        """Undo what an attempt has changed, unless its step was applied."""
        if self._undo is not None:
            self._undo()

    def applied(self) -> None:
        """The step is applied, with all that the script has changed for it."""
        self._undo = None

    def _restore(self, groups: Sequence[Sequence[_KeptGroup]], required: Sequence[bool]) -> None:
        for optimizer, kept in zip(self._optimizers, groups, strict=True):
            before = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            optimizer.param_groups[:] = [group.restore() for group in kept]
            now = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
            for parameter in before:
                if id(parameter) not in now:
                    optimizer.state.pop(parameter, None)
        for parameter, requires in zip(self._parameters, required, strict=True):
            if parameter.requires_grad != requires:
                parameter.requires_grad_(requires)


class _KeptGroup:
    """One parameter group; the group's own dict, list of parameters and tensors stay what they are."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._parameters: list[Parameter] = group["params"]
        self._kept = list(self._parameters)
        self._options = {name: _copied(value) for name, value in group.items() if name != "params"}
        self._tensors = [(value, value.detach().clone()) for value in group.values() if is_number(value)]

    @torch.no_grad()
    def restore(self) -> Group:
        """Give the group its parameters and options back, and return it."""
        self._parameters[:] = self._kept
        self._group.clear()
        self._group["params"] = self._parameters
        self._group.update({name: _copied(value) for name, value in self._options.items()})
        for tensor, value in self._tensors:
            tensor.copy_(value)
        return self._group


def is_number(value: object) -> TypeGuard[torch.Tensor]:
    """Whether an option is a tensor of one number, such as a learning rate, which a script may change in place."""
    return isinstance(value, torch.Tensor) and value.numel() == 1


def _copied(value: object) -> object:
    """Return a copy of a container, which a script may change in place; anything else itself."""
    return copy.copy(cast(object, value)) if isinstance(value, list | dict | set) else value
