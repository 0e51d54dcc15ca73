"""Refuses steps of the protected optimizers, and of their schedulers, that the script makes itself.

Such lines are left over from a plain loop. Each worker would run them on its own, so replicas would differ.
"""

from __future__ import annotations

import gc
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from typing import Any, cast

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from holdfast.errors import BadInputError, StepUseError
from holdfast.runtime.script_line import find_call_line, find_script_line, find_variable_name
from holdfast.runtime.state.optimizers import Optimizers

#: bounds of the search for schedulers inside objects of `extra`: levels (each nested scheduler takes two), and objects
_DEPTH = 10
_OBJECTS = 10_000


class StepGuard:
    """Watches the optimizers of a job; they may only step inside `allow_steps`."""

    def __init__(self, optimizers: Optimizers, extra: Mapping[str, Any]) -> None:
        """Install a hook on each optimizer.

        Raises:
            BadInputError: a scheduler drives one of them and is not in `extra`.
        """
        self._optimizers = optimizers
        self._extra = extra
        self._stepping = False
        self._check_schedulers()
        self._scheduled = self._scheduler_marks()
        for optimizer in optimizers:
            optimizer.register_step_pre_hook(self._on_step)

    @contextmanager
    def allow_steps(self) -> Generator[None]:
        """Return a context in which the optimizers may step; outside of it, their `step()` raises StepUseError."""
        self._stepping = True
        try:
            yield
        finally:
            self._stepping = False

    def check(self) -> None:
        """Check that `extra` has all schedulers of the optimizers. Only done if, since the last check, an optimizer has
        got its first scheduler; else nothing is checked.

        Raises:
            BadInputError: one of them is not in `extra`.
        """
        scheduled = self._scheduler_marks()
        if scheduled != self._scheduled:
            self._check_schedulers()
            self._scheduled = scheduled

    def _on_step(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        """Refuse a step outside of `allow_steps`, before it changes anything.

        Raises:
            StepUseError: names the line of the script.
        """
        if self._stepping:
            return
        line = find_script_line()
        raise StepUseError(
            f"{line + ': ' if line else ''}{type(optimizer).__name__}.step() was called outside of step.apply(), which "
            "makes this step itself, with the gradients of all workers: remove the line"
        )

    def _scheduler_marks(self) -> list[bool]:
        """Return for each optimizer whether torch has marked its `step` for a scheduler."""
        return [hasattr(optimizer.step, "_wrapped_by_lr_sched") for optimizer in self._optimizers]

    def _check_schedulers(self) -> None:
        """Check that `extra` has every existing scheduler of the optimizers, directly or inside another object.

        Raises:
            BadInputError: one is missing; the message has its variable and its line in the script.
        """
        known = {id(scheduler) for scheduler in find_schedulers(self._extra.values())}
        missing = [one for one in find_attached_schedulers(self._optimizers) if id(one) not in known]
        parts = {id(part) for one in missing for part in find_schedulers(vars(one).values())}
        # The script has a name for a SequentialLR, and often none for its parts.
        for scheduler in (one for one in missing if id(one) not in parts):
            name = find_variable_name(scheduler)
            line = find_call_line(name, "step") or find_script_line()
            kind = type(scheduler).__name__
            raise BadInputError(
                f"{line + ': ' if line else ''}the {kind} {name + ' ' if name else ''}drives the learning rate of a "
                "protected optimizer and is not in extra, so a worker that joins or resumes would have another "
                f'learning rate: give job.protect(..., extra={{"scheduler": {name or "scheduler"}}}) and leave '
                "scheduler.step() out, step.apply() calls it"
            )


def find_attached_schedulers(optimizers: Iterable[Optimizer]) -> list[LRScheduler]:
    """Return all existing schedulers of these optimizers, each once; the garbage collector finds them."""
    found: list[LRScheduler] = []
    wanted = list(optimizers)
    holders: list[object] = gc.get_referrers(*wanted)
    dicts = [cast(object, one) for one in holders if type(one) is dict and "last_epoch" in one]
    holders += gc.get_referrers(*dicts) if dicts else []
    for one in holders:
        # The scheduler's own dict only appears here if something has accessed it.
        if issubclass(type(one), LRScheduler) and any(cast(LRScheduler, one).optimizer is o for o in wanted):
            found.append(cast(LRScheduler, one))
    return list({id(one): one for one in found}.values())


def find_schedulers(things: Iterable[object]) -> list[LRScheduler]:
    """Return the schedulers among these objects and inside them: in dicts, lists, tuples and attributes, such as in a
    `SequentialLR`. Optimizers are not searched; depth and number of objects are limited.
    """
    found: list[LRScheduler] = []
    seen: set[int] = set()
    level = list(things)
    for _ in range(_DEPTH):
        following: list[object] = []
        for thing in level:
            if id(thing) in seen or len(seen) > _OBJECTS:
                continue
            seen.add(id(thing))
            if issubclass(type(thing), LRScheduler):
                found.append(cast(LRScheduler, thing))
            if isinstance(thing, dict):
                following += cast(dict[object, object], thing).values()
            elif isinstance(thing, list | tuple):
                following += cast(list[object], thing)
            elif not issubclass(type(thing), Optimizer):
                following += getattr(thing, "__dict__", {}).values()
        level = following
    return found
