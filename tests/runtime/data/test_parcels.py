"""Parcels: data sent to another process arrives equal in every bit and with the same strides."""

from __future__ import annotations

import os
import sys
from collections import namedtuple
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from holdfast.runtime.data.parcels import pack, unpack

Pair = namedtuple("Pair", "x y")
BASE = torch.arange(60.0).reshape(3, 4, 5)


def sent(thing: object, **options: Any) -> Any:
    parcel = pack(thing)
    try:
        return unpack(parcel, **options)
    finally:
        os.close(parcel)


@pytest.mark.parametrize(
    "tensor",
    [
        BASE,
        BASE[:, :-1],
        BASE[:, 1:],
        BASE.transpose(0, 2),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.tensor(3.5),
        torch.empty(0, 7),
        torch.ones(1, 3).expand(4, 3),
        torch.arange(5, dtype=torch.bfloat16),
        torch.tensor([True, False]),
        torch.randn(3, dtype=torch.complex64),
        torch.randn(3, dtype=torch.complex64).conj(),
        torch.randn(3, requires_grad=True),
    ],
    ids=lambda tensor: f"{tuple(tensor.shape)}-{tensor.dtype}",
)
def test_unpacked_tensors_equal_the_packed_ones(tensor: torch.Tensor) -> None:
    out = sent({"one": tensor})["one"]
    assert out.dtype == tensor.dtype
    assert torch.equal(out, tensor)
    assert not tensor.numel() or tensor.stride() == out.stride()


@pytest.mark.parametrize("tensor", [BASE[:, 1:, ::2], BASE[:, 0, 0]])
def test_tensors_with_wide_gaps_are_unpacked_contiguously(tensor: torch.Tensor) -> None:
    out = sent(tensor)
    assert torch.equal(out, tensor)
    assert out.is_contiguous()


def test_a_slice_of_a_large_tensor_is_packed_without_the_rest() -> None:
    whole = torch.zeros(1_000_000)
    parcel = pack((whole[:10], whole[::100_000]))
    assert os.fstat(parcel).st_size < 4096
    os.close(parcel)


def test_containers_and_other_values_are_packed_with_their_tensors() -> None:
    given = [Pair(BASE, {"name": "a", "array": np.arange(6).reshape(2, 3)}), (1, None, b"bytes")]
    pair, rest = sent(given)
    assert isinstance(pair, Pair)
    assert torch.equal(pair.x, BASE)
    assert pair.y["array"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert rest == (1, None, b"bytes")


def test_unpacked_values_are_writable_and_outlive_their_parcel() -> None:
    for rows in (3, 300_000):
        tensor = torch.ones(rows, 4)
        parcel = pack([tensor, np.zeros(4)])
        out = unpack(parcel)
        os.close(parcel)
        out[0].add_(1)
        out[1][0] = 7
        assert torch.equal(out[0], tensor + 1)
        assert out[1].tolist() == [7, 0, 0, 0]
        assert torch.equal(tensor, torch.ones(rows, 4))


def test_unpacked_large_tensors_are_independent_and_small_ones_hold_no_fd() -> None:
    parcel = pack(torch.zeros(300_000))
    first, second = unpack(parcel), unpack(parcel)
    os.close(parcel)
    first.add_(1)
    assert torch.equal(second, torch.ones(300_000))
    before = len(os.listdir("/proc/self/fd"))
    kept = [sent(BASE) for _ in range(3)]
    assert len(os.listdir("/proc/self/fd")) <= before
    assert len(kept) == 3


def test_classes_of_the_main_module_are_found_by_either_name(monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = ModuleType("__main__"), ModuleType("__mp_main__")
    for module in (here, there):
        exec("class Sample:\n    class Part: pass\n", module.__dict__)
    monkeypatch.setitem(sys.modules, "__main__", here)
    monkeypatch.setitem(sys.modules, "__mp_main__", there)
    assert type(sent(here.Sample.Part(), main=lambda: there)) is there.Sample.Part
    assert type(sent(there.Sample())) is here.Sample


def test_values_that_cannot_be_pickled_leave_no_descriptor_open() -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises((AttributeError, TypeError)):
        pack([BASE, lambda: None])
    assert len(os.listdir("/proc/self/fd")) <= before
