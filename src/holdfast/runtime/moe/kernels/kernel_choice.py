"""The choice of the kernels that permute rows of tokens."""

from __future__ import annotations

import importlib.util

import torch

from holdfast.runtime.moe.kernels.interface import TokenKernels
from holdfast.runtime.moe.kernels.torch_kernels import TorchKernels

#: dtypes of the Triton kernels; torch handles all others
_TRITON_DTYPES = (torch.float32, torch.bfloat16)


def kernels_for(device: torch.device, dtype: torch.dtype) -> TokenKernels:
    """Return the fastest kernels for a dtype on a device: Triton on a GPU if it is installed, else torch."""
    if device.type == "cuda" and dtype in _TRITON_DTYPES and has_triton():
        # Imported only if needed: neither `import holdfast` nor a job on CPUs pays for Triton.
        from holdfast.runtime.moe.kernels.triton_kernels import TritonKernels

        return TritonKernels()
    return TorchKernels()


def has_triton() -> bool:
    """Return whether Triton can be imported, without importing it."""
    return importlib.util.find_spec("triton") is not None
