"""Notices that an `extra` was changed where it must not be: outside of `apply()`, where no step makes it atomic.

Compared is what changes with every usual write: values that are no tensors, and of each tensor its memory and torch's
version counter; of eight tensors, spread evenly, also the first bytes, for writes through `.data` leave the counter
alone. So a look costs one `state_dict()` and microseconds per tensor, whatever their size; two are taken per step.
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

#: where the tensors lie and how often they were written to, what is no tensor, and the first bytes of some
_Stamp = tuple[tree.Node, tuple[tuple[int, int], ...], tuple[bytes, ...]]


class ExtraWatch:
    """The extra objects of a job as the last step has left them."""

    def __init__(self, extra: Mapping[str, Any]) -> None:
        """Watch these, by name; what they hold is first noted at the end of a step."""
        self._extra = dict(extra)
        self._stamps: dict[str, _Stamp] = {}
        #: those whose state_dict() makes other tensors each time: only their values can be compared
        self._copies: dict[str, bool] = {}

    def clear(self) -> None:
        """The state was replaced as a whole."""
        self._stamps.clear()

    def record(self) -> None:
        """A step is applied: this is how it leaves them."""
        self._stamps = {name: self._stamp(name, thing) for name, thing in self._extra.items()}

    def check_unchanged(self) -> None:
        """Compare them with how the last step has left them.

        Raises:
            BadInputError: one is another by now.
        """
        for name, left in self._stamps.items():
            if self._stamp(name, self._extra[name]) != left:
                raise BadInputError(
                    f"extra[{name!r}] was changed outside of apply(): a failure there would leave it a step behind the "
                    "model; change it in a function that is given as protect(..., after_apply=...)"
                )

    def _stamp(self, name: str, thing: Any) -> _Stamp:
        node, tensors = _pack_tensors(name, thing)
        if name not in self._copies:
            _, again = _pack_tensors(name, thing)  # (the first ones still live, so that memory is not used twice)
            self._copies[name] = [t.data_ptr() for t in again] != [t.data_ptr() for t in tensors]
        every = max(1, -(-len(tensors) // _SAMPLED_TENSORS))
        heads = tuple(_first_bytes(tensor) for tensor in tensors[::every])
        places = () if self._copies[name] else tuple((t.data_ptr(), _version(t)) for t in tensors)
        return node, places, heads


def _pack_tensors(name: str, thing: Any) -> tuple[tree.Node, list[torch.Tensor]]:
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
