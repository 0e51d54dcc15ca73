"""Tests that every micro-batch belongs to exactly one rank, whichever gradients the ranks hold."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.coordination.generations.assignment import (
    divide_by_speed,
    keep_summed,
    round_robin,
    share_of,
    slowest_time,
)
from holdfast.protocol.plan import GenerationPlan, Member


@given(micro_batches=st.integers(0, 40), world=st.integers(1, 20))
def test_round_robin_assigns_each_micro_batch_once_and_evenly(micro_batches: int, world: int) -> None:
    shares = [round_robin(micro_batches, world, rank) for rank in range(world)]
    assert sorted(m for share in shares for m in share) == list(range(micro_batches))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@given(data=st.data(), micro_batches=st.integers(1, 20), world=st.integers(1, 8))
def test_held_gradients_are_kept_and_no_micro_batch_is_assigned_twice(
    data: st.DataObject, micro_batches: int, world: int
) -> None:
    share = st.lists(st.integers(0, micro_batches - 1), unique=True, max_size=micro_batches)
    summed = data.draw(st.lists(share, min_size=world, max_size=world))
    shares = keep_summed(micro_batches, summed)
    assert len(shares) == world
    assert sorted(m for share in shares for m in share) == list(range(micro_batches))
    taken: set[int] = set()
    for mine, given_ in zip(summed, shares, strict=True):
        if not taken & set(mine):
            # A gradient is one sum, so it is either kept completely or dropped.
            assert set(mine) <= set(given_)
            taken |= set(mine)


def test_remaining_micro_batches_are_assigned_to_the_ranks_with_the_fewest() -> None:
    assert keep_summed(6, [(0, 3, 1), (), (2,)]) == ((0, 1, 3), (4,), (2, 5)) or keep_summed(
        6, [(0, 3, 1), (), (2,)]
    ) == (
        (0, 1, 3),
        (4, 5),
        (2,),
    )


def plan_of(world: int, counts: tuple[int, ...] = ()) -> GenerationPlan:
    members = tuple(Member(worker=f"n{rank}/0/a", host="h", state_port=1) for rank in range(world))
    return GenerationPlan(term=1, generation=1, members=members, counts=counts)


@given(counts=st.lists(st.integers(0, 9), min_size=1, max_size=9).filter(sum))
def test_each_micro_batch_belongs_to_one_rank_for_any_counts(counts: list[int]) -> None:
    plan = plan_of(len(counts), tuple(counts))
    shares = [share_of(plan, sum(counts), rank) for rank in range(len(counts))]
    assert sorted(m for share in shares for m in share) == list(range(sum(counts)))
    assert [len(share) for share in shares] == counts


@given(micro_batches=st.integers(1, 40), world=st.integers(1, 20))
def test_even_counts_are_assigned_round_robin(micro_batches: int, world: int) -> None:
    usual = tuple(round_robin(micro_batches, world, rank) for rank in range(world))
    for plan in (plan_of(world), plan_of(world, tuple(map(len, usual)))):
        assert tuple(share_of(plan, micro_batches, rank) for rank in range(world)) == usual


@given(
    factors=st.lists(st.sampled_from([1.0, 1.1, 1.3, 1.5, 2.0, 3.7, 20.0]), min_size=1, max_size=4),
    micro_batches=st.integers(1, 12),
)
@settings(deadline=None)
def test_division_by_speed_minimizes_the_time_of_the_slowest_rank(factors: list[float], micro_batches: int) -> None:
    world = len(factors)
    counts = divide_by_speed(micro_batches, factors)
    usual = slowest_time(micro_batches, factors)
    if micro_batches <= world:
        assert counts == ()
        return
    cuts = itertools.combinations(range(1, micro_batches), world - 1)
    parts = (tuple(b - a for a, b in itertools.pairwise((0, *cut, micro_batches))) for cut in cuts)
    best = min(slowest_time(micro_batches, factors, each) for each in parts)
    if not counts:
        assert best == pytest.approx(usual)
        return
    assert sum(counts) == micro_batches
    assert min(counts) >= 1
    assert slowest_time(micro_batches, factors, counts) == pytest.approx(best)
    assert best < usual


@given(data=st.data(), counts=st.lists(st.integers(1, 4), min_size=1, max_size=6))
def test_reassignment_after_a_failure_follows_the_planned_counts(data: st.DataObject, counts: list[int]) -> None:
    micro_batches = sum(counts)
    usual = [share_of(plan_of(len(counts), tuple(counts)), micro_batches, rank) for rank in range(len(counts))]
    summed = [share[: data.draw(st.integers(0, len(share)))] for share in usual]
    assert list(keep_summed(micro_batches, summed, usual, (), counts)) == usual
    assert [len(share) for share in keep_summed(micro_batches, summed, (), (), counts)] == counts
