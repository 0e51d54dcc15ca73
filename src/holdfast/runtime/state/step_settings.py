"""Saves the settings that a script may change in its loop before a step, and restores them before the step is repeated.

The script's loop body runs again with each attempt at a step, and with each shadow step of a standby: a learning rate
that it halves would be halved twice, a parameter group that it adds would be added twice. So before each attempt, and
before the state is sent or saved, the settings are restored to those before the first attempt.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any, TypeGuard, cast

import torch
from torch.nn import Parameter
from torch.optim import Optimizer


class StepSettings:
    """The optimizers' parameter groups and options, and which parameters require a gradient, before a step.

    Args:
        optimizers: All optimizers of the job.
        parameters: All parameters that the script may freeze or unfreeze.
    """

    def __init__(self, optimizers: Iterable[Optimizer], parameters: Iterable[Parameter]) -> None:
        self._optimizers = list(optimizers)
        self._parameters = list(parameters)
        #: the parameter groups of each optimizer before the step under way; None between two steps
        self._groups: list[list[_SavedGroup]] | None = None
        #: whether each of `_parameters` required a gradient then
        self._required: list[bool] = []

    def start_attempt(self) -> None:
        """Save the settings before the first attempt at a step; restore them before each further one."""
        if self._groups is None:
            self.save()
        else:
            self.restore()

    def save(self) -> None:
        """Save the settings as they are now."""
        self._groups = [[_SavedGroup(group) for group in optimizer.param_groups] for optimizer in self._optimizers]
        self._required = [parameter.requires_grad for parameter in self._parameters]

    def restore(self) -> None:
        """Undo all changes since the settings were saved: of groups, also added or removed ones, of their options, and
        of which parameters require a gradient. Drop the optimizer state of parameters that were added.

        Do nothing between two steps.
        """
        if self._groups is None:
            return
        for optimizer, saved in zip(self._optimizers, self._groups, strict=True):
            changed = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            optimizer.param_groups[:] = [group.restore() for group in saved]
            restored = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
            for parameter in changed:
                if id(parameter) not in restored:
                    optimizer.state.pop(parameter, None)
        for parameter, required in zip(self._parameters, self._required, strict=True):
            if parameter.requires_grad != required:
                parameter.requires_grad_(required)

    def on_applied(self) -> None:
        """The step is applied, so the changes for it are final."""
        self._groups = None


class _SavedGroup:
    """The contents of one parameter group.

    `restore` fills the same dict, list of parameters and tensors: schedulers and CUDA graphs refer to these objects.
    """

    def __init__(self, group: dict[str, Any]) -> None:
        self._group = group
        self._list: list[Parameter] = group["params"]
        self._parameters = list(self._list)
        self._options = {name: _copy_container(value) for name, value in group.items() if name != "params"}
        self._tensors = [(value, value.detach().clone()) for value in group.values() if is_scalar_tensor(value)]

    @torch.no_grad()
    def restore(self) -> dict[str, Any]:
        """Restore the group's parameters, options and the values of option tensors in place, in the same objects;
        return the group.
        """
        self._list[:] = self._parameters
        self._group.clear()
        self._group["params"] = self._list
        self._group.update({name: _copy_container(value) for name, value in self._options.items()})
        for tensor, value in self._tensors:
            tensor.copy_(value)
        return self._group


def is_scalar_tensor(value: object) -> TypeGuard[torch.Tensor]:
    """Whether an option is a tensor with one element, such as a learning rate, which a script may change in place."""
    return isinstance(value, torch.Tensor) and value.numel() == 1


def _copy_container(value: object) -> object:
    """Return a shallow copy of a container, which a script may change in place; return other values unchanged."""
    return copy.copy(cast(object, value)) if isinstance(value, list | dict | set) else value
