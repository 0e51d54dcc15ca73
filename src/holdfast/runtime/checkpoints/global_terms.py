"""A state in terms of whole tensors, as checkpoints have it, and as it is here, spread over a unit's places or not.

Parameters and buffers are spread as the model's are. What an optimizer keeps of a parameter, and has its shape, is
spread as that is; what an extra object has, as what it has now.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import msgspec
import torch
from msgspec.structs import asdict, replace

from holdfast.protocol.checkpoints.boxes import Box
from holdfast.runtime.layouts.boxes import box_of
from holdfast.runtime.layouts.local import is_spread, spread_of
from holdfast.runtime.layouts.place import WHOLE_UNIT, PlaceInUnit
from holdfast.runtime.state import tree
from holdfast.runtime.state.state import Manifest, TensorSpec, TrainingState


class LocalPart(NamedTuple):
    """Which part of a tensor is somewhere: a box of it, and its whole shape."""

    box: Box
    whole: tuple[int, ...]


def encode_manifest(manifest: Manifest) -> bytes:
    """Return what a state is in terms of whole tensors: the same under all layouts, and nothing says which it was."""
    tensors = [
        (spec.name, spec.dtype, spec.whole if spec.placed else spec.shape, spec.host) for spec in manifest.tensors
    ]
    return msgspec.msgpack.encode({**asdict(manifest), "tensors": tensors})


def decode_manifest(data: bytes) -> Manifest:
    """Return what `encode_manifest` has written, still in terms of whole tensors.

    Raises:
        msgspec.DecodeError: it is no such thing.
    """
    manifest = msgspec.msgpack.decode(data, type=Manifest)
    whole = (TensorSpec(spec.name, spec.dtype, spec.shape, spec.host) for spec in manifest.tensors)
    return replace(manifest, tensors=tuple(whole))


def in_terms_of(
    state: TrainingState, manifest: Manifest, place: PlaceInUnit = WHOLE_UNIT
) -> tuple[Manifest, dict[int, LocalPart]]:
    """Return what a state in global terms is here, and which part is here of those tensors that are spread, by place.

    Args:
        state: what is here now.
    """
    specs: list[TensorSpec] = list(manifest.tensors)
    parts: dict[int, LocalPart] = {}
    for number, like in _likes(state, manifest):
        spec = specs[number] if 0 <= number < len(specs) else None
        if spec is not None and spec.shape == tuple(like.shape) and number not in parts:
            part = LocalPart(box_of(spec.name, like, place), spec.shape)
            parts[number], specs[number] = part, replace(spec, shape=part.box.shape, **spread_of(like)._asdict())
    return replace(manifest, tensors=tuple(specs)), parts


def _likes(state: TrainingState, manifest: Manifest) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield those tensors of a state that may be spread here, by place, each with what it is spread like."""
    own = state.own()
    if not any(is_spread(tensor) for _, tensor in own):
        return
    pairs = [*enumerate(tensor for _, tensor in own)]
    pairs += [(number, parameter) for parameter, number in state.optimizers.kept_for(manifest.optimizer)]
    named = dict(own)
    for name, node in manifest.extra.items():
        here = _tensors_in(state.extra[name].state_dict()) if name in state.extra else {}
        for way, number in tree.ways(node):
            like = here.get(way, named.get(way[-1]) if way else None)
            pairs += [(number, like)] if like is not None else []
    yield from ((number, tensor) for number, tensor in pairs if is_spread(tensor))


def _tensors_in(value: object) -> dict[tuple[str, ...], torch.Tensor]:
    """Return the tensors of a value by the way to each."""
    found: list[torch.Tensor] = []

    def take(tensor: torch.Tensor) -> int:
        found.append(tensor)
        return len(found) - 1

    return {way: found[number] for way, number in tree.ways(tree.pack(value, take, "extra"))}
