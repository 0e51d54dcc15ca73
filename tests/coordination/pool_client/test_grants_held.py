"""Tests of a job's grants: a returned grant is never accepted again, for any order of messages."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from holdfast.coordination.grants import apply_shares, describe_state, find_overdue, give_back, mark_connected
from holdfast.protocol.pool.grants import Held
from holdfast.protocol.pool.sharing import JobShares

EMPTY = Held(submission=1)


def shares(
    version: int, leaving: tuple[int, ...] = (), *, term: int = 1, submission: int = 1, **grants: int
) -> JobShares:
    return JobShares(
        term=term, version=version, submission=submission, grants=grants, leaving=frozenset(leaving), wish="run"
    )


def test_received_grants_are_held_and_reported() -> None:
    held = apply_shares(EMPTY, shares(3, a=1, b=2), 10.0)
    assert describe_state(held).held == {1, 2}
    assert describe_state(held).heard == 3


def test_a_returned_grant_is_not_accepted_again() -> None:
    held = give_back(apply_shares(EMPTY, shares(3, a=1, b=2), 10.0), ["b"])
    assert held.numbers == {1}
    again = apply_shares(held, shares(4, a=1, b=2), 11.0)
    assert again.numbers == {1}, "the pool had not received the return yet"
    anew = apply_shares(again, shares(5, a=1, b=7), 12.0)
    assert anew.numbers == {1, 7}
    assert anew.returned == frozenset()


def test_an_outdated_message_of_the_pool_is_ignored() -> None:
    held = apply_shares(EMPTY, shares(5, a=1), 10.0)
    assert apply_shares(held, shares(4, b=2), 11.0) is held
    assert apply_shares(held, shares(9, term=0, b=2), 11.0) is held
    assert apply_shares(held, shares(9, submission=2, b=2), 11.0) is held


def test_a_grant_that_the_pool_no_longer_lists_is_dropped() -> None:
    assert apply_shares(apply_shares(EMPTY, shares(3, a=1, b=2), 10.0), shares(4, a=1), 11.0).numbers == {1}


def test_a_node_is_connected_only_by_its_held_grant() -> None:
    held = apply_shares(EMPTY, shares(3, a=4), 10.0)
    assert mark_connected(held, "a", 3) is None
    assert mark_connected(held, "b", 4) is None
    came = mark_connected(held, "a", 4)
    assert came is not None
    assert came.grants["a"].came
    assert mark_connected(came, "a", 4) is came


def test_overdue_nodes_have_not_connected_in_time() -> None:
    held = apply_shares(EMPTY, shares(3, a=1, b=2), 10.0)
    held = mark_connected(held, "a", 1) or held
    held = apply_shares(held, shares(4, a=1, b=2, c=3), 35.0)
    assert find_overdue(held, 41.0, join_s=30.0) == ["b"]


def test_recalled_nodes_are_listed() -> None:
    held = apply_shares(EMPTY, shares(3, (2,), a=1, b=2), 10.0)
    assert held.to_leave == ("b",)
    assert apply_shares(held, shares(4, a=1, b=2), 11.0).to_leave == ()


def test_held_grants_survive_encoding() -> None:
    held = give_back(apply_shares(EMPTY, shares(3, a=1, b=2), 10.0), ["b"])
    assert msgspec.json.decode(msgspec.json.encode(held), type=Held) == held


@given(
    st.lists(st.tuples(st.integers(0, 9), st.dictionaries(st.sampled_from("abc"), st.integers(1, 6))), max_size=12),
    st.lists(st.sampled_from("abc"), max_size=12),
)
def test_a_returned_grant_is_never_held_again_while_the_pool_lists_it(
    told: list[tuple[int, dict[str, int]]], backs: list[str]
) -> None:
    held, gone = EMPTY, frozenset[int]()
    for place, (version, grants) in enumerate(told):
        held = apply_shares(held, shares(version, **grants), float(place))
        gone &= set(grants.values()) if version == held.heard else gone
        assert not held.numbers & gone
        if place < len(backs):
            before = held.numbers
            held = give_back(held, [backs[place]])
            gone |= before - held.numbers
