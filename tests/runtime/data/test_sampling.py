from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import IterableDataset, TensorDataset

from holdfast.coordination.generations.assignment import keep_summed, round_robin
from holdfast.errors import BadInputError
from holdfast.runtime.data.loading import MicroBatchLoader
from holdfast.runtime.data.randomness import derive_seed, seed_micro_batch
from holdfast.runtime.data.sampling import SampleOrder
from holdfast.runtime.data.torch_loader import DataOptions

PINNED = [6, 0, 7, 9, 4, 1, 8, 5, 2, 3]
CPU = torch.device("cpu")
orders = st.builds(
    lambda seed, length, micro, count: SampleOrder(
        seed=seed, length=length, global_batch=micro * count, micro_batch=micro
    ),
    st.integers(-(2**70), 2**70),
    st.integers(1, 40),
    st.integers(1, 7),
    st.integers(1, 7),
)


def first_places(order: SampleOrder, count: int) -> list[int]:
    steps = range(1, count // order.global_batch + 2)
    return [index for step in steps for part in range(order.micro_batches) for index in order.indices(step, part)][
        :count
    ]


@given(orders)
def test_every_pass_has_each_sample_once(order: SampleOrder) -> None:
    places = first_places(order, 3 * order.length)
    for start in range(0, len(places), order.length):
        assert sorted(places[start : start + order.length]) == list(range(order.length))


@given(orders, st.integers(1, 9), st.integers(1, 9), st.integers(1, 5))
def test_a_step_has_the_same_samples_with_any_world_size(order: SampleOrder, world: int, other: int, step: int) -> None:
    def samples(shares: Sequence[tuple[int, ...]]) -> list[int]:
        return sorted(index for share in shares for part in share for index in order.indices(step, part))

    def dealt(ranks: int) -> list[tuple[int, ...]]:
        return [round_robin(order.micro_batches, ranks, rank) for rank in range(ranks)]

    after_failure = keep_summed(order.micro_batches, [share[:1] for share in dealt(other)])
    expected = samples(dealt(1))
    assert samples(dealt(world)) == expected
    assert samples(after_failure) == expected
    assert len(expected) == order.global_batch


@given(orders, st.integers(1, 30))
def test_the_order_does_not_depend_on_earlier_calls(order: SampleOrder, step: int) -> None:
    fresh = SampleOrder(
        seed=order.seed, length=order.length, global_batch=order.global_batch, micro_batch=order.micro_batch
    )
    for earlier in range(1, step):
        order.indices(earlier, 0)
    assert order.indices(step, 0) == fresh.indices(step, 0)


def test_the_order_differs_between_passes_and_seeds() -> None:
    def a_pass(seed: int, number: int) -> list[int]:
        order = SampleOrder(seed=seed, length=100, global_batch=100, micro_batch=100)
        return order.indices(number + 1, 0)

    assert len({tuple(a_pass(seed, number)) for seed in range(3) for number in range(3)}) == 9


def test_the_sample_order_is_the_same_in_every_version() -> None:
    """A change of the order would let nodes with different versions train on different samples."""
    order = SampleOrder(seed=1, length=10, global_batch=5, micro_batch=5)
    assert order.indices(1, 0) + order.indices(2, 0) == PINNED


@pytest.mark.parametrize(
    ("length", "global_batch", "micro_batch", "words"),
    [
        (0, 4, 2, "empty"),
        (9, 10, 4, "global_batch is 10 and micro_batch is 4"),
        (9, 0, 4, "at least 1"),
        (9, 4, 0, "at least 1"),
    ],
)
def test_invalid_batch_sizes_are_refused(length: int, global_batch: int, micro_batch: int, words: str) -> None:
    with pytest.raises(BadInputError, match=words):
        SampleOrder(seed=0, length=length, global_batch=global_batch, micro_batch=micro_batch)


def test_an_iterable_data_set_is_refused() -> None:
    class Stream(IterableDataset[int]):
        def __iter__(self):  # type: ignore[no-untyped-def]
            return iter(range(3))

    with pytest.raises(BadInputError, match="neither indices nor shards"):
        MicroBatchLoader(Stream(), device=CPU, seed=0, global_batch=2, micro_batch=1)


def test_loading_collates_samples_and_keeps_their_structure() -> None:
    dataset = TensorDataset(torch.arange(12.0), torch.arange(12))
    loader = MicroBatchLoader(dataset, device=CPU, seed=0, global_batch=6, micro_batch=3)
    values, labels = loader.load(1, 1)
    assert values.tolist() == labels.tolist() == loader.order.indices(1, 1)
    options = DataOptions(collate=lambda xs: {"x": (xs, "name")})
    nested = MicroBatchLoader(list(range(12)), device=CPU, seed=0, global_batch=6, micro_batch=3, options=options)
    assert nested.load(1, 1) == {"x": (nested.order.indices(1, 1), "name")}


@given(st.integers(), st.integers(1, 1000), st.integers(0, 1000))
def test_a_repeated_micro_batch_draws_the_same_random_numbers(seed: int, step: int, micro_batch: int) -> None:
    def draw() -> tuple[float, ...]:
        seed_micro_batch(seed, step, micro_batch)
        return (float(torch.rand(())), random.random(), float(np.random.rand()))

    first = draw()
    assert draw() == first
    torch.rand(3)
    np.random.rand(4)
    assert draw() == first


@given(st.integers(), st.integers(1, 1000), st.integers(0, 1000))
def test_seeding_a_micro_batch_equals_torch_manual_seed(seed: int, step: int, micro_batch: int) -> None:
    torch.manual_seed(derive_seed(seed, step, micro_batch))
    expected = torch.rand(3)
    seed_micro_batch(seed, step, micro_batch)
    assert torch.equal(torch.rand(3), expected)


def test_random_samples_do_not_depend_on_when_they_are_fetched() -> None:
    class Noisy:
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> torch.Tensor:
            return index + torch.rand(3) + random.random() + float(np.random.rand())

    loader = MicroBatchLoader(Noisy(), device=CPU, seed=3, global_batch=4, micro_batch=2)
    first = loader.load(2, 1)
    after = torch.rand(3)
    loader.load(1, 0)
    assert torch.equal(loader.load(2, 1), first)
    seed_micro_batch(3, 2, 1)
    assert not torch.equal(torch.rand(3), after)  # This uses another random stream.


def test_seeds_are_distinct_for_each_step_and_micro_batch() -> None:
    seeds = {derive_seed(seed, step, part) for seed in range(5) for step in range(1, 20) for part in range(10)}
    assert len(seeds) == 5 * 19 * 10


def test_a_step_with_too_many_micro_batches_is_refused() -> None:
    assert SampleOrder(seed=0, length=4, global_batch=1 << 20, micro_batch=1).micro_batches == 1 << 20
    with pytest.raises(BadInputError, match="a step may have up to 1048576 micro-batches"):
        SampleOrder(seed=0, length=4, global_batch=(1 << 20) + 1, micro_batch=1)
