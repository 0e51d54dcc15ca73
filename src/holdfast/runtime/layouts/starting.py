"""Initializes a sharded model that was created on the meta device, part by part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import Module, Parameter

from holdfast.errors import BadInputError
from holdfast.runtime.dtensor.local import is_dtensor, local_of
from holdfast.runtime.dtensor.replica_position import ReplicaPosition
from holdfast.runtime.layouts.boxes import find_box
from holdfast.runtime.tensors import strip_wrapper_prefixes

_NAMED = 3

#: initializes the parameters and buffers of one module, without its submodules
Initializer = Callable[[Module], object]


def materialize(
    model: Module, initializers: Sequence[Initializer], device: torch.device, place: ReplicaPosition
) -> None:
    """Allocate a model that was made on the meta device, and give it the same values as the whole model, in every bit.
    Values from before are lost.

    Each module resets its parameters as when it is created (`reset_parameters()`, if it has that method). Then
    `initializers` are called as by `Module.apply`: one after the other, each for every module, children first. One
    module's tensors are complete for the duration of the call, and this rank's part is kept. All ranks draw the random
    numbers of a whole model.

    Args:
        initializers: each fills a module's own tensors, without those of its submodules.
        device: the device to allocate the model on.
        place: this worker's position in its replica group, which decides its parts.

    Raises:
        BadInputError: a parameter or a buffer got no value, a sharded parameter only got a part, or an argument has
            another type.
    """
    _check_arguments(model, initializers)
    _allocate(model, device)
    filled: set[int] = set()
    with torch.no_grad():
        for initializer in (reset_parameters, *initializers):
            model.apply(lambda module, initializer=initializer: _fill_module(module, initializer, filled, place))
    named = (*model.named_parameters(), *model.named_buffers())
    missing = [repr(strip_wrapper_prefixes(name)) for name, tensor in named if id(tensor) not in filled]
    if missing:
        more = f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
        raise BadInputError(
            f"job.materialize(): {', '.join(missing[:_NAMED])}{more} got no value: give a function of a module that "
            "fills all its own tensors, as job.materialize(model, function)"
        )


def _check_arguments(model: object, initializers: Sequence[object]) -> None:
    """Refuse arguments of another type.

    Raises:
        BadInputError: the model is not a module, or an initializer cannot be called.
    """
    if not isinstance(model, Module):
        raise BadInputError(f"job.materialize() is given a {type(model).__name__}: give the torch.nn.Module to fill")
    for initializer in (initializer for initializer in initializers if not callable(initializer)):
        raise BadInputError(
            f"job.materialize(model, {initializer!r}): give functions of a module that fill its own tensors, as "
            "model.apply(function) would call them"
        )


def _allocate(model: Module, device: torch.device) -> None:
    """Allocate memory on `device` for all parameters and buffers of a model, without initializing it, and keep tied
    weights tied.

    `to_empty` makes a separate tensor for each place of a tied weight.
    """
    places: dict[int, list[tuple[dict[str, Any], str]]] = {}
    for module in model.modules():
        untyped: Any = module
        for held in (untyped._parameters, untyped._buffers):
            for name, one in held.items():
                places.setdefault(id(one), []).append((held, name))
    places.pop(id(None), None)
    model.to_empty(device=device)
    for (first, called), *others in places.values():
        for held, name in others:
            held[name] = first[called]


def reset_parameters(module: Module) -> None:
    """Call the module's own `reset_parameters()`, if it has that method; do nothing otherwise."""
    own: Any = getattr(module, "reset_parameters", None)
    if callable(own):
        own()


def _fill_module(module: Module, initializer: Initializer, filled: set[int], place: ReplicaPosition) -> None:
    """Call an initializer on a module whose own sharded parameters are whole meanwhile, and copy this rank's part of
    each changed one back into the parameter.

    Afterwards the module has its own parameters again, also if the initializer raised.

    Args:
        filled: ids of the parameters and buffers with values; the ones that the initializer wrote or replaced are
            added.

    Raises:
        BadInputError: a sharded or replaced parameter contains a NaN afterwards, so it was filled only in part.
    """
    untyped: Any = module
    held: dict[str, Parameter | None] = untyped._parameters
    kept: dict[str, torch.Tensor | None] = untyped._buffers
    own = {name: one for name, one in held.items() if one is not None}
    buffers = {name: one for name, one in kept.items() if one is not None}
    whole = {name: _make_whole(one) for name, one in own.items()}
    before = {name: one._version for name, one in (whole | buffers).items()}
    held.update(whole)
    try:
        initializer(module)
        found = {name: held[name] for name in own}
    finally:
        held.update(own)
    for name, one in own.items():
        value = found[name]
        if value is not None and (value is not whole[name] or value._version != before[name]):
            filled.add(id(one))
            _keep_local_part(name, one, value, place)
    filled.update(id(one) for name, one in buffers.items() if one._version != before[name])
    filled.update(id(one) for name, one in kept.items() if one is not None and one is not buffers.get(name))


def _make_whole(parameter: Parameter) -> Parameter:
    """Return a new parameter with the whole shape of a sharded one. Its values are not gathered. Other parameters are
    returned as they are.

    Floating-point values are NaN, to detect values that were not set; others are 0.
    """
    if not is_dtensor(parameter):
        return parameter
    here = local_of(parameter)
    room = torch.full(
        parameter.shape, torch.nan if here.is_floating_point() else 0, dtype=here.dtype, device=here.device
    )
    return Parameter(room, requires_grad=parameter.requires_grad)


def _keep_local_part(name: str, parameter: Parameter, value: torch.Tensor, place: ReplicaPosition) -> None:
    """Copy this rank's part of a whole `value` into a sharded parameter, or all of it into another one. Do nothing if
    the value is the parameter itself.

    Raises:
        BadInputError: the value contains a NaN, so it was filled only in part; or this rank's part is not a box.
    """
    if value is not parameter:
        if value.is_floating_point() and bool(value.isnan().any()):
            raise BadInputError(
                f"job.materialize(): parameter {name!r} of shape {tuple(parameter.shape)} was filled only in part, or "
                "from old values: only a part of these is on this rank, so a function of a module must fill all of it"
            )
        box = find_box(name, parameter, place)
        local_of(parameter).copy_(value[box.slices_in(type(box).of_whole(parameter.shape))])
