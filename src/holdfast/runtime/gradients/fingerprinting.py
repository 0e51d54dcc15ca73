"""The fingerprint that a worker compares with the others of its role: settings in every step, at times the state.

Hashing settings takes microseconds. Of the state, at most `SLICE_BYTES` are hashed: a piece of each of up to
`SLICE_TENSORS` tensors, different ones in each step.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, cast

import msgspec
import numpy as np
import torch

from holdfast.protocol.fingerprint import MAX_SHOWN, MAX_SHOWN_CHARACTERS, Fingerprint, hash_of
from holdfast.runtime.dtensor.local import local_of
from holdfast.runtime.state.memory import host_bytes
from holdfast.runtime.state.state import TrainingState
from holdfast.runtime.tensors import to_floats

SLICE_BYTES = 4 << 20
SLICE_TENSORS = 256
#: number of compared elements of an option that is a tensor
_ELEMENTS = 16
_encoder = msgspec.msgpack.Encoder()
_NOT_OPTIONS = ("params", "param_names")


class Fingerprinting:
    """Makes the fingerprints of one worker."""

    def __init__(self, state: TrainingState) -> None:
        """Start without hashes."""
        self._state = state
        #: the options of each parameter group at the last step, or [] if they can change in place
        self._values: list[list[Any]] = []
        #: their hash
        self._options = 0
        #: the names of a group's options, sorted, by the group's keys
        self._names: dict[tuple[str, ...], list[str]] = {}

    def make(self, step: int, *, with_state: bool) -> Fingerprint:
        """Return the fingerprint before a step.

        Args:
            with_state: include a slice of the state.
        """
        return Fingerprint(
            step=step,
            settings=self._hash_settings(),
            state=self._hash_slice(step) if with_state else 0,
        )

    def describe(self) -> tuple[str, ...]:
        """Return the settings in words, for messages about a difference."""
        return tuple(islice(self._describe_options(), MAX_SHOWN))

    def _hash_settings(self) -> int:
        """Return a hash of the settings; options are only encoded again if they have changed since the last step."""
        groups = [group for optimizer in self._state.optimizers for group in optimizer.param_groups]
        values = [list(group.values()) for group in groups]
        if not self._equals_last(values):
            in_place = any(_changes_in_place(*option) for group in groups for option in group.items())
            encoded = b"".join(map(self._encode_group, groups))
            self._values = [] if in_place else values
            self._options = hash_of(encoded)
        return hash_of(b"%d %s" % (self._options, self._state.requires_gradient()))

    def _encode_group(self, group: dict[str, Any]) -> bytes:
        """Return a group's options, sorted, because workers that received them may have another order."""
        keys = tuple(group)
        names = self._names.get(keys)
        if names is None:
            names = self._names[keys] = sorted(key for key in keys if key not in _NOT_OPTIONS)
        values = [group[name] for name in names]
        count = len(group["params"])
        try:
            return _encoder.encode((count, names, values))
        except TypeError:  # Tensors, NumPy scalars, objects of the script.
            return _encoder.encode((count, names, [_to_plain(value) for value in values]))

    def _equals_last(self, values: list[list[Any]]) -> bool:
        """Whether the options equal the last step's, by identity or value."""
        try:
            return bool(values == self._values)
        except (RuntimeError, ValueError):  # Arrays that are not the same object have no truth value.
            return False

    def _describe_options(self) -> Iterator[str]:
        named = self._state.optimizers.by_name
        for name, optimizer in named.items():
            for number, group in enumerate(optimizer.param_groups):
                where = f"{name} group {number}".strip() if len(named) + len(optimizer.param_groups) > 2 else ""
                for option, value in sorted(group.items()):
                    if option not in _NOT_OPTIONS:
                        yield f"{where} {option} {_to_plain(value)}".strip()[:MAX_SHOWN_CHARACTERS]
        frozen = list(self._state.frozen_parameters().values())
        if frozen:
            yield f"{len(frozen)} frozen parameters, {frozen[0]} the first"[:MAX_SHOWN_CHARACTERS]

    @torch.no_grad()
    def _hash_slice(self, step: int) -> int:
        """Return a hash of pieces of the state, never 0."""
        tensors = [tensor for tensor in self._tensors() if tensor.numel() and tensor.layout is torch.strided]
        first = (step * SLICE_TENSORS) % max(1, len(tensors)) if len(tensors) > SLICE_TENSORS else 0
        chosen = [*tensors[first:], *tensors[:first]][:SLICE_TENSORS]
        each = SLICE_BYTES // max(1, len(chosen))
        digest = hashlib.blake2b(digest_size=8)
        for data in _bytes_of([_tensor_piece(tensor, each, step) for tensor in chosen]):
            digest.update(data)
        return (int.from_bytes(digest.digest(), "big") >> 2) or 1

    def _tensors(self) -> Iterator[torch.Tensor]:
        """Yield the local tensors of the model and of the optimizers, in the same order on all workers."""
        for _, tensor in self._state.model_tensors():
            yield local_of(tensor)
        for optimizer in self._state.optimizers:
            for parameter in (one for group in optimizer.param_groups for one in group["params"]):
                if self._state.is_sent(parameter):
                    for _, value in sorted(optimizer.state.get(parameter, {}).items()):
                        if isinstance(value, torch.Tensor):
                            yield local_of(value)


def _changes_in_place(option: str, value: object) -> bool:
    """Whether an option is of a type that can change in place."""
    return option not in _NOT_OPTIONS and isinstance(value, torch.Tensor | list | dict | set)


def _tensor_piece(tensor: torch.Tensor, nbytes: int, step: int) -> torch.Tensor:
    """Return a piece of a tensor of at most this many bytes, a different one in each step."""
    flat = tensor.detach()
    flat = flat.view(-1) if flat.is_contiguous() else flat[:1].reshape(-1)
    count = max(1, nbytes // flat.element_size())
    if flat.numel() <= count:
        return flat
    begin = (step * count) % (flat.numel() - count + 1)
    return flat[begin : begin + count]


def _bytes_of(pieces: Sequence[torch.Tensor]) -> Iterator[memoryview]:
    """Yield the bytes of all pieces; pieces on a device are copied together."""
    on_device = [piece.contiguous().view(torch.uint8) for piece in pieces if piece.device.type != "cpu"]
    if on_device:
        yield host_bytes(torch.cat(on_device))
    for piece in pieces:
        if piece.device.type == "cpu":
            yield host_bytes(piece)


def _to_plain(value: Any) -> object:
    """Return a value that all workers encode in the same way, received or not; for other objects, their type."""
    if isinstance(value, torch.Tensor):
        return to_floats(value.detach().reshape(-1)[:_ELEMENTS].double())
    if isinstance(value, np.generic):  # Sent as a Python number.
        return cast(Any, value).item()
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value)  # A subclass may have another encoding.
    if value is None or isinstance(value, bytes):
        return value
    if isinstance(value, list | tuple):
        return [_to_plain(one) for one in cast(Sequence[object], value)]
    return type(value).__name__
