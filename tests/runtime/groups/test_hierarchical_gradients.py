"""Hierarchical gradients of every kind in uneven worlds, and again without a rank that died on the way."""

import threading
from collections.abc import Sequence
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_hierarchical import level_sums
from thread_world import run_threads
from torch import nn

from holdfast.planning.levels import FAN_OUT, FLAT_UP_TO
from holdfast.protocol.commit import Commit, have_same_lanes
from holdfast.runtime.groups.communicator import Communicator, HaltedError
from holdfast.runtime.reduction.reduction import GradientBuckets, reduce_gradients

SIZES = (0, 37, 1, 300, 5)
#: 9 to 20 ranks, in any order. Nodes have any number of ranks, nearly equal numbers, or numbers that differ by up to a
#: factor of two.
NODES = st.one_of(
    st.lists(st.integers(0, 6), min_size=9, max_size=20),
    st.tuples(st.integers(3, 6), st.integers(9, 20)).flatmap(
        lambda sizes: st.permutations([rank % sizes[0] for rank in range(sizes[1])])
    ),
    st.lists(st.integers(4, 7), min_size=3, max_size=3).flatmap(
        lambda sizes: st.permutations([node for node, size in enumerate(sizes) for _ in range(size)][:20])
    ),
).map(lambda draws: [f"n{draw}" for draw in draws])
DTYPES = st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16])
FAN_OUTS = st.sampled_from([2, 3, FAN_OUT])


def gradients_of(seed: int, rank: int, dtype: torch.dtype) -> list[torch.Tensor | None]:
    """Return a rank's gradients, some untouched; every fourth rank, with rounds of weight 0, has none.

    No rank touches the last parameter.
    """
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    made: list[torch.Tensor | None] = []
    for size in SIZES:
        gradient = torch.randn(size, generator=generator).to(dtype)
        touched = torch.rand(1, generator=generator).item() < 0.7 and (seed + rank) % 4 and len(made) < len(SIZES) - 1
        made.append(gradient if touched else None)
    return made


def buckets_with(gradients: Sequence[torch.Tensor | None], dtype: torch.dtype, bucket_bytes: int) -> GradientBuckets:
    parameters = [nn.Parameter(torch.zeros(size, dtype=dtype)) for size in SIZES]
    buckets = GradientBuckets(parameters, bucket_bytes=bucket_bytes)
    give(parameters, gradients)
    buckets.collect()
    return buckets


def give(parameters: Sequence[nn.Parameter], gradients: Sequence[torch.Tensor | None]) -> None:
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = None if gradient is None else gradient.clone()


def reduced_gradients(buckets: GradientBuckets) -> list[torch.Tensor | None]:
    """Return the reduced gradients in the order of SIZES."""
    buckets.use_reduced()
    found = {parameter.numel(): parameter.grad for parameter in buckets.parameters}
    return [found[size] for size in SIZES]


def expected_gradients(
    nodes: list[str], given_: list[list[torch.Tensor | None]], dtype: torch.dtype, fan_out: int
) -> list[torch.Tensor | None]:
    """Return the means in the order of the levels, rounded once; None for an untouched parameter."""
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    expected: list[torch.Tensor | None] = []
    for place, size in enumerate(SIZES):
        column = [gradients[place] for gradients in given_]
        shares = [torch.zeros(size, dtype=wide) if one is None else one.to(wide) for one in column]
        total = (level_sums(nodes, FLAT_UP_TO, fan_out, shares) * (1 / len(nodes))).to(dtype)
        expected.append(None if all(one is None for one in column) else total)
    return expected


def assert_same(found: list[torch.Tensor | None], expected: list[torch.Tensor | None]) -> None:
    for mine, other in zip(found, expected, strict=True):
        if mine is None or other is None:
            assert mine is other
        else:
            torch.testing.assert_close(mine, other, rtol=0, atol=0, equal_nan=True)


@settings(max_examples=9, deadline=None)
@given(NODES, st.integers(0, 99), DTYPES, st.sampled_from([64, 1 << 20]), FAN_OUTS, st.booleans())
def test_gradients_of_every_kind_are_reduced_in_uneven_worlds(
    nodes: list[str], seed: int, dtype: torch.dtype, bucket_bytes: int, fan_out: int, broken: bool
):
    given_ = [gradients_of(seed, rank, dtype) for rank in range(len(nodes))]
    touched = [(rank, one) for rank, gradients in enumerate(given_) for one in gradients if one is not None]
    bad = set()
    if broken:
        for rank, gradient in touched[:: max(1, len(touched) // 3)]:
            if gradient.numel():
                place = next(i for i, one in enumerate(given_[rank]) if one is gradient)
                gradient[(seed + rank) % gradient.numel()] = (torch.inf, -torch.inf, torch.nan)[rank % 3]
                bad.add((place, (seed + rank) % gradient.numel()))
    max_norm = 0.5 if seed % 2 else None

    def body(comm: Communicator) -> tuple[list[torch.Tensor | None], Commit]:
        buckets = buckets_with(given_[comm.rank], dtype, bucket_bytes)
        v = reduce_gradients([buckets], comm, 1 / len(nodes), max_norm)
        return reduced_gradients(buckets), v

    outcomes = run_threads(nodes, body, seed=seed, flat_up_to=FLAT_UP_TO, fan_out=fan_out)
    expected = expected_gradients(nodes, given_, dtype, fan_out)
    v = outcomes[0][1]
    assert v.nonfinite == len(bad)
    for found, other in outcomes:
        assert_same(found, outcomes[0][0])
        assert have_same_lanes(other, v)
    if max_norm is None:
        assert_same(outcomes[0][0], expected)
    elif not bad:
        factor = min(1.0, max_norm / (v.grad_square**0.5 + 1e-6))
        for mine, whole in zip(outcomes[0][0], expected, strict=True):
            assert (mine is None) == (whole is None)
            if mine is not None and whole is not None:
                torch.testing.assert_close(mine, whole * factor, rtol=2e-2, atol=1e-6)


class DiedError(Exception):
    pass


def dies_at(comm: Communicator, operation: int, died: threading.Event) -> None:
    """Make a rank die at its n-th operation, in any group, before it issues it."""
    left = [operation]

    def counting(start: Any) -> Any:
        def started(*arguments: Any) -> Any:
            if not left[0]:
                died.set()
                raise DiedError
            left[0] -= 1
            return start(*arguments)

        return started

    for group in comm.groups:
        group.start_all_to_all = counting(group.start_all_to_all)


@settings(max_examples=20, deadline=None)
@given(NODES, st.integers(0, 99), DTYPES, st.sampled_from([64, 1 << 20]), FAN_OUTS, st.integers(0, 12))
def test_survivors_of_a_failure_on_any_level_reduce_their_gradients_again(
    nodes: list[str], seed: int, dtype: torch.dtype, bucket_bytes: int, fan_out: int, operation: int
):
    given_ = [gradients_of(seed, rank, dtype) for rank in range(len(nodes))]
    buckets = [buckets_with(gradients, dtype, bucket_bytes) for gradients in given_]
    dying, died = seed % len(nodes), threading.Event()

    def first(comm: Communicator) -> bool:
        if comm.rank == dying:
            dies_at(comm, operation, died)
        try:
            reduce_gradients([buckets[comm.rank]], comm, 1 / len(nodes), 0.5)
        except (DiedError, HaltedError):
            return False
        return True

    halts, remains = dict.fromkeys(range(len(nodes)), died.is_set), list[torch.Tensor]()
    options = {"seed": seed, "flat_up_to": FLAT_UP_TO, "fan_out": fan_out, "remains": remains}
    passed = run_threads(nodes, first, **options, halts=halts)
    assert all(passed) or not passed[dying]
    survivors = [rank for rank in range(len(nodes)) if rank != dying]
    left = [nodes[rank] for rank in survivors]

    def again(comm: Communicator) -> list[torch.Tensor | None]:
        mine = buckets[survivors[comm.rank]]
        mine.hide_sums()
        mine.collect()
        reduce_gradients([mine], comm, 1 / len(left))
        return reduced_gradients(mine)

    outcomes = run_threads(left, again, **options)
    expected = expected_gradients(left, [given_[rank] for rank in survivors], dtype, fan_out)
    for found in outcomes:
        assert_same(found, expected)
