"""Conversion of a state between whole tensors, as in checkpoints, and local parts of spread tensors.

- Parameters and buffers are spread like the model's.
- An optimizer's tensor with the shape of its parameter is spread like the parameter.
- An optimizer's tensor of another shape keeps its placement if the parameter's mesh is the same. If not, each local
  rank has all of it, like a tensor that torch makes from a gradient (`new_zeros`).
- A tensor of an extra object is spread like its present tensor, or like the parameter of its name, or as it was, if
  that is possible. If not, it is refused, because its placement is unknown.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, cast

import msgspec
import torch
from msgspec.structs import asdict, replace

from holdfast.protocol.checkpoints.boxes import Box
from holdfast.runtime.dtensor.local import PLAIN, TensorPlacement, is_dtensor, parse_cuts, placement_of
from holdfast.runtime.dtensor.replica_position import WHOLE_REPLICA, ReplicaPosition
from holdfast.runtime.layouts.boxes import find_box, find_box_like
from holdfast.runtime.state import tree
from holdfast.runtime.state.state import Manifest, StateMismatchError, TensorSpec, TrainingState


class LocalPart(NamedTuple):
    """The local part of a tensor."""

    #: the local part, as a box of the whole tensor
    box: Box
    #: shape of the whole tensor
    whole: tuple[int, ...]


def encode_manifest(manifest: Manifest) -> bytes:
    """Return a state's manifest as MessagePack, in terms of whole tensors, so that it can be read under any layout.

    Placements are only included for tensors for which the model does not show them (`_unmatched_placements`).
    """
    placements = _unmatched_placements(manifest)
    tensors = [
        (spec.name, spec.dtype, spec.whole if spec.placed else spec.shape, spec.host)
        + (((), placements[number]) if number in placements else ())
        for number, spec in enumerate(manifest.tensors)
    ]
    return msgspec.msgpack.encode({**asdict(manifest), "tensors": tensors})


def _unmatched_placements(manifest: Manifest) -> dict[int, str]:
    """Return the placements, by index, of tensors of optimizers and extra objects that cannot be inferred from the
    model: no tensor of the model has the same whole shape and placement, or it is an extra tensor without the name of
    one.

    `PLAIN` is the placement of a tensor that is not spread. Scalars are left out. Empty if the model is not spread.
    """
    models = manifest.tensors[: manifest.parameters + manifest.buffers]
    if not any(spec.placed for spec in models):
        return {}
    known = {(spec.whole if spec.placed else spec.shape, spec.placed) for spec in models}
    names = {spec.name for spec in models}
    ways = [(way, number) for node in manifest.extra.values() for way, number in tree.tensor_paths(node)]
    unnamed = {number for way, number in ways if not (way and way[-1] in names)}
    found: dict[int, str] = {}
    for number, spec in enumerate(manifest.tensors[len(models) :], len(models)):
        shape = spec.whole if spec.placed else spec.shape
        if shape and (number in unnamed or (shape, spec.placed) not in known):
            found[number] = spec.placed or PLAIN
    return found


def decode_manifest(data: bytes) -> Manifest:
    """Return the manifest that `encode_manifest` has encoded, still in terms of whole tensors.

    Raises:
        msgspec.DecodeError: the data is not a manifest.
    """
    manifest = msgspec.msgpack.decode(data, type=Manifest)
    return replace(manifest, tensors=tuple(replace(spec, whole=()) for spec in manifest.tensors))


def localize_manifest(
    state: TrainingState, manifest: Manifest, position: ReplicaPosition = WHOLE_REPLICA
) -> tuple[Manifest, dict[int, LocalPart]]:
    """Convert a manifest of whole tensors to this worker's layout. Return its manifest with the shapes and placements
    of local parts, and the local parts of spread tensors, by index. Tensors that are not spread here keep their whole
    shapes.

    Args:
        state: the present state, whose tensors show the placements.
        manifest: from `decode_manifest`.
        position: the part of a replica on this worker.

    Raises:
        StateMismatchError: the placement of a tensor is unknown.
        BadInputError: the local part of a present tensor is not a box.
    """
    whole_specs = manifest.tensors
    specs = [replace(spec, placed="") for spec in whole_specs]
    parts: dict[int, LocalPart] = {}

    def spread(number: int, box: Box, how: TensorPlacement) -> None:
        parts[number] = LocalPart(box, whole_specs[number].shape)
        specs[number] = replace(specs[number], shape=box.shape, **how._asdict())

    for number, like in _matched_tensors(state, manifest):
        if 0 <= number < len(whole_specs) and whole_specs[number].shape == tuple(like.shape) and number not in parts:
            spread(number, find_box(whole_specs[number].name, like, position), placement_of(like))
    for number, beside in (*_sharded_optimizer_tensors(state, manifest), *_unmatched_extra_tensors(state, manifest)):
        if (
            0 <= number < len(whole_specs)
            and number not in parts
            and whole_specs[number].shape
            and whole_specs[number].placed != PLAIN
        ):
            how = _placement_on_mesh(whole_specs[number], beside)
            spread(
                number, find_box_like(whole_specs[number].shape, parse_cuts(how.placed) or {}, beside, position), how
            )
    return replace(manifest, tensors=tuple(specs)), parts


def _placement_on_mesh(spec: TensorSpec, other: torch.Tensor) -> TensorPlacement:
    """Return a tensor's placement on the mesh of another one, with its whole shape: its own if that mesh has the same
    dimensions, else replicated along all of them.
    """
    names: tuple[str, ...] = cast(Any, other).device_mesh.mesh_dim_names or ()
    cuts = parse_cuts(spec.placed) or {}
    whole = ", ".join(f"{name} R" for name in names)
    return TensorPlacement(spec.shape, spec.placed if tuple(cuts) == names else whole)


def _match_parameters(state: TrainingState, manifest: Manifest) -> Iterator[tuple[torch.Tensor, int]]:
    """Yield the parameter of each tensor in the optimizers' state of a manifest, and the tensor's index."""
    yield from state.optimizers.match_parameters(manifest.optimizer, state.added_parameters(manifest))


def _sharded_optimizer_tensors(state: TrainingState, manifest: Manifest) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield the index of each tensor in the optimizers' state of a spread parameter, with that parameter. Scalars, such
    as step counters, are included.
    """
    for parameter, number in _match_parameters(state, manifest):
        if is_dtensor(parameter):
            yield number, parameter


def _unmatched_extra_tensors(state: TrainingState, manifest: Manifest) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield the index of each extra tensor without a present tensor at its path or of its name, whose placement is of a
    mesh that exists here, with a tensor of the model on that mesh. Left out: scalars, plain tensors, and tensors whose
    shape decides the placement. Nothing if the model is not spread.

    Raises:
        StateMismatchError: the placement of such a tensor under this layout is unknown.
    """
    named = dict(state.model_tensors())
    here = [tensor for tensor in named.values() if is_dtensor(tensor)]
    for name, node in manifest.extra.items() if here else ():
        known = _tensors_by_path(state.extra[name].state_dict()) if name in state.extra else {}
        for way, number in tree.tensor_paths(node):
            spec = manifest.tensors[number] if 0 <= number < len(manifest.tensors) else None
            if spec is None or not spec.shape or spec.placed == PLAIN or way in known or (way and way[-1] in named):
                continue
            likes = {placement_of(tensor).placed for tensor in named.values() if tuple(tensor.shape) == spec.shape}
            cuts = parse_cuts(spec.placed)
            meshes = [t for t in here if cuts and tuple(cuts) == tuple(cast(Any, t).device_mesh.mesh_dim_names or ())]
            if likes == {spec.placed}:
                continue
            if meshes and not likes:
                yield number, meshes[0]
            elif spec.placed or likes - {""}:
                raise StateMismatchError(
                    f"extra[{name!r}] has a tensor {'.'.join(way)!r} of the shape {spec.shape}, made after "
                    "job.protect() and under another layout: its placement under this one is unknown; make it before "
                    "job.protect(), or give it the name of its parameter"
                )


def _matched_tensors(state: TrainingState, manifest: Manifest) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield the index in the manifest of each tensor that is spread here, with a present tensor that shows the
    placement: itself for the model's, the parameter for the optimizers', and for extra objects the tensor at the same
    path, of the same name, or of the same shape if that decides it. Shapes are not compared otherwise. Nothing if the
    model is not spread.
    """
    own = state.model_tensors()
    if not any(is_dtensor(tensor) for _, tensor in own):
        return
    pairs = [*enumerate(tensor for _, tensor in own)]
    pairs += [(number, parameter) for parameter, number in _match_parameters(state, manifest)]
    named = dict(own)
    for name, node in manifest.extra.items():
        here = _tensors_by_path(state.extra[name].state_dict()) if name in state.extra else {}
        for way, number in tree.tensor_paths(node):
            like = here.get(way, named.get(way[-1]) if way else None)
            like = _unique_match(state, manifest, number) if like is None else like
            pairs += [(number, like)] if like is not None else []
    yield from ((number, tensor) for number, tensor in pairs if is_dtensor(tensor))


def _unique_match(state: TrainingState, manifest: Manifest, number: int) -> torch.Tensor | None:
    """Return a tensor of the model with the shape of the manifest's tensor `number`, if the model has such tensors, and
    all of them have that tensor's placement; else None.
    """
    spec = manifest.tensors[number] if 0 <= number < len(manifest.tensors) else None
    same = [tensor for _, tensor in state.model_tensors() if spec is not None and tuple(tensor.shape) == spec.shape]
    return same[0] if same and spec and {placement_of(one).placed for one in same} == {spec.placed} else None


def _tensors_by_path(value: object) -> dict[tuple[str, ...], torch.Tensor]:
    """Return the tensors of a value by their paths."""
    return dict(tree.tensors_by_path(value, "extra"))
