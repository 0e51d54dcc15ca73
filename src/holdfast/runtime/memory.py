"""The bytes of tensors, for sockets and hashes."""

from __future__ import annotations

import torch


def directly_readable(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's elements lie in host memory, one after the other."""
    return tensor.device.type == "cpu" and tensor.is_contiguous()


def host_bytes(tensor: torch.Tensor) -> memoryview:
    """Return a tensor's bytes: its own memory where `directly_readable`, else a copy."""
    host = tensor.detach() if directly_readable(tensor) else tensor.detach().cpu().contiguous()
    return memoryview(host.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
