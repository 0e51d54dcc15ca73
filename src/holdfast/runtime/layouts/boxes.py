"""Which part of a tensor a rank holds, as a box of the whole tensor, which is the same under all layouts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch

from holdfast.errors import BadInputError
from holdfast.protocol.checkpoints.boxes import Box
from holdfast.protocol.layouts.layout import SHARD, TENSOR
from holdfast.runtime.dtensor.local import is_dtensor, layout_dimensions, local_of
from holdfast.runtime.dtensor.replica_position import ReplicaPosition


def find_box(name: str, tensor: torch.Tensor, place: ReplicaPosition) -> Box:
    """Return which part of a tensor this rank holds, as a box of the whole tensor; all of it if the tensor is not
    sharded.

    An empty tensor gives a box at offset 0 with its local shape, and is not checked.

    Args:
        name: the tensor's name in error messages.
        place: this worker's position in its replica group.

    Raises:
        BadInputError: the local part has another shape than a box of the job's layout, as after sharding over another
            mesh.
    """
    box = Box.of_whole(tensor.shape)
    if not is_dtensor(tensor):
        return box
    untyped: Any = tensor
    mesh = untyped.device_mesh
    named = zip(untyped.placements, layout_dimensions(mesh), mesh.shape, strict=True)
    cuts: list[tuple[Any, str]] = [(cut, axis) for cut, axis, size in named if axis or size > 1]
    # FSDP2 may shard a dimension that is already split for tensor parallelism. torch then calls its shard a strided
    # one; it comes last, although its mesh dimension is the first.
    for cut, axis in sorted(cuts, key=lambda one: hasattr(one[0], "split_factor")):
        if not cut.is_replicate():
            box = (
                _cut_box(box, cut.dim, axis, place) if hasattr(cut, "dim") and axis in (SHARD, TENSOR) else Box((), ())
            )
    if not tensor.numel():  # of an empty tensor, FSDP2 gives ranks other empty shapes
        return Box(tuple(0 for _ in tensor.shape), tuple(local_of(tensor).shape))
    if box.shape != tuple(local_of(tensor).shape):
        spread = ", ".join(f"{axis} {cut}" for cut, axis in cuts)
        raise BadInputError(
            f"{name}, of the shape {tuple(tensor.shape)}, is sharded as {spread}, and this rank has the shape "
            f"{tuple(local_of(tensor).shape)}, which no checkpoint can describe: use only fully_shard() and "
            "parallelize_module() with job.mesh"
        )
    return box


def find_box_like(
    shape: Sequence[int], cuts: Mapping[str, int | None], like: torch.Tensor, place: ReplicaPosition
) -> Box:
    """Return which part of a tensor of this whole shape this rank would hold, if it is sharded over the mesh of another
    tensor.

    Args:
        shape: of the whole tensor.
        cuts: for each dimension of that mesh, in its order and by its name there: the tensor's dimension that it
            shards, or None.
        like: the other tensor, a DTensor.
        place: this worker's position in its replica group.
    """
    box, untyped = Box.of_whole(shape), cast(Any, like)
    for cut, axis in zip(cuts.values(), layout_dimensions(untyped.device_mesh), strict=True):
        box = _cut_box(box, cut, axis, place) if cut is not None else box
    return box


def _cut_box(box: Box, dimension: int, axis: str, place: ReplicaPosition) -> Box:
    """Return the part of `box` that remains for this rank if it is sharded along one more dimension. All parts have the
    same size, rounded up, as torch shards it, so that the last ones may be smaller or empty.

    Args:
        box: a part of a tensor, with an offset in it.
        dimension: the tensor's dimension to shard.
        axis: the dimension of the layout along which it is sharded, `SHARD` or `TENSOR`.
    """
    layout = place.layout
    parts, part = (layout.shard, place.shard) if axis == SHARD else (layout.tensor, place.tensor)
    size = box.shape[dimension]
    each = -(-size // parts)
    start, stop = (min(number * each, size) for number in (part, part + 1))
    offset, shape = list(box.offset), list(box.shape)
    offset[dimension], shape[dimension] = offset[dimension] + start, stop - start
    return Box(tuple(offset), tuple(shape))
