"""Runs each optimizer's step once without memory, so that torch has planned its operations on sharded tensors.

For each operation and shape, torch plans once how to run it on shards: about 0.3 s of processor time for a small GPT. A
joined worker would spend that time in its first step, while all others wait.
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
    """Run a step of each of torch's own optimizers on tensors without memory, so that torch plans its operations on
    sharded parameters before the first real step. Parameters and state do not change.

    Other optimizers are skipped, because their steps may change more than that. So are plain parameters, and all on a
    GPU: steps there are operations on lists of tensors, and need memory. An optimizer whose step fails is only logged.
    """
    for optimizer in optimizers:
        if type(optimizer).__module__.split(".")[0] == "torch":
            try:
                _step_on_meta(optimizer)
            except (RuntimeError, TypeError, ValueError) as error:
                # an optimizer that reads values: its first step stays slow
                logger.debug("the first step of %s cannot be planned in advance: %s", type(optimizer).__name__, error)


def _step_on_meta(optimizer: Optimizer) -> None:
    """Run the step of a copy of the optimizer, without state and hooks, on parameters without memory.

    Only sharded parameters on the CPU take part, one of each kind.
    """
    stand_in: Any = copy.copy(optimizer)
    stand_in.state = defaultdict(dict)
    stand_in._optimizer_step_pre_hooks, stand_in._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    kinds: dict[object, torch.nn.Parameter] = {}
    groups: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        parameters = [_make_meta_parameter(one, kinds) for one in group["params"] if _is_spread_here(one)]
        groups.append(group | {"params": list(dict.fromkeys(parameters))})
    stand_in.param_groups = groups
    # Not its own `step`: schedulers replace that by one that is bound to the optimizer itself.
    type(optimizer).step(stand_in)


def _is_spread_here(parameter: torch.Tensor) -> bool:
    return is_dtensor(parameter) and parameter.requires_grad and parameter.device.type == "cpu"


def _make_meta_parameter(parameter: torch.Tensor, kinds: dict[object, torch.nn.Parameter]) -> torch.nn.Parameter:
    """Return a parameter of the same kind as a sharded one, with a gradient, on the meta device.

    Args:
        kinds: the parameters made so far, by sharding and dtype; for a known kind that one is returned, a new one is
            added.
    """
    spread: Any = parameter
    kind = spread._spec, parameter.dtype
    if kind not in kinds:
        here = torch.empty_like(local_of(parameter).detach(), device="meta")
        kinds[kind] = torch.nn.Parameter(wrap_like(here, parameter))
        kinds[kind].grad = wrap_like(here, parameter)
    return kinds[kind]
