"""Which kernels move the rows of tokens on a device."""

from __future__ import annotations

import importlib.util

import torch

from holdfast.runtime.moe.kernels.interface import TokenKernels
from holdfast.runtime.moe.kernels.torch_kernels import TorchKernels

#: What the Triton kernels take; all else is torch's.
_TRITON_DTYPES = (torch.float32, torch.bfloat16)


def kernels_for(device: torch.device, dtype: torch.dtype) -> TokenKernels:
    """Return the fastest kernels for rows of a dtype on a device: Triton's on a GPU where it is there, else torch's."""
    if device.type == "cuda" and dtype in _TRITON_DTYPES and has_triton():
        # Imported only when asked for: neither `import holdfast` nor a job on CPUs pays for Triton.
        from holdfast.runtime.moe.kernels.triton_kernels import TritonKernels

        return TritonKernels()
    return TorchKernels()


def has_triton() -> bool:
    """Say whether Triton can be imported, without importing it."""
    return importlib.util.find_spec("triton") is not None
