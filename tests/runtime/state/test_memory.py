"""Memory of tensors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from holdfast.runtime.state.memory import HUGE_PAGE, large_zeros

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("numel", [0, 1, 1000, (3 << 20) + 1])
def test_large_buffers_are_zero_and_writable(dtype: torch.dtype, numel: int) -> None:
    first, second = large_zeros(numel, dtype=dtype, device=CPU), large_zeros(numel, dtype=dtype, device=CPU)
    assert (first.shape, first.dtype) == ((numel,), dtype)
    first.fill_(1)
    assert torch.equal(first, torch.ones(numel, dtype=dtype))
    assert torch.equal(second, torch.zeros(numel, dtype=dtype))


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").is_dir(), reason="this kernel has no huge pages")
def test_large_buffers_use_huge_pages() -> None:
    buffer = large_zeros(4 * HUGE_PAGE, dtype=torch.uint8, device=CPU)
    assert buffer.data_ptr() % HUGE_PAGE == 0
    assert "hg" in _flags_of(buffer.data_ptr())


def _flags_of(address: int) -> list[str]:
    """Return the flags of the mapping that contains an address."""
    here = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split(maxsplit=1)[0]
        if "-" in first and not first.endswith(":"):
            low, high = (int(bound, 16) for bound in first.split("-"))
            here = low <= address < high
        elif here and first == "VmFlags:":
            return line.split()[1:]
    return []
