"""Values that are not tensors, as a small typed tree: it is sent as MessagePack, never as pickle."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

import msgspec
import numpy as np
import torch

from holdfast.errors import BadInputError

_MAX_DEPTH = 32
#: length of the path to a value in errors
_MAX_PATH_CHARACTERS = 120


class _Node(msgspec.Struct, frozen=True, array_like=True):
    """Base of all nodes of a tree; each kind has a tag of one letter."""


class Plain(_Node, frozen=True, array_like=True, tag="v"):
    """A leaf that JSON could hold."""

    value: bool | int | float | str | None


class Raw(_Node, frozen=True, array_like=True, tag="b"):
    """A leaf of bytes."""

    value: bytes


class Big(_Node, frozen=True, array_like=True, tag="i"):
    """An int of more than 64 bits, in decimal."""

    digits: str


class Place(_Node, frozen=True, array_like=True, tag="x"):
    """A tensor: its index in the list that is sent with the tree."""

    index: int


class Dtype(_Node, frozen=True, array_like=True, tag="d"):
    """A torch dtype, by its name."""

    name: str


class Sequence(_Node, frozen=True, array_like=True, tag="s"):
    """A list, a tuple, a set, a frozenset or a deque, as `kind` says."""

    kind: str
    items: tuple[Node, ...]


class Mapping(_Node, frozen=True, array_like=True, tag="m"):
    """A dict, an OrderedDict or a Counter, as `kind` says."""

    kind: str
    items: tuple[tuple[bool | int | float | str | None, Node], ...]


Node = Plain | Raw | Big | Place | Dtype | Sequence | Mapping

_SEQUENCES: dict[str, Callable[[list[Any]], Any]] = {
    "list": list,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "deque": deque,
}
_MAPPINGS: dict[str, Callable[[list[tuple[Any, Any]]], Any]] = {
    "dict": dict,
    "OrderedDict": OrderedDict,
    "Counter": lambda items: Counter(dict(items)),
}
_KEYS = (bool, int, float, str, type(None))


def pack(value: Any, store: Callable[[torch.Tensor], int] | None, where: str, depth: int = 0) -> Node:
    """Turn a value into a tree. NumPy scalars become Python numbers, and sets are sorted by `repr`.

    Args:
        value: scalars, strings, bytes, tensors, dtypes, and lists, tuples, sets and mappings of them.
        store: stores a tensor and returns its index; None if tensors are not allowed.
        where: name of the value in errors.

    Raises:
        BadInputError: a part has another type, a key is not a scalar, or it is nested too deep.
    """
    if depth > _MAX_DEPTH:
        raise BadInputError(
            f"{_shorten_path(where)} is nested deeper than {_MAX_DEPTH}, or holds itself: it cannot be sent to a "
            "joiner; make it flatter"
        )
    if isinstance(value, torch.Tensor):
        return _pack_tensor(value, store, where)
    if isinstance(value, np.generic):
        value = cast(Any, value).item()
    if isinstance(value, int) and not isinstance(value, bool) and not -(1 << 63) <= value < 1 << 63:
        return Big(str(value))
    if type(value) in _KEYS:
        return Plain(value)
    if type(value) is bytes:
        return Raw(value)
    if isinstance(value, torch.dtype):
        return Dtype(str(value).removeprefix("torch."))
    kind = type(value).__name__
    if type(value) in (list, tuple, set, frozenset, deque):
        items = cast(Iterable[Any], value)
        if type(value) in (set, frozenset):
            items = sorted(items, key=repr)
        return Sequence(kind, tuple(pack(item, store, f"{where}[...]", depth + 1) for item in items))
    if type(value) in (dict, OrderedDict, Counter):
        pairs = cast(dict[Any, Any], value).items()
        return Mapping(kind, tuple(_pack_item(key, item, store, where, depth) for key, item in pairs))
    raise _unsupported_type(kind, store, where)


def _pack_tensor(value: torch.Tensor, store: Callable[[torch.Tensor], int] | None, where: str) -> Place:
    """Store a tensor, and return its place.

    Raises:
        BadInputError: tensors are not allowed (`store` is None).
    """
    if store is None:
        raise _unsupported_type("tensor", store, where)
    return Place(store(value))


def _unsupported_type(kind: str, store: Callable[[torch.Tensor], int] | None, where: str) -> BadInputError:
    tensors = "" if store is None else "tensors, "
    return BadInputError(
        f"{_shorten_path(where)} is a {kind}: the state may hold {tensors}numbers, strings, bytes, lists, tuples, "
        "sets and mappings; leave out values that are not state, and convert the others to these types"
    )


def _shorten_path(where: str) -> str:
    """Return the path to a value; the middle of a long path is left out."""
    half = _MAX_PATH_CHARACTERS // 2
    return where if len(where) <= _MAX_PATH_CHARACTERS else f"{where[:half]} ... {where[-half:]}"


def _pack_item(
    key: Any, item: Any, store: Callable[[torch.Tensor], int] | None, where: str, depth: int
) -> tuple[Any, Node]:
    """Return a mapping's key, and its value as a tree.

    Raises:
        BadInputError: the key is not a number, a string, a bool or None; or as `pack`.
    """
    if type(key) not in _KEYS:
        raise BadInputError(f"{_shorten_path(where)} has the key {key!r}: keys must be numbers or strings")
    return key, pack(item, store, f"{where}[{key!r}]", depth + 1)


def unpack(node: Node, tensors: list[torch.Tensor]) -> Any:
    """Turn a tree back into the value that `pack` was given.

    Args:
        tensors: the tensors, to which the tree refers by index.

    Raises:
        ValueError: the tree names a tensor, dtype or kind that does not exist.
    """
    match node:
        case Plain() | Raw():
            return node.value
        case Big():
            return int(node.digits)
        case Place():
            if not 0 <= node.index < len(tensors):
                raise ValueError(f"state names tensor {node.index} of {len(tensors)}")
            return tensors[node.index]
        case Dtype():
            return dtype_of(node.name)
        case Sequence():
            return _lookup(_SEQUENCES, node.kind)([unpack(item, tensors) for item in node.items])
        case Mapping():
            return _lookup(_MAPPINGS, node.kind)([(key, unpack(item, tensors)) for key, item in node.items])


def tensor_places(node: Node) -> list[int]:
    """Return the indices of all tensors of a tree, in order."""
    match node:
        case Place():
            return [node.index]
        case Sequence():
            return [place for item in node.items for place in tensor_places(item)]
        case Mapping():
            return [place for _, item in node.items for place in tensor_places(item)]
        case _:
            return []


def tensor_paths(node: Node, way: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], int]]:
    """Yield the path and the index of each tensor of a tree; a path has the keys and numbers from the root."""
    match node:
        case Place():
            yield way, node.index
        case Sequence():
            for number, item in enumerate(node.items):
                yield from tensor_paths(item, (*way, str(number)))
        case Mapping():
            for key, item in node.items:
                yield from tensor_paths(item, (*way, str(key)))
        case _:
            pass


def tensors_by_path(value: Any, where: str) -> Iterator[tuple[tuple[str, ...], torch.Tensor]]:
    """Yield the path and the tensor of each tensor in a value.

    Raises:
        BadInputError: as `pack`.
    """
    found: list[torch.Tensor] = []

    def store(tensor: torch.Tensor) -> int:
        found.append(tensor)
        return len(found) - 1

    for way, place in tensor_paths(pack(value, store, where)):
        yield way, found[place]


def dtype_of(name: str) -> torch.dtype:
    """Return the torch dtype with a name.

    Raises:
        ValueError: it does not exist.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"dtype {name!r} does not exist in torch")
    return dtype


def _lookup(table: dict[str, Any], kind: str) -> Any:
    """Return the entry of a table of collection types.

    Raises:
        ValueError: it has no such entry.
    """
    if kind not in table:
        raise ValueError(f"state has a {kind!r}, which is unknown")
    return table[kind]
