"""Values for a model that is spread over a unit and never was whole: made on the meta device, filled part by part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import Module, Parameter

from holdfast.errors import BadInputError
from holdfast.runtime.dtensor.local import is_dtensor, local_of
from holdfast.runtime.dtensor.place import ReplicaPosition
from holdfast.runtime.layouts.boxes import find_box
from holdfast.runtime.tensors import strip_wrapper_prefixes

_NAMED = 3

#: gives what is one module's own the values that it begins with
Start = Callable[[Module], object]


def materialize(model: Module, starts: Sequence[Start], device: torch.device, place: ReplicaPosition) -> None:
    """Give a model that was made on the meta device memory and the values that it would have whole, in every bit.

    Each module resets its parameters as when it is made (`reset_parameters()`), then `starts` are called as by
    `Module.apply`: one after the other, each for every module, children first. What is a module's own is whole for so
    long, and what belongs here is kept. All places draw the same random numbers, those that a whole model would draw.

    Args:
        starts: fill what is a module's own, not what is of modules in it.
        device: where the model belongs.
        place: which part of it is here.

    Raises:
        BadInputError: a parameter or a buffer has got no value, or a parameter that is spread only some.
    """
    _check_arguments(model, starts)
    _allocate(model, device)
    filled: set[int] = set()
    with torch.no_grad():
        for start in (reset_parameters, *starts):
            model.apply(lambda module, start=start: _fill_module(module, start, filled, place))
    named = (*model.named_parameters(), *model.named_buffers())
    missing = [repr(strip_wrapper_prefixes(name)) for name, tensor in named if id(tensor) not in filled]
    if missing:
        more = f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
        raise BadInputError(
            f"job.materialize(): nothing has given {', '.join(missing[:_NAMED])}{more} a value: give a function of a "
            "module that fills all that is its own, as job.materialize(model, function)"
        )


def _check_arguments(model: object, starts: Sequence[object]) -> None:
    if not isinstance(model, Module):
        raise BadInputError(f"job.materialize() is given a {type(model).__name__}: give the torch.nn.Module to fill")
    for start in (start for start in starts if not callable(start)):
        raise BadInputError(
            f"job.materialize(model, {start!r}): give functions of a module that fill what is its own, as "
            "model.apply(function) would call them"
        )


def _allocate(model: Module, device: torch.device) -> None:
    """Have memory for all of a model; what it has in several places is one thing afterwards, too.

    (To torch each place is one of its own: weights that were tied would be no more.)
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
    """Have a module begin as torch's own do."""
    own: Any = getattr(module, "reset_parameters", None)
    if callable(own):
        own()


def _fill_module(module: Module, start: Start, filled: set[int], place: ReplicaPosition) -> None:
    """Let a function fill what is a module's own, whole, and keep what belongs here of what it has changed."""
    untyped: Any = module
    held: dict[str, Parameter | None] = untyped._parameters
    kept: dict[str, torch.Tensor | None] = untyped._buffers
    own = {name: one for name, one in held.items() if one is not None}
    buffers = {name: one for name, one in kept.items() if one is not None}
    whole = {name: _make_whole(one) for name, one in own.items()}
    before = {name: one._version for name, one in (whole | buffers).items()}
    held.update(whole)
    try:
        start(module)
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
    """Return room for all of a parameter that is spread, with no number in it; any other as it is."""
    if not is_dtensor(parameter):
        return parameter
    here = local_of(parameter)
    room = torch.full(
        parameter.shape, torch.nan if here.is_floating_point() else 0, dtype=here.dtype, device=here.device
    )
    return Parameter(room, requires_grad=parameter.requires_grad)


def _keep_local_part(name: str, parameter: Parameter, value: torch.Tensor, place: ReplicaPosition) -> None:
    if value is not parameter:
        if value.is_floating_point() and bool(value.isnan().any()):
            raise BadInputError(
                f"job.materialize(): parameter {name!r} of shape {tuple(parameter.shape)} was given values in part, or "
                "made of those it had: only a part of these is here, so a function of a module has to fill all of it"
            )
        box = find_box(name, parameter, place)
        local_of(parameter).copy_(value[box.slices_in(type(box).of_whole(parameter.shape))])
