"""Fault injection: flips a bit of a tensor."""

from __future__ import annotations

import torch

#: In the second highest byte: a high bit of the mantissa in every common floating-point type.
_BIT = 0x08


def flip_bit(tensor: torch.Tensor) -> None:
    """Flip a bit of the first element, in place."""
    first = (0,) * tensor.dim()
    value = tensor[first].reshape(1).clone()
    value.view(torch.uint8)[max(0, tensor.element_size() - 2)] ^= _BIT
    with torch.no_grad():
        tensor[first] = value[0]
