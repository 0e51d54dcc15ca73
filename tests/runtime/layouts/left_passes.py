"""Operations that only the scripts of these tests need; holdfast keeps groups as long as their replica group."""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import ExitStack

import torch
from torch.distributed.fsdp import FSDPModule

from holdfast.runtime.dtensor.local import is_counted_here, local_of
from holdfast.runtime.layouts.mesh import ReplicaMesh
from holdfast.runtime.tensors import compute_row_norms, named_modules


def replica_norm(tensors: Iterable[torch.Tensor], replica: ReplicaMesh) -> float:
    """Return the norm of a replica's tensors, equal on each of its ranks. All ranks must call it."""
    at = replica.layout.coordinates(replica.role.place)
    here = [
        float(compute_row_norms(local_of(tensor).reshape(1, -1), torch.float64)) ** 2
        for tensor in tensors
        if is_counted_here(tensor, at)
    ]
    total = torch.tensor([sum(here)], dtype=torch.float64)
    for group in replica.groups.values():
        group.allreduce([total]).wait()
    return math.sqrt(float(total))


def restart(model: torch.nn.Module, replica: ReplicaMesh) -> None:
    """Reset FSDP2's state after an abandoned forward or backward pass, so that the model can repeat it.

    The parameters' accumulated gradients stay as they are, possibly with parts of the abandoned attempt.
    """
    before = list(model.parameters())
    with ExitStack() as settling:
        for group in replica.groups.values():
            settling.enter_context(group.discarding_left_work())
        for root in _outermost(model):
            root.reset_iter_state()
    # FSDP2 reuses its gathered parameters, including the gradients that an abandoned backward pass accumulated in them.
    kept = {id(parameter) for parameter in model.parameters()}
    for parameter in before:
        if id(parameter) not in kept:
            parameter.grad = None


def _outermost(model: torch.nn.Module) -> list[FSDPModule]:
    """Return the outermost FSDP modules."""
    found: dict[str, FSDPModule] = {}
    for name, module in named_modules(model):
        inside = any(not root or name.startswith(f"{root}.") for root in found)
        if isinstance(module, FSDPModule) and not inside:
            found[name] = module
    return list(found.values())
