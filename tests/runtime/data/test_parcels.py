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
def test_tensors_come_out_as_they_went_in(tensor: torch.Tensor) -> None:
    out = sent({"one": tensor})["one"]
    assert out.dtype == tensor.dtype
    assert torch.equal(out, tensor)
    assert not tensor.numel() or tensor.stride() == out.stride()


@pytest.mark.parametrize("tensor", [BASE[:, 1:, ::2], BASE[:, 0, 0]])
def test_tensors_with_wide_gaps_come_out_without(tensor: torch.Tensor) -> None:
    out = sent(tensor)
    assert torch.equal(out, tensor)
    assert out.is_contiguous()


def test_a_piece_of_something_large_does_not_bring_the_whole() -> None:
    whole = torch.zeros(1_000_000)
    parcel = pack((whole[:10], whole[::100_000]))
    assert os.fstat(parcel).st_size < 4096
    os.close(parcel)


def test_what_holds_them_and_what_lies_beside_them_comes_too() -> None:
    given = [Pair(BASE, {"name": "a", "array": np.arange(6).reshape(2, 3)}), (1, None, b"bytes")]
    pair, rest = sent(given)
    assert isinstance(pair, Pair)
    assert torch.equal(pair.x, BASE)
    assert pair.y["array"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert rest == (1, None, b"bytes")


def test_what_came_out_can_be_written_to_and_outlives_its_parcel() -> None:
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


def test_what_is_large_is_not_copied_and_what_is_small_holds_no_descriptor() -> None:
    parcel = pack(torch.zeros(300_000))
    first, second = unpack(parcel), unpack(parcel)
    os.close(parcel)
    first.add_(1)
    assert torch.equal(second, torch.ones(300_000))
    before = len(os.listdir("/proc/self/fd"))
    kept = [sent(BASE) for _ in range(3)]
    assert len(os.listdir("/proc/self/fd")) <= before
    assert len(kept) == 3


def test_what_the_script_defines_is_found_where_the_script_is(monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = ModuleType("__main__"), ModuleType("__mp_main__")
    for module in (here, there):
        exec("class Sample:\n    class Part: pass\n", module.__dict__)
    monkeypatch.setitem(sys.modules, "__main__", here)
    monkeypatch.setitem(sys.modules, "__mp_main__", there)
    assert type(sent(here.Sample.Part(), main=lambda: there)) is there.Sample.Part
    assert type(sent(there.Sample())) is here.Sample


def test_what_cannot_be_pickled_leaves_nothing_behind() -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises((AttributeError, TypeError)):
        pack([BASE, lambda: None])
    assert len(os.listdir("/proc/self/fd")) <= before
