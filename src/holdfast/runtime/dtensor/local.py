"""The local part of a DTensor on this worker, without importing DTensor's modules if they are not in use.

A DTensor here is a tensor that is spread over the local ranks of a replica group.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, NamedTuple, cast

import torch

from holdfast.protocol.layouts.layout import DIMENSIONS, SHARD

#: prefix of the name of a group along a dimension of the layout; the dimension's name follows
GROUP = "holdfast-"


class TensorPlacement(NamedTuple):
    """How a tensor is spread over a replica group; `NOT_SPREAD` for a plain tensor."""

    #: the global shape, or ()
    whole: tuple[int, ...] = ()
    #: placements in words, along the dimensions of the mesh, or ""
    placed: str = ""


#: each worker holds the whole tensor
NOT_SPREAD = TensorPlacement()

#: placement in words of a tensor that each local rank has completely, although similar tensors are spread
PLAIN = "plain"

#: a dimension of a mesh, with R for a tensor that is not cut along it, or S and the cut dimension of the tensor
_CUT = re.compile(r"(\w+) (?:R|S\((\d{1,2})\))")


def is_dtensor(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is spread over a replica group."""
    return type(tensor) is not torch.Tensor and hasattr(tensor, "_local_tensor")


def is_sharded(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is cut along the layout's shard dimension."""
    return is_dtensor(tensor) and SHARD in layout_dimensions(cast(Any, tensor).device_mesh)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the local part of a DTensor, in its own memory; a plain tensor is returned unchanged."""
    if not is_dtensor(tensor):
        return tensor
    untyped: Any = tensor
    return cast(torch.Tensor, untyped._local_tensor)


def layout_dimensions(mesh: Any) -> tuple[str, ...]:
    """Return, for each dimension of a mesh, the layout's name for it; "" for one that is not the layout's.

    If the mesh has other names than the layout (`Job.mesh_as`), the names of its groups show the layout's names.
    """
    own: tuple[str, ...] = mesh.mesh_dim_names or ()
    if own and set(own) <= {*DIMENSIONS}:
        return own
    names = (str(group.group_name) for group in mesh.get_all_groups())
    return tuple(name.removeprefix(GROUP) if name.startswith(GROUP) else "" for name in names)


def placement_of(tensor: torch.Tensor) -> TensorPlacement:
    """Return the global shape of a DTensor, and its placements in words along the dimensions of its mesh; `NOT_SPREAD`
    for a plain tensor.
    """
    if not is_dtensor(tensor):
        return NOT_SPREAD
    untyped: Any = tensor
    names: tuple[str, ...] = untyped.device_mesh.mesh_dim_names or ()
    placed = ", ".join(f"{name} {one}" for name, one in zip(names, untyped.placements, strict=True))
    return TensorPlacement(tuple(tensor.shape), placed)


def wrap_like(local: torch.Tensor, like: torch.Tensor, whole: tuple[int, ...] | None = None) -> torch.Tensor:
    """Return a DTensor with this local part, placed like another one; the memory is shared.

    If the other one is a plain tensor, return `local` itself.

    Args:
        whole: the global shape; by default the other tensor's.
    """
    if not is_dtensor(like):
        return local
    from torch.distributed.tensor import DTensor

    untyped: Any = like
    if whole is not None and whole != tuple(like.shape):
        like = torch.empty(whole, device="meta")
    return cast(Any, DTensor).from_local(
        local,
        untyped.device_mesh,
        untyped.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )


def parse_cuts(placed: str) -> dict[str, int | None] | None:
    """Return which dimension of a tensor is cut along each dimension of a mesh, by the latter's name; None for a
    dimension along which it is not cut.

    Args:
        placed: placements in words, as in `TensorPlacement`. The result is None if they have another form.
    """
    matches = [_CUT.fullmatch(words) for words in placed.split(", ")]
    cuts = {found[1]: int(found[2]) if found[2] else None for found in matches if found}
    return cuts if len(cuts) == len(matches) else None


def wrap_by_placement(
    local: torch.Tensor, placement: TensorPlacement, others: Iterable[torch.Tensor]
) -> torch.Tensor | None:
    """Return a DTensor with this local part and placement, on the first mesh of `others` that has the placement's
    dimensions. The memory is shared. None if no mesh fits, or the placement has another form than `parse_cuts` reads.

    Args:
        others: DTensors, whose meshes are tried.
    """
    cuts = parse_cuts(placement.placed)
    meshes = [cast(Any, tensor).device_mesh for tensor in others]
    mesh = next((one for one in meshes if cuts is not None and tuple(cuts) == tuple(one.mesh_dim_names or ())), None)
    if cuts is None or mesh is None:
        return None
    from torch.distributed.tensor import DTensor, Replicate, Shard

    placements = [Replicate() if cut is None else Shard(cut) for cut in cuts.values()]
    whole = torch.empty(placement.whole, device="meta")
    return cast(Any, DTensor).from_local(
        local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


def is_counted_here(parameter: torch.Tensor, coordinates: dict[str, int]) -> bool:
    """Return whether a parameter's local part counts on this local rank, in a sum over all of them.

    Along dimensions of the mesh in which it is not cut, all local ranks have the same part: it counts in the first of
    them.

    Args:
        coordinates: of this local rank, by the dimension's name.
    """
    cut: set[str] = set()
    if is_dtensor(parameter):
        untyped: Any = parameter
        names = layout_dimensions(untyped.device_mesh)
        cut = {name for name, one in zip(names, untyped.placements, strict=True) if not one.is_replicate()}
    return all(name in cut or not coordinate for name, coordinate in coordinates.items())
