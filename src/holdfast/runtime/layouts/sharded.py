"""What of a model is where in a replica, what its gradient's norm is, and how FSDP2 is made to leave sums alone."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard, placement_types
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from holdfast.errors import BadInputError
from holdfast.runtime.layouts.mesh import ReplicaMesh
from holdfast.runtime.tensors import named_modules, vector_norm

_local_part: Any = compute_local_shape_and_global_offset
_types: Any = placement_types


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardedTensor:
    """One tensor of a replica, and this role's part of it.

    `placements` has a dimension of the mesh for each that the tensor is spread over or copied along: the axis that is
    cut there, None for copies.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    placements: tuple[tuple[str, int | None], ...]
    local_shape: tuple[int, ...]
    offset: tuple[int, ...]


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this role's part of a tensor, which shares its memory; a plain tensor is its own."""
    untyped: Any = tensor.detach()
    return untyped.to_local() if isinstance(tensor, DTensor) else untyped


def described(name: str, tensor: torch.Tensor) -> ShardedTensor:
    """Say what part of a tensor is here.

    Raises:
        BadInputError: it is spread in a way that parameters are not.
    """
    shape = tuple(tensor.shape)
    if not isinstance(tensor, DTensor):
        whole = (0,) * len(shape)
        return ShardedTensor(name=name, shape=shape, dtype=tensor.dtype, placements=(), local_shape=shape, offset=whole)
    dimensions = tensor.device_mesh.mesh_dim_names or ()
    axes = [_axis(name, placement) for placement in tensor.placements]
    local_shape, offset = _local_part(shape, tensor.device_mesh, tensor.placements)
    return ShardedTensor(
        name=name,
        shape=shape,
        dtype=tensor.dtype,
        placements=tuple(zip(dimensions, axes, strict=True)),
        local_shape=tuple(local_shape),
        offset=tuple(offset) if math.prod(local_shape) else (0,) * len(shape),
    )


def described_model(model: torch.nn.Module) -> Iterator[ShardedTensor]:
    """Say what part of each parameter and buffer is here, in the model's order."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        yield described(name, tensor)


def _axis(name: str, placement: Any) -> int | None:
    if isinstance(placement, Replicate):
        return None
    # (strided: a later dimension of the mesh has cut the same axis first, as with FSDP2 on top of tensor parallelism)
    if isinstance(placement, Shard | _types._StridedShard):
        return placement.dim
    raise BadInputError(
        f"parameter {name} is placed as {placement} on the mesh: parameters are cut along an axis (Shard) or whole on "
        "every rank (Replicate)"
    )


def sum_gradients(model: torch.nn.Module) -> int:
    """Let FSDP2 add gradients up and divide by nothing, in every module (its setter does not recurse); return how many.

    holdfast divides once, by the micro-batches of the step.
    """
    wrapped = [module for _, module in named_modules(model) if isinstance(module, FSDPModule)]
    for module in wrapped:
        module.set_gradient_divide_factor(1.0)
    return len(wrapped)


def counts_here(tensor: torch.Tensor, coordinates: dict[str, int]) -> bool:
    """Tell whether this role's part of a tensor counts in a sum over the replica: of copies only the first does.

    Args:
        coordinates: this role's, by dimension of the mesh.
    """
    spread = {dimension for dimension, axis in described("", tensor).placements if axis is not None}
    return all(place == 0 for dimension, place in coordinates.items() if dimension not in spread)


def squared_norm(tensors: Iterable[torch.Tensor], coordinates: dict[str, int]) -> float:
    """Return what this role adds to the squared norm of a replica's tensors: each element counts once."""
    return sum(vector_norm(local(tensor), torch.float64) ** 2 for tensor in tensors if counts_here(tensor, coordinates))


def replica_norm(tensors: Iterable[torch.Tensor], replica: ReplicaMesh) -> float:
    """Return the norm of a replica's tensors, the same on each of its places. All of them must call it.

    Raises:
        CollectiveLeftError: it was left.
    """
    coordinates = replica.layout.coordinates(replica.role.place)
    total = torch.tensor([squared_norm(tensors, coordinates)], dtype=torch.float64)
    for group in replica.groups.values():
        group.allreduce([total]).wait()
    return math.sqrt(float(total))


def restart(model: torch.nn.Module, replica: ReplicaMesh) -> None:
    """Make a model fit for another attempt, after a forward or backward pass was left: FSDP2 forgets what it was at.

    What has been added up in the parameters' own gradients stays as it is; it may have parts of the attempt.
    """
    before = list(model.parameters())
    with ExitStack() as settling:
        for group in replica.groups.values():
            settling.enter_context(group.settling())
        for root in _outermost(model):
            root.reset_iter_state()
    # FSDP2 uses its gathered parameters again, and leaves in them what a backward pass had added up until it was left.
    kept = {id(parameter) for parameter in model.parameters()}
    for parameter in before:
        if id(parameter) not in kept:
            parameter.grad = None


def _outermost(model: torch.nn.Module) -> list[FSDPModule]:
    """Return the FSDP modules that are in no other."""
    found: dict[str, FSDPModule] = {}
    for name, module in named_modules(model):
        inside = any(not root or name.startswith(f"{root}.") for root in found)
        if isinstance(module, FSDPModule) and not inside:
            found[name] = module
    return list(found.values())
