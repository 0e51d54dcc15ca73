"""Passes objects between processes of one machine through shared memory.

A parcel is a memory file: a pickle, followed by large pieces (tensors, numpy arrays), which the receiver maps instead
of copying. Parcels travel between a worker and the loader workers that it started, over a private socket pair. Nothing
else is ever unpickled.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
import struct
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from holdfast.runtime.tensors import from_buffer

#: the names of the script's module: in the worker, and in a loader worker
MAIN, LOADED_MAIN = "__main__", "__mp_main__"
_HEAD = struct.Struct("<QQ")
_SIZE = struct.Struct("<Q")
#: the alignment of torch's own tensors, enough for the widest vector instructions
_ALIGNED = 64
_COPIED_BYTES = 1 << 16


def pack(value: object) -> int:
    """Write a value into a new memory file: its pickle, then its large pieces of memory, aligned. Return the file's
    descriptor, which the caller must close.

    Raises:
        Exception: an exception of pickling, such as PicklingError, TypeError or AttributeError.
    """
    pieces: list[memoryview] = []
    stream = io.BytesIO()
    _Pickler(stream, buffer_callback=lambda piece: pieces.append(piece.raw())).dump(value)
    sizes = b"".join(_SIZE.pack(piece.nbytes) for piece in pieces)
    written = stream.getbuffer()
    parcel = os.memfd_create("holdfast-parcel", os.MFD_CLOEXEC)
    try:
        place = _write(parcel, _HEAD.pack(written.nbytes, len(pieces)) + sizes, 0)
        place = _write(parcel, written, place)
        for piece in pieces:
            place = _write(parcel, piece, _align(place))
        os.ftruncate(parcel, max(place, _HEAD.size))
    except BaseException:
        os.close(parcel)
        raise
    return parcel


def unpack(parcel: int, main: Callable[[], ModuleType] = lambda: sys.modules[MAIN]) -> Any:
    """Return the content of a parcel; its descriptor stays open. Large pieces stay in the parcel's memory, writable.

    Args:
        main: returns the script's module, if it defines an object in the parcel.

    Raises:
        Exception: an exception of unpickling.
    """
    memory = _map_parcel(parcel)
    pickled, count = _HEAD.unpack_from(memory)
    place = _HEAD.size + count * _SIZE.size
    sizes = [_SIZE.unpack_from(memory, _HEAD.size + number * _SIZE.size)[0] for number in range(count)]
    start = place
    place += pickled
    pieces: list[memoryview] = []
    for size in sizes:
        place = _align(place)
        pieces.append(memory[place : place + size])
        place += size
    return _Unpickler(io.BytesIO(memory[start : start + pickled]), pieces, main).load()


def _map_parcel(parcel: int) -> memoryview:
    """Return a parcel's memory. A small one is copied, because each mapping holds a descriptor while it is used."""
    size = os.fstat(parcel).st_size
    if size > _COPIED_BYTES:
        return memoryview(mmap.mmap(parcel, size, flags=mmap.MAP_SHARED))
    small = memoryview(bytearray(size))
    os.preadv(parcel, [small], 0)
    return small


class _Pickler(pickle.Pickler):
    """Pickles host tensors as separate pieces of memory."""

    def __init__(self, stream: io.BytesIO, *, buffer_callback: Callable[[pickle.PickleBuffer], None]) -> None:
        super().__init__(stream, protocol=5, buffer_callback=buffer_callback)

    def reducer_override(self, obj: Any) -> Any:
        """Pickle a plain host tensor (strided, without a gradient) as a separate piece of memory with its strides; one
        with large gaps is made contiguous first. All other objects are pickled as usual.
        """
        if type(obj) is not torch.Tensor or not _is_plain(obj):
            return NotImplemented
        # Keep the strides: kernels may sum in another order otherwise.
        span = 1 + sum((size - 1) * stride for size, stride in zip(obj.shape, obj.stride(), strict=True))
        if obj.numel() == 0 or span > 2 * obj.numel():
            obj = obj.contiguous()
            span = obj.numel()
        flat = obj.as_strided((span,), (1,)).view(torch.uint8)
        numbers: Any = flat.numpy()
        return _rebuild_tensor, (pickle.PickleBuffer(numbers), obj.dtype, tuple(obj.shape), obj.stride())


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is plain numbers in host memory."""
    return (
        tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and not (tensor.requires_grad or tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
    )


def _rebuild_tensor(piece: Any, dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor with this shape and these strides, in the memory of the piece. A piece without bytes gives a
    tensor without elements.
    """
    if not memoryview(piece).nbytes:
        return torch.empty(shape, dtype=dtype)
    return from_buffer(piece).view(dtype).as_strided(shape, stride)


class _Unpickler(pickle.Unpickler):
    """Finds definitions of the script's module."""

    def __init__(self, stream: io.BytesIO, pieces: list[memoryview], main: Callable[[], ModuleType]) -> None:
        super().__init__(stream, buffers=pieces)
        self._main = main

    def find_class(self, module_name: str, global_name: str) -> Any:
        """Return a class or function by its name; a definition of the script is looked up in the module that `main`
        returns.
        """
        if module_name not in (MAIN, LOADED_MAIN):
            return super().find_class(module_name, global_name)
        found: Any = self._main()
        for part in global_name.split("."):
            found = getattr(found, part)
        return found


def _align(place: int) -> int:
    return -(-place // _ALIGNED) * _ALIGNED


def _write(parcel: int, piece: bytes | memoryview, place: int) -> int:
    """Write a whole piece into a file at position `place`, and return the position after it."""
    left = memoryview(piece)
    while left.nbytes:
        written = os.pwrite(parcel, left, place)
        left, place = left[written:], place + written
    return place
