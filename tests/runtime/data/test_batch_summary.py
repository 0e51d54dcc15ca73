"""The summary that nodes compare their data with: equal for equal data, and free of side effects."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from holdfast.coordination.generations.same_data import difference
from holdfast.protocol.batch_summary import MAX_PARTS, BatchSummary
from holdfast.runtime.data.batch_summary import summarize_batch, summarize_data
from holdfast.runtime.data.loading import MicroBatchLoader

X = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))


def loader(data: Any) -> MicroBatchLoader:
    return MicroBatchLoader(data, device=torch.device("cpu"), seed=3, global_batch=16, micro_batch=4)


def pairs(seed: int) -> TensorDataset:
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, (x.sum(1) > 0).long())


def test_only_equal_data_have_equal_summaries() -> None:
    assert summarize_data(loader(pairs(1))) == summarize_data(loader(pairs(1)))
    assert difference(summarize_data(loader(pairs(1))), summarize_data(loader(pairs(2))))


@pytest.mark.parametrize("kind", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
def test_floating_point_noise_is_not_a_difference(kind: torch.dtype) -> None:
    batch = X.to(kind)
    noisy = batch * (1.0 + 1e-3 * torch.randn(X.shape, generator=torch.Generator().manual_seed(9))).to(kind)
    assert difference(summarize_batch(noisy), summarize_batch(batch)) == ""
    assert difference(summarize_batch(batch.flip(0)), summarize_batch(batch))


def test_one_changed_sample_is_a_difference() -> None:
    other = X.clone()
    other[5] = -other[5]
    assert difference(summarize_batch(other), summarize_batch(X))


def test_all_parts_of_a_micro_batch_are_compared() -> None:
    batch = {"x": [X, np.arange(6.0)], "labels": torch.arange(4), "text": "a", "n": 3, "f": 0.5, "what": object()}
    summary = summarize_batch(batch)
    assert [part.name for part in summary] == [
        "['x'][0]",
        "['x'][1]",
        "['labels']",
        "['text']",
        "['n']",
        "['f']",
        "['what']",
    ]
    for name, other in {"labels": torch.arange(4) + 1, "text": "b", "n": 4, "f": 0.75, "x": [X, np.ones(6)]}.items():
        assert name in difference(summarize_batch({**batch, name: other}), summary)
    assert difference(summarize_batch({**batch, "what": object()}), summary) == ""


def test_non_finite_numbers_are_compared_by_position() -> None:
    one, other = X.clone(), X.clone()
    one[0, 0], other[1, 1] = float("nan"), float("nan")
    assert difference(summarize_batch(one), summarize_batch(one)) == ""
    assert difference(summarize_batch(one), summarize_batch(other))


def test_paths_are_compared_by_file_name_only() -> None:
    assert summarize_batch("/mnt/a/cat.jpg") == summarize_batch("/data/b/cat.jpg") != summarize_batch("/data/b/dog.jpg")


def test_a_summary_has_a_bounded_size() -> None:
    summary = summarize_batch([X] * 1000)
    assert len(summary) == MAX_PARTS
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(summary), type=BatchSummary) == summary
    (large,) = summarize_batch(torch.ones(1 << 20))
    assert large.norm == pytest.approx(2.0**8, rel=0.5)


class Stream:
    """Counts how often it is opened."""

    opened = 0

    def open(self, micro_batch: int, micro_batches: int) -> Any:
        self.opened += 1
        raise AssertionError


def test_a_summary_does_not_open_streams() -> None:
    stream = Stream()
    assert summarize_data(loader(stream)) == ()
    assert stream.opened == 0


def test_data_that_cannot_be_fetched_have_an_empty_summary() -> None:
    class Broken(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 64

        def __getitem__(self, index: int) -> Any:
            raise OSError("no such file")

    assert summarize_data(loader(Broken())) == ()


def test_a_summary_does_not_change_the_random_numbers_of_the_script() -> None:
    class Drawing(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 64

        def __getitem__(self, index: int) -> Any:
            return torch.rand(2) + random.random() + np.random.rand()

    torch.manual_seed(4)
    random.seed(4)
    np.random.seed(4)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    assert summarize_data(loader(Drawing())) == summarize_data(loader(Drawing()))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before[1:]
