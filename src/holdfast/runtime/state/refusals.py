"""What a script may not protect: each refusal is one sentence, with the way out."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from holdfast.errors import BadInputError
from holdfast.runtime.state.optimizers import Optimizers, needed_arguments

_NAMED = 3


def check_extra(extra: Mapping[str, object], optimizers: Optimizers, *, follows: bool) -> None:
    """Look for what would never do in `extra` what it is for.

    Args:
        follows: the script has an `after_apply`.

    Raises:
        BadInputError: an optimizer, a schedule of one that is not protected, or one that needs a metric and gets none.
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
                f"extra[{name!r}] is a {type(thing).__name__} of an optimizer that is not protected, whose learning "
                "rate no step would use: make it of the one that is given as optimizer=..."
            )
        if isinstance(thing, LRScheduler) and needs_metric(thing) and not follows:
            raise BadInputError(
                f"extra[{name!r}] is a {type(thing).__name__}, whose step() needs a metric: call it in a function that "
                "is given as protect(..., after_apply=...), such as scheduler.step(step.loss)"
            )


def needs_metric(scheduler: LRScheduler) -> bool:
    """Return whether a scheduler's step needs to be told something: only the script knows what."""
    return bool(needed_arguments(type(scheduler).step))


def said_untrained(model: torch.nn.Module, optimizers: Optimizers) -> str:
    """Return a warning of parameters that require a gradient and are in no optimizer, "" where there are none."""
    trained = {id(parameter) for parameter in optimizers.parameters}
    named = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in trained]
    if not named:
        return ""
    more = f" and {len(named) - _NAMED} more" if len(named) > _NAMED else ""
    return (
        f"no optimizer has {', '.join(named[:_NAMED])}{more}: they require a gradient and will never change; give them "
        "to an optimizer, or call requires_grad_(False) on them"
    )
