"""How torch does an optimizer's step on tensors that are spread over a unit, found out before the first one is due.

For each operation and each shape torch works out once how to do it on parts of tensors: about 0.3 s of processor time
for a small GPT. Whoever joins would do that at the end of its first step, and all others would wait for it.
"""

from __future__ import annotations

import copy
import logging
from collections import OrderedDict, defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch.optim import Optimizer

from holdfast.runtime.dtensor.local import is_dtensor, local_of, wrap_like

logger = logging.getLogger(__name__)


def dry_run_steps(optimizers: Iterable[Optimizer]) -> None:
    """Let each of torch's own optimizers do a step on tensors of the same kinds without memory; nothing is changed.

    Others are left alone: what their steps change beside parameters and state is not known. So is what is on a GPU:
    steps there are operations on lists of tensors, and need memory.
    """
    for optimizer in optimizers:
        if type(optimizer).__module__.split(".")[0] == "torch":
            try:
                _step_on_meta(optimizer)
            except (RuntimeError, TypeError, ValueError) as error:
                # (one that looks at values: it does its first step as slowly as it would have)
                logger.debug("the first step of %s is not foreseen: %s", type(optimizer).__name__, error)


def _step_on_meta(optimizer: Optimizer) -> None:
    stand_in: Any = copy.copy(optimizer)
    stand_in.state = defaultdict(dict)
    stand_in._optimizer_step_pre_hooks, stand_in._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    kinds: dict[object, torch.nn.Parameter] = {}
    groups: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        parameters = [_make_meta_parameter(one, kinds) for one in group["params"] if _is_spread_here(one)]
        groups.append(group | {"params": list(dict.fromkeys(parameters))})
    stand_in.param_groups = groups
    # (not its own `step`: schedules put another one in that place, which is bound to the optimizer itself)
    type(optimizer).step(stand_in)


def _is_spread_here(parameter: torch.Tensor) -> bool:
    return is_dtensor(parameter) and parameter.requires_grad and parameter.device.type == "cpu"


def _make_meta_parameter(parameter: torch.Tensor, kinds: dict[object, torch.nn.Parameter]) -> torch.nn.Parameter:
    """Return a parameter of the same kind, with a gradient; those of one kind are one."""
    spread: Any = parameter
    kind = spread._spec, parameter.dtype
    if kind not in kinds:
        here = torch.empty_like(local_of(parameter).detach(), device="meta")
        kinds[kind] = torch.nn.Parameter(wrap_like(here, parameter))
        kinds[kind].grad = wrap_like(here, parameter)
    return kinds[kind]
