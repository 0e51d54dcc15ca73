"""Detects that an `extra` object was changed outside of `apply()`: only changes in a step are atomic.

It compares values that change with every usual write: values that are not tensors, and each tensor's address and
version counter. Writes through `.data` do not change the counter, so the first bytes of eight evenly chosen tensors are
compared, too. A check costs one `state_dict()` and microseconds per tensor, whatever their size; each step makes two
checks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from holdfast.errors import BadInputError
from holdfast.runtime.dtensor.local import local_of
from holdfast.runtime.state import tree

_SAMPLED_TENSORS = 8
_BYTES = 64

#: values that are not tensors, address and version counter of each tensor, and the first bytes of some tensors
_Stamp = tuple[tree.Node, tuple[tuple[int, int], ...], tuple[bytes, ...]]


class ExtraWatch:
    """The extra objects of a job, with their state after the last step."""

    def __init__(self, extra: Mapping[str, Any]) -> None:
        """Watch these objects, by name; their state is first recorded at the end of a step."""
        self._extra = dict(extra)
        self._stamps: dict[str, _Stamp] = {}
        #: whether an object's state_dict() makes new tensors each time, so that only their values can be compared
        self._copies: dict[str, bool] = {}

    def clear(self) -> None:
        """Drop the recorded state, because the whole state was replaced."""
        self._stamps.clear()

    def record(self) -> None:
        """Record the state after a step was applied."""
        self._stamps = {name: self._stamp(name, thing) for name, thing in self._extra.items()}

    def check_unchanged(self) -> None:
        """Compare the objects with their recorded state after the last step; without one, nothing is compared.

        Raises:
            BadInputError: one of them has changed.
        """
        for name, left in self._stamps.items():
            if self._stamp(name, self._extra[name]) != left:
                raise BadInputError(
                    f"extra[{name!r}] was changed outside of apply(): a failure there would leave it a step behind the "
                    "model; change it in a function that is given as protect(..., after_apply=...)"
                )

    def _stamp(self, name: str, thing: Any) -> _Stamp:
        """Return the values of an object that change with usual writes: all values except for tensors, each tensor's
        address and version, and the first bytes of some tensors. Addresses are left out if `state_dict()` makes new
        tensors each time.
        """
        node, tensors = _pack_tensors(name, thing)
        if name not in self._copies:
            _, again = _pack_tensors(name, thing)  # The first ones still exist, so their memory is not used again.
            self._copies[name] = [t.data_ptr() for t in again] != [t.data_ptr() for t in tensors]
        every = max(1, -(-len(tensors) // _SAMPLED_TENSORS))
        heads = tuple(_first_bytes(tensor) for tensor in tensors[::every])
        places = () if self._copies[name] else tuple((t.data_ptr(), _version(t)) for t in tensors)
        return node, places, heads


def _pack_tensors(name: str, thing: Any) -> tuple[tree.Node, list[torch.Tensor]]:
    """Return an object's state as a tree, and its tensors, local parts without a copy. `name` is its name in
    `extra`.
    """
    tensors: list[torch.Tensor] = []

    def place(tensor: torch.Tensor) -> int:
        tensors.append(local_of(tensor).detach())
        return len(tensors) - 1

    return tree.pack(thing.state_dict(), place, f"extra[{name!r}]"), tensors


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _first_bytes(tensor: torch.Tensor) -> bytes:
    count = max(1, _BYTES // tensor.element_size())
    return tensor.reshape(-1)[:count].cpu().contiguous().view(torch.uint8).numpy().tobytes()
