"""Checks that a model is sharded over the job's mesh, and configures FSDP2."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

from holdfast.errors import BadInputError
from holdfast.protocol.layouts.layout import DIMENSIONS, SHARD, TENSOR
from holdfast.runtime.dtensor.local import is_dtensor, layout_dimensions
from holdfast.runtime.dtensor.replica_position import ReplicaPosition
from holdfast.runtime.layouts.boxes import find_box
from holdfast.runtime.layouts.mesh import ReplicaMesh
from holdfast.runtime.moe.layer.expert_layer import expert_parameters, moe_layers
from holdfast.runtime.moe.layer.same_tokens import TokenSplit
from holdfast.runtime.tensors import named_modules, strip_wrapper_prefixes


def disable_gradient_division(model: torch.nn.Module) -> None:
    """Make FSDP2 sum gradients instead of averaging them, by a gradient divide factor of 1 in every module that it
    wraps.

    holdfast divides once, by the micro-batches of the step and their parts.
    """
    for _, module in named_modules(model):
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)


def reshard(model: torch.nn.Module) -> None:
    """Free the parameters that FSDP2 has gathered, in all modules that it wraps, so that the next forward pass gathers
    them again. Without a backward pass FSDP2 would keep them.

    Call it when parameters change, so that later passes do not use the old values.
    """
    for _, module in named_modules(model):
        if isinstance(module, FSDPModule):
            module.reshard()


def share_expert_tokens(model: torch.nn.Module, replica: ReplicaMesh) -> None:
    """Make all MoE layers split their tokens between the ranks along `tensor`, which have the same samples. Does
    nothing if the layout has one rank along `tensor`.
    """
    if replica.layout.tensor > 1:
        for layer in moe_layers(model):
            layer.token_split = TokenSplit(replica.groups[TENSOR])


def check_spread(model: torch.nn.Module, replica: ReplicaMesh) -> None:
    """Check that all trained parameters of a model are sharded over the job's mesh as its layout demands. Experts must
    not be sharded at all.

    Raises:
        BadInputError: a parameter is sharded over another mesh, or is trained but not sharded along `shard` although
            that has several ranks; an expert is sharded; or FSDP2 uses another dimension than `shard`.
    """
    _check_dimensions(model, replica)
    experts = {id(weight) for weight in expert_parameters(model)}
    for name, parameter in model.named_parameters():
        if id(parameter) in experts:
            if is_dtensor(parameter):
                raise BadInputError(
                    f"parameter {strip_wrapper_prefixes(name)!r} belongs to experts and is sharded, but experts move "
                    "between workers as a whole; call fully_shard(module, ..., "
                    "ignored_params=set(moe.experts.parameters())) on each module that contains such a layer"
                )
            continue
        names: tuple[str, ...] = ()
        if is_dtensor(parameter):
            untyped: Any = parameter
            mesh = untyped.device_mesh
            if not _is_replica_mesh(mesh, replica):
                raise BadInputError(
                    f"parameter {strip_wrapper_prefixes(name)!r} is sharded over another mesh than the job's: give "
                    'fully_shard(..., mesh=job.mesh["shard"]) and parallelize_module(..., job.mesh["tensor"], ...)'
                )
            names = layout_dimensions(mesh)
        if parameter.requires_grad and replica.layout.shard > 1 and SHARD not in names:
            raise BadInputError(
                f"parameter {strip_wrapper_prefixes(name)!r} is not sharded, so each rank of the replica group would "
                'train it on its own samples only: call fully_shard(model, mesh=job.mesh["shard"]) on the whole model, '
                "after its blocks"
            )


def check_boxes(model: torch.nn.Module, place: ReplicaPosition) -> None:
    """Check that the part of each parameter on this rank is a box; checkpoints and other layouts need that.

    Raises:
        BadInputError: the part of one parameter is not a box.
    """
    for name, parameter in model.named_parameters():
        find_box(f"parameter {strip_wrapper_prefixes(name)!r}", parameter, place)


def _is_replica_mesh(mesh: Any, replica: ReplicaMesh) -> bool:
    """Return whether every group of a mesh is the replica's group of a dimension of the layout; False for a mesh with
    an added dimension of size 1.

    If torch does not know one of the mesh's groups, return whether the mesh has only names of the layout and equals the
    replica's mesh along these dimensions.
    """
    try:
        groups = mesh.get_all_groups()
    except RuntimeError:
        # torch no longer knows one of its groups, because the script destroyed its process groups. Or an equal mesh
        # existed before: DTensor caches operations by equal meshes, and may return that one.
        names: tuple[str, ...] = mesh.mesh_dim_names or ()
        untyped: Any = replica.mesh
        return bool(names) and {*names} <= {*DIMENSIONS} and mesh == untyped[names]
    ours = {id(group) for group in replica.groups.values()}
    return all(id(group) in ours for group in groups)


def _mesh_infos(module: FSDPModule) -> list[Any]:
    """Return FSDP2's description of the mesh (`mesh_info`) over which it sharded each group of this module's
    parameters; empty if the module has none of its own.
    """
    untyped: Any = module
    state = untyped._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return [group.mesh_info for group in state._fsdp_param_groups]
    group = state._fsdp_param_group  # torch 2.11 and before: at most one group
    return [] if group is None else [group.mesh_info]


def _check_dimensions(model: torch.nn.Module, replica: ReplicaMesh) -> None:
    """Check that FSDP2 shards each module only along `shard` of the job's mesh, and replicates it along no dimension.
    Groups of one rank are always allowed.

    Raises:
        BadInputError: a module is wrapped over another mesh or dimension. Along `tensor`, gradients of the same samples
            would count several times.
    """
    shard, ours = replica.groups[SHARD], {id(group) for group in replica.groups.values()}
    for name, module in named_modules(model):
        if not isinstance(module, FSDPModule):
            continue
        for info in _mesh_infos(module):
            cut, copies = (getattr(info, f"{kind}_process_group", None) for kind in ("shard", "replicate"))
            label = f"module {strip_wrapper_prefixes(name)!r}" if name else "the model"
            if any(group is not None and id(group) not in ours and group.size() > 1 for group in (cut, copies)):
                raise BadInputError(
                    f"{label} is wrapped by fully_shard() over another mesh than the job's, which has no connections: "
                    'give fully_shard(..., mesh=job.mesh["shard"])'
                )
            if (cut is not None and cut is not shard and cut.size() > 1) or (copies is not None and copies.size() > 1):
                raise BadInputError(
                    f'{label} is wrapped by fully_shard() with another dimension than "shard": '
                    "ranks along tensor have the same samples, so their gradients would count several times; in a mesh "
                    "of two dimensions, FSDP2 replicates over the first; give "
                    'fully_shard(..., mesh=job.mesh["shard"]), or no fully_shard() if the layout has no shard'
                )
