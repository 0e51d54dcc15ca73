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
        """Return hashes of the optimizers' options and of which parameters require a gradient, for the step to come.

        Args:
            with_state: also hash a slice of the state; else its hash is 0.
        """
        return Fingerprint(
            step=step,
            settings=self._hash_settings(),
            state=self._hash_slice(step) if with_state else 0,
        )

    def describe(self) -> tuple[str, ...]:
        """Return the options of each parameter group and the number of frozen parameters in words, at most `MAX_SHOWN`
        texts, for messages about a difference.
        """
        return tuple(islice(self._describe_options(), MAX_SHOWN))

    def _hash_settings(self) -> int:
        """Return a hash of all parameter groups' options and of which parameters require a gradient. The options are
        only encoded again if they differ from the last step's, or may have changed in place.
        """
        groups = [group for optimizer in self._state.optimizers for group in optimizer.param_groups]
        values = [list(group.values()) for group in groups]
        if not self._equals_last(values):
            in_place = any(_changes_in_place(*option) for group in groups for option in group.items())
            encoded = b"".join(map(self._encode_group, groups))
            self._values = [] if in_place else values
            self._options = hash_of(encoded)
        return hash_of(b"%d %s" % (self._options, self._state.requires_gradient()))

    def _encode_group(self, group: dict[str, Any]) -> bytes:
        """Return a group's number of parameters and its options as MessagePack. Options are sorted by name, because
        workers that received them may have another order. Values that MessagePack does not know are first converted by
        `_to_plain`.
        """
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
        """Whether the options equal the last step's, by identity or value; False if arrays cannot be compared."""
        try:
            return bool(values == self._values)
        except (RuntimeError, ValueError):  # Arrays that are not the same object have no truth value.
            return False

    def _describe_options(self) -> Iterator[str]:
        """Yield `group option value` for each option of each parameter group, sorted by name within a group; `option
        value` if there is a single group. Then, if parameters are frozen, yield their number and the first of them.
        Each text is cut to `MAX_SHOWN_CHARACTERS`.
        """
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
        """Return a hash of pieces of up to `SLICE_TENSORS` dense tensors, together at most `SLICE_BYTES`; other pieces
        in each step. It is never 0.
        """
        tensors = [tensor for tensor in self._tensors() if tensor.numel() and tensor.layout is torch.strided]
        first = (step * SLICE_TENSORS) % max(1, len(tensors)) if len(tensors) > SLICE_TENSORS else 0
        chosen = [*tensors[first:], *tensors[:first]][:SLICE_TENSORS]
        each = SLICE_BYTES // max(1, len(chosen))
        digest = hashlib.blake2b(digest_size=8)
        for data in _bytes_of([_tensor_piece(tensor, each, step) for tensor in chosen]):
            digest.update(data)
        return (int.from_bytes(digest.digest(), "big") >> 2) or 1

    def _tensors(self) -> Iterator[torch.Tensor]:
        """Yield the local tensors of the model and of the optimizers' state, in the same order on all workers of a
        role. The optimizer state of experts is left out, because it differs between ranks.
        """
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
    """Return at most `nbytes` bytes of a tensor as a vector; a longer tensor gives another piece in each step. Of a
    tensor that is not contiguous, only the first row is used.
    """
    flat = tensor.detach()
    flat = flat.view(-1) if flat.is_contiguous() else flat[:1].reshape(-1)
    count = max(1, nbytes // flat.element_size())
    if flat.numel() <= count:
        return flat
    begin = (step * count) % (flat.numel() - count + 1)
    return flat[begin : begin + count]


def _bytes_of(pieces: Sequence[torch.Tensor]) -> Iterator[memoryview]:
    """Yield the bytes of all pieces on a device, copied to the host together, and then of each piece in host memory."""
    on_device = [piece.contiguous().view(torch.uint8) for piece in pieces if piece.device.type != "cpu"]
    if on_device:
        yield host_bytes(torch.cat(on_device))
    for piece in pieces:
        if piece.device.type == "cpu":
            yield host_bytes(piece)


def _to_plain(value: Any) -> object:
    """Return a value in a form that all workers encode in the same way, received or not: the first elements of a tensor
    as floats, scalars as Python's own types, sequences element by element, and the type's name of any other object.
    """
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
