"""Checks of the objects that a script protects: each refusal is one sentence, with the remedy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import TypeVar, cast

import torch
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from holdfast.errors import BadInputError
from holdfast.runtime.dtensor.local import local_of
from holdfast.runtime.state.optimizers import Optimizers, parameters_of, required_arguments
from holdfast.runtime.tensors import named_modules, strip_wrapper_prefixes

F = TypeVar("F")

_NAMED = 3
#: torch's modules by class name, with the remedy; not imported, because that takes seconds
_REFUSED = {
    "DistributedDataParallel": "drop the wrapper and give the module in it, holdfast reduces the gradients itself",
    "DataParallel": "drop the wrapper and give the module in it, each accelerator has a worker of its own",
    "FullyShardedDataParallel": "drop the wrapper and give the module in it; to shard it, call fully_shard() with "
    'mesh=job.mesh["shard"] and give holdfast.init(layout=holdfast.Layout(shard=N))',
    "FSDPModule": "every worker holds the whole model; leave fully_shard() out, or give "
    "holdfast.init(layout=holdfast.Layout(shard=N))",
    "SyncBatchNorm": "leave convert_sync_batchnorm() out, running statistics are combined over all workers",
}
_SHARDED, _FULLY_SHARDED = "DTensor", "FSDPModule"


def check_model(model: object, device: torch.device, *, has_layout: bool = False) -> None:
    """Refuse a model that cannot be reduced, sent or saved as it is.

    Args:
        model: the script's model.
        device: the model's required device.
        has_layout: whether a replica may use several workers of a node (layouts).

    Raises:
        BadInputError: it is not a module, or it is wrapped, sharded, on another device, not initialized, or shares
            memory.
    """
    if not isinstance(model, torch.nn.Module):
        raise BadInputError(
            f"the model is a {type(model).__name__}: give the torch.nn.Module that it computes with, and call the "
            f"{type(model).__name__} in the loop"
        )
    check_wrappers(model, has_layout=has_layout)
    for name, parameter in model.named_parameters():
        _check_parameter(name, parameter, device, has_layout=has_layout)
    _check_memory(model.named_parameters())


def check_wrappers(model: torch.nn.Module, *, has_layout: bool) -> None:
    """Refuse modules of torch that would reduce gradients or statistics themselves, such as DistributedDataParallel,
    and FSDP2 in a job without a layout.

    Raises:
        BadInputError: the model contains one.
    """
    for name, module in named_modules(model):
        subject = f"module {name!r}" if name else "the model"
        for kind in _torch_class_names(module):
            if kind in _REFUSED and not (kind == _FULLY_SHARDED and has_layout):
                raise BadInputError(f"{subject} is torch's {kind}: {_REFUSED[kind]}")


def _check_parameter(name: str, parameter: torch.nn.Parameter, device: torch.device, *, has_layout: bool) -> None:
    """Refuse a parameter that cannot be reduced, sent or saved.

    Raises:
        BadInputError: it is a DTensor although the job has no layout, has no shape yet, is on another device, or
            repeats elements in memory.
    """
    if not has_layout and _SHARDED in (*_torch_class_names(parameter), *_torch_class_names(parameter.data)):
        raise BadInputError(
            f"parameter {name!r} is a DTensor: every worker holds the whole model, so leave out what shards it "
            "(distribute_tensor, parallelize_module, fully_shard), or give "
            "holdfast.init(layout=holdfast.Layout(shard=N, tensor=M))"
        )
    if is_lazy(parameter):
        raise BadInputError(f"parameter {name!r} has no shape yet: let a batch run through the model first")
    if parameter.device != device:
        raise BadInputError(
            f"parameter {name!r} is on {parameter.device} and this worker's device is {device}: call "
            "model.to(job.device) before the optimizer is made"
        )
    here = local_of(parameter)
    if any(size > 1 and stride == 0 for size, stride in zip(here.shape, here.stride(), strict=True)):
        raise BadInputError(f"parameter {name!r} repeats elements in memory (expand): make it of a clone()")


def _check_memory(parameters: Iterable[tuple[str, torch.nn.Parameter]]) -> None:
    """Refuse parameters that overlap in memory: each would be updated, and sent, as if it were separate.

    One parameter in several places of a model, as with tied weights, counts as one.

    Raises:
        BadInputError: two parameters overlap.
    """
    spans: list[tuple[int, int, str]] = []
    for name, parameter in parameters:
        here = local_of(parameter)
        reach = sum((size - 1) * stride for size, stride in zip(here.shape, here.stride(), strict=True))
        if here.numel():
            begin = here.data_ptr()
            spans.append((begin, begin + (reach + 1) * here.element_size(), name))
    for (_, end, first), (begin, _, second) in pairwise(sorted(spans)):
        if begin < end:
            raise BadInputError(
                f"parameters {first!r} and {second!r} share memory: give each its own (clone()), or tie them by using "
                "one parameter in both places"
            )


def _torch_class_names(thing: object) -> list[str]:
    """Return the names of an object's classes that are torch's."""
    return [kind.__name__ for kind in cast(type, type(thing)).__mro__ if kind.__module__.split(".")[0] == "torch"]


def check_extra(extra: Mapping[str, object], optimizers: Optimizers, *, has_after_apply: bool) -> None:
    """Refuse objects in `extra` that could not do their work there.

    Args:
        has_after_apply: whether the script has an `after_apply`.

    Raises:
        BadInputError: an optimizer, a schedule of an unprotected one, or a schedule that needs a metric and gets none.
    """
    protected = [id(optimizer) for optimizer in optimizers]
    for name, thing in extra.items():
        if isinstance(thing, Optimizer):
            raise BadInputError(
                f"extra[{name!r}] is an optimizer, which would never step: give all of them by name, such as "
                'optimizer={"generator": a, "critic": b}, and their order as updates=("critic", "generator")'
            )
        if isinstance(thing, LRScheduler) and id(thing.optimizer) not in protected:
            raise BadInputError(
                f"extra[{name!r}] is a {type(thing).__name__} of an optimizer that is not protected, so its "
                "learning rate is never used: make it of the one that is given as optimizer=..."
            )
        if isinstance(thing, LRScheduler) and needs_metric(thing) and not has_after_apply:
            raise BadInputError(
                f"extra[{name!r}] is a {type(thing).__name__}; its step() needs a metric: call it in a function that "
                "is given as protect(..., after_apply=...), such as scheduler.step(step.loss)"
            )


def check_function(after_apply: F) -> F:
    """Return the script's function for its part of a step, or None if it gave none.

    Raises:
        BadInputError: it cannot be called.
    """
    if after_apply is not None and not callable(after_apply):
        raise BadInputError(f"after_apply is a {type(after_apply).__name__}: give a function of the step")
    return after_apply


def needs_metric(scheduler: LRScheduler) -> bool:
    """Return whether a scheduler's step needs an argument, which only the script can give."""
    return bool(required_arguments(type(scheduler).step))


def frozen_warning(optimizers: Optimizers) -> str:
    """Return a warning that names an optimizer with only frozen parameters, or ""."""
    for name, optimizer in optimizers.by_name.items():
        if not any(parameter.requires_grad for parameter in parameters_of(optimizer)):
            return (
                f"optimizer {name!r} has no parameter that requires a gradient: its steps change nothing until "
                "requires_grad_(True) is called on one of them"
            )
    return ""


def untrained_warning(model: torch.nn.Module, optimizers: Optimizers) -> str:
    """Return a warning that names the first parameters that require a gradient and are in no optimizer, or ""."""
    trained = {id(parameter) for parameter in optimizers.parameters}
    named = [
        strip_wrapper_prefixes(name) for name, p in model.named_parameters() if p.requires_grad and id(p) not in trained
    ]
    if not named:
        return ""
    more = f" and {len(named) - _NAMED} more" if len(named) > _NAMED else ""
    return (
        f"no optimizer has {', '.join(named[:_NAMED])}{more}: they require a gradient and will never change; give them "
        "to an optimizer, or call requires_grad_(False) on them"
    )
