"""Memory of tensors: as bytes for sockets and hashes, and in huge pages for large exchanges."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterable, Sequence

import torch

#: bytes of a huge page on x86-64, and on ARM with pages of 4 KiB
HUGE_PAGE = 2 << 20


def is_directly_readable(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's elements are contiguous in host memory."""
    return tensor.device.type == "cpu" and tensor.is_contiguous()


def host_bytes(tensor: torch.Tensor) -> memoryview:
    """Return a tensor's bytes: its own memory if `is_directly_readable`, else a copy."""
    host = tensor.detach() if is_directly_readable(tensor) else tensor.detach().cpu().contiguous()
    return host.reshape(-1).view(torch.uint8).numpy().data


class ReusableMemory:
    """Memory of unused tensors, for new tensors of the same kind.

    Writing to used memory is faster than writing to memory that the system must provide first.
    """

    def __init__(self, tensors: Iterable[torch.Tensor], without: Iterable[torch.Tensor] = ()) -> None:
        """Collect these tensors, except tensors that share memory with another one or with `without`."""
        found: dict[int, list[torch.Tensor]] = {tensor.data_ptr(): [tensor, tensor] for tensor in without}
        for tensor in tensors:
            whole = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.numel() * tensor.itemsize
            if tensor.numel() and whole:
                found.setdefault(tensor.data_ptr(), []).append(tensor.detach())
        self._free: dict[tuple[torch.dtype, torch.Size, torch.device], list[torch.Tensor]] = {}
        for tensor, *others in found.values():
            if not others:
                self._free.setdefault((tensor.dtype, tensor.shape, tensor.device), []).append(tensor)

    def pop_tensor(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor | None:
        """Return a tensor of this kind, and remove it; None if none is left."""
        free = self._free.get((dtype, torch.Size(shape), device))
        return free.pop() if free else None


def large_zeros(numel: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return zeros, `(numel,)`; large ones in host memory use huge pages, if the system supports them.

    The kernel handles a buffer of megabytes page by page each time that it goes through sockets, in every step.
    """
    nbytes = numel * dtype.itemsize
    if device.type != "cpu" or nbytes < HUGE_PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(numel, dtype=dtype, device=device)
    region = mmap.mmap(-1, nbytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        region.madvise(mmap.MADV_HUGEPAGE)
    space = torch.frombuffer(region, dtype=torch.uint8)
    start = -space.data_ptr() % HUGE_PAGE
    return space[start : start + nbytes].view(dtype)
