"""Every micro-batch belongs to exactly one rank, whoever holds what."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from holdfast.coordination.generations.assignment import keep_summed, round_robin


@given(micro_batches=st.integers(0, 40), world=st.integers(1, 20))
def test_round_robin_gives_each_once_and_evenly(micro_batches: int, world: int) -> None:
    shares = [round_robin(micro_batches, world, rank) for rank in range(world)]
    assert sorted(m for share in shares for m in share) == list(range(micro_batches))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@given(data=st.data(), micro_batches=st.integers(1, 20), world=st.integers(1, 8))
def test_what_is_held_is_kept_and_nothing_is_doubled(data: st.DataObject, micro_batches: int, world: int) -> None:
    share = st.lists(st.integers(0, micro_batches - 1), unique=True, max_size=micro_batches)
    summed = data.draw(st.lists(share, min_size=world, max_size=world))
    shares = keep_summed(micro_batches, summed)
    assert len(shares) == world
    assert sorted(m for share in shares for m in share) == list(range(micro_batches))
    taken: set[int] = set()
    for mine, given_ in zip(summed, shares, strict=True):
        if not taken & set(mine):
            # (a gradient is one sum: it is kept as a whole or not at all)
            assert set(mine) <= set(given_)
            taken |= set(mine)


def test_the_rest_goes_to_whoever_has_least() -> None:
    assert keep_summed(6, [(0, 3, 1), (), (2,)]) == ((0, 1, 3), (4,), (2, 5)) or keep_summed(
        6, [(0, 3, 1), (), (2,)]
    ) == (
        (0, 1, 3),
        (4, 5),
        (2,),
    )
