"""What a worker holds of a tensor that is spread over its unit (a DTensor), without importing what it may not need."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, NamedTuple, cast

import torch

from holdfast.protocol.layouts.layout import DIMENSIONS, SHARD

#: the name of a group along a dimension of the layout, before that of the dimension
GROUP = "holdfast-"


class TensorPlacement(NamedTuple):
    """How a tensor is spread over a unit: its global shape, and its placements in words, along the mesh's dimensions.

    ((), "") where a worker holds all of it.
    """

    whole: tuple[int, ...] = ()
    placed: str = ""


#: a worker holds all of it
NOT_SPREAD = TensorPlacement()

#: said instead of placements of what each place has all of, where what is like it is spread
PLAIN = "plain"

#: a dimension of a mesh, and that nothing is cut along it, or which dimension of a tensor is
_CUT = re.compile(r"(\w+) (?:R|S\((\d{1,2})\))")


def is_dtensor(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor is spread over the places of a unit (a DTensor)."""
    return type(tensor) is not torch.Tensor and hasattr(tensor, "_local_tensor")


def is_sharded(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor is cut along the layout's shard dimension."""
    return is_dtensor(tensor) and SHARD in layout_dimensions(cast(Any, tensor).device_mesh)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return what is here of a tensor, in its own memory; of one that is not spread, itself."""
    if not is_dtensor(tensor):
        return tensor
    untyped: Any = tensor
    return cast(torch.Tensor, untyped._local_tensor)


def layout_dimensions(mesh: Any) -> tuple[str, ...]:
    """Return which dimensions of the layout those of a mesh are, whatever it calls them; "" where it is none of them.

    Where it has other names than the layout (`Job.mesh_as`) its groups say so.
    """
    own: tuple[str, ...] = mesh.mesh_dim_names or ()
    if own and set(own) <= {*DIMENSIONS}:
        return own
    names = (str(group.group_name) for group in mesh.get_all_groups())
    return tuple(name.removeprefix(GROUP) if name.startswith(GROUP) else "" for name in names)


def placement_of(tensor: torch.Tensor) -> TensorPlacement:
    """Return how a tensor is spread."""
    if not is_dtensor(tensor):
        return NOT_SPREAD
    untyped: Any = tensor
    names: tuple[str, ...] = untyped.device_mesh.mesh_dim_names or ()
    placed = ", ".join(f"{name} {one}" for name, one in zip(names, untyped.placements, strict=True))
    return TensorPlacement(tuple(tensor.shape), placed)


def wrap_like(local: torch.Tensor, like: torch.Tensor, whole: tuple[int, ...] | None = None) -> torch.Tensor:
    """Return a tensor of which `local` is here, spread as another one is.

    It has the memory of `local`. Where the other one is not spread, that is `local` itself.

    Args:
        whole: its global shape; None: the other one's.
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
    """Return which dimension of a tensor is cut along each of a mesh, None for none; of other placements nothing."""
    matches = [_CUT.fullmatch(words) for words in placed.split(", ")]
    cuts = {found[1]: int(found[2]) if found[2] else None for found in matches if found}
    return cuts if len(cuts) == len(matches) else None


def wrap_by_placement(
    local: torch.Tensor, said: TensorPlacement, beside: Iterable[torch.Tensor]
) -> torch.Tensor | None:
    """Return a tensor of which `local` is here, spread as is said, over the mesh of another one.

    Args:
        beside: others that are spread. None comes back where none has such a mesh.
    """
    cuts, meshes = parse_cuts(said.placed), [cast(Any, tensor).device_mesh for tensor in beside]
    mesh = next((one for one in meshes if cuts is not None and tuple(cuts) == tuple(one.mesh_dim_names or ())), None)
    if cuts is None or mesh is None:
        return None
    from torch.distributed.tensor import DTensor, Replicate, Shard

    placements = [Replicate() if cut is None else Shard(cut) for cut in cuts.values()]
    whole = torch.empty(said.whole, device="meta")
    return cast(Any, DTensor).from_local(
        local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


def is_counted_here(parameter: torch.Tensor, coordinates: dict[str, int]) -> bool:
    """Tell whether what is here of a parameter is to be counted here, where all places of a unit are added up.

    Along a dimension of the mesh in which it is not cut all places have the same of it: it counts in the first of them.

    Args:
        coordinates: of this place, by the dimension's name.
    """
    cut: set[str] = set()
    if is_dtensor(parameter):
        untyped: Any = parameter
        names = layout_dimensions(untyped.device_mesh)
        cut = {name for name, one in zip(names, untyped.placements, strict=True) if not one.is_replicate()}
    return all(name in cut or not coordinate for name, coordinate in coordinates.items())
