"""Loads that inference engines have written down: SGLang's recordings (.pt), vLLM's windows (.pt, .safetensors), .npy.

A .pt file is a zip file with a pickle in it. Nothing of it is run: only what tensors consist of is read, torch is not
imported, and whatever else there is is named and refused.
"""

from __future__ import annotations

import io
import json
import math
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np

from holdfast.documents import open_given
from holdfast.errors import BadInputError

_Table = np.ndarray[Any, Any]

#: Names under which engines keep loads by logical expert, the usual one first.
_LOADS = ("logical_count", "expert_load", "expert_load_window", "tokens", "weight", "load")
#: numpy's types for torch's storages and for safetensors' names; bfloat16 has none, and is widened.
_STORAGES = {
    "FloatStorage": "<f4",
    "DoubleStorage": "<f8",
    "HalfStorage": "<f2",
    "LongStorage": "<i8",
    "IntStorage": "<i4",
    "ShortStorage": "<i2",
    "CharStorage": "i1",
    "ByteStorage": "u1",
    "BoolStorage": "?",
    "BFloat16Storage": "bf16",
}
_SAFETENSORS = {
    "F64": "<f8",
    "F32": "<f4",
    "F16": "<f2",
    "BF16": "bf16",
    "I64": "<i8",
    "I32": "<i4",
    "I16": "<i2",
    "I8": "i1",
    "U8": "u1",
    "BOOL": "?",
}
#: Most bytes of the header of a .safetensors file.
_LONGEST_HEADER = 100_000_000

#: Most numbers of a tensor. A small file can describe a huge tensor that repeats itself.
_MOST_NUMBERS = 1 << 28

SUFFIXES = (".pt", ".pth", ".safetensors", ".npy")


def read_dump(path: Path) -> _Table:
    """Return loads `(windows, L, E)` from a file that an engine wrote. A table without windows becomes one window.

    Raises:
        BadInputError: the file cannot be read, or holds no table of loads, or several of which each could be meant.
    """
    try:
        with open_given(path) as file:
            data = file.read()
    except OSError as error:
        raise BadInputError(f"--loads {path}: cannot be read ({error.strerror})") from None
    readers: dict[str, Callable[[bytes], Any]] = {".safetensors": _safetensors, ".npy": _npy}
    try:
        found = readers.get(path.suffix, _pt)(data)
    except (ValueError, KeyError, TypeError, IndexError, EOFError, OverflowError, AttributeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise BadInputError(f"--loads {path}: not a {path.suffix} file of tensors ({reason})") from None
    except (pickle.UnpicklingError, zipfile.BadZipFile, json.JSONDecodeError, MemoryError) as error:
        raise BadInputError(f"--loads {path}: not a {path.suffix} file of tensors ({error})") from None
    return _as_windows(path, found)


def _as_windows(path: Path, found: Any) -> _Table:
    """Return the loads from a dump as [window, layer, expert].

    A mapping is searched for its table by name, or must have only one. A table without windows becomes one window.

    Raises:
        BadInputError: the table has another shape.
    """
    table = cast(_Table, found) if isinstance(found, np.ndarray) else _choose_table(path, found)
    if table.ndim == 2:
        table = table[None]
    if table.ndim != 3 or not table.size:
        raise BadInputError(f"--loads {path}: has shape {table.shape}: loads are [layer, expert], or one such a window")
    return table


def _choose_table(path: Path, found: Any) -> _Table:
    """Return the table of loads: the first one with a name in `_LOADS`, or the only one with two or three axes.

    Raises:
        BadInputError: there is no such table, or several without such a name.
    """
    tables = {name: table for name, table in _arrays_by_name(found).items() if table.ndim in (2, 3)}
    for name in _LOADS:
        if name in tables:
            return tables[name]
    if len(tables) != 1:
        names = ", ".join(sorted(tables)) or "no table of two or three axes"
        raise BadInputError(f"--loads {path}: holds {names}: keep the loads alone, or name them {_LOADS[0]}")
    return next(iter(tables.values()))


def _arrays_by_name(found: Any) -> dict[str, _Table]:
    """Return the arrays of a mapping by name, or {} if it is not a mapping."""
    if not isinstance(found, Mapping):
        return {}
    entries = cast(Mapping[Any, Any], found)
    return {str(name): value for name, value in entries.items() if isinstance(value, np.ndarray)}


def _npy(data: bytes) -> _Table:
    return np.load(io.BytesIO(data), allow_pickle=False)


def _as_array(data: bytes, kind: str) -> _Table:
    """Return bytes as an array of a dtype; "bf16" becomes float32."""
    if kind == "bf16":
        return (np.frombuffer(data, dtype="<u2").astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(data, dtype=kind)


def _safetensors(data: bytes) -> dict[str, _Table]:
    """Return the tensors of a safetensors file by name. Raises `ValueError` if it is cut off."""
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or length > min(len(data) - 8, _LONGEST_HEADER):
        raise ValueError("it is cut off")
    header = cast(dict[str, Any], json.loads(data[8 : 8 + length]))
    body = data[8 + length :]
    found: dict[str, _Table] = {}
    for name, entry in header.items():
        if name != "__metadata__":
            start, stop = entry["data_offsets"]
            found[name] = _as_array(body[start:stop], _SAFETENSORS[entry["dtype"]]).reshape(entry["shape"])
    return found


def _pt(data: bytes) -> Any:
    """Return the contents of a file by `torch.save`, without torch: tensors as arrays, and no other objects.

    Raises:
        ValueError: it is compressed, or older than torch 1.6. UnpicklingError: it contains other objects.
    """
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        names = [name for name in archive.namelist() if name.endswith("/data.pkl")]
        if len(names) != 1:
            raise ValueError("it has no data.pkl; files older than torch 1.6 are not read")
        if sum(entry.file_size for entry in archive.infolist()) > len(data):
            raise ValueError("it is compressed, as torch writes none")
        root = names[0].removesuffix("data.pkl")
        return _Tensors(archive.read(names[0]), lambda key: archive.read(f"{root}data/{key}")).load()


class _Tensors(pickle.Unpickler):
    """Reads tensors as numpy arrays, and plain values; anything else in the pickle is an error."""

    def __init__(self, data: bytes, storage: Callable[[str], bytes]) -> None:
        super().__init__(io.BytesIO(data))
        self._storage = storage

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        """Return what stands for a class or function in a pickle: tensors, their storages and sizes, and ordered
        mappings.

        Raises:
            UnpicklingError: it is anything else.
        """
        if (module_name, global_name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _rebuild_tensor
        if (module_name, global_name) == ("collections", "OrderedDict"):
            return OrderedDict
        if module_name in ("torch", "torch.storage") and global_name in _STORAGES:
            return _STORAGES[global_name]
        if (module_name, global_name) == ("torch", "Size"):
            return tuple
        raise pickle.UnpicklingError(f"it holds {module_name}.{global_name}, which is not a tensor")

    def persistent_load(self, pid: Any) -> _Table:
        """Return the numbers of a storage in the file. Raises `UnpicklingError` for anything else."""
        what, kind, key = pid[0], pid[1], pid[2]
        if what != "storage" or kind not in _STORAGES.values():
            raise pickle.UnpicklingError(f"it holds a {what}, which is not a storage")
        return _as_array(self._storage(str(key)), kind)


def _rebuild_tensor(storage: _Table, offset: int, size: tuple[int, ...], stride: tuple[int, ...], *_: Any) -> _Table:
    """Return a tensor's numbers as a new array.

    Raises:
        UnpicklingError: it does not lie within its storage, or has more than `_MOST_NUMBERS` numbers.
    """
    last = offset + sum((length - 1) * step for length, step in zip(size, stride, strict=True))
    if min((offset, *size, *stride), default=0) < 0 or (0 not in size and last >= storage.size):
        raise pickle.UnpicklingError("a tensor is larger than its storage")
    if math.prod(size) > _MOST_NUMBERS:
        raise pickle.UnpicklingError(f"a tensor has {math.prod(size)} numbers: {_MOST_NUMBERS} at the most")
    if 0 in size:
        return np.zeros(size, dtype=storage.dtype)
    steps = tuple(step * storage.itemsize for step in stride)
    return np.lib.stride_tricks.as_strided(storage[offset:], shape=size, strides=steps).copy()
