"""Tests of state senders: several near ones for each of few receivers, one for each of many."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from holdfast.coordination.generations.planner import CROWD, select_senders
from holdfast.protocol.state import MAX_GIVERS

PLACES = {"a": ("r1", "z1"), "b": ("r2", "z1"), "c": ("r3", "z2"), "x": ("r2", "z1"), "y": ("r9", "z2")}


def place_of(worker: str) -> tuple[str, str]:
    return PLACES.get(worker, ("", ""))


def test_senders_in_the_same_rack_precede_those_in_the_same_zone() -> None:
    assert select_senders(["x"], ["c", "a", "b"], place_of) == {"x": ("b", "a", "c")}
    assert select_senders(["y"], ["a", "b", "c"], place_of)["y"][0] == "c"


def test_no_holder_sends_twice_while_others_are_unused() -> None:
    holders = [f"n{number}" for number in range(8)]
    found = select_senders(["x", "y"], holders, place_of)
    assert Counter(map(len, found.values())) == {4: 2}
    assert len({giver for givers in found.values() for giver in givers}) == 8


def test_one_holder_sends_to_all_and_many_receivers_are_spread_evenly() -> None:
    assert select_senders(["x", "y"], ["a"], place_of) == {"x": ("a",), "y": ("a",)}
    many, holders = [f"j{number}" for number in range(CROWD)], [f"n{number}" for number in range(64)]
    assert select_senders(many, holders, place_of) == {worker: (f"n{place}",) for place, worker in enumerate(many)}
    assert select_senders([], holders, place_of) == {}


@given(st.integers(1, 12), st.integers(1, 40))
def test_every_receiver_has_distinct_senders_and_holders_share_evenly(lack: int, have: int) -> None:
    receivers, holders = [f"j{number}" for number in range(lack)], [f"n{number}" for number in range(have)]
    found = select_senders(receivers, holders, place_of)
    assert found.keys() == set(receivers)
    used = Counter(giver for givers in found.values() for giver in givers)
    assert all(1 <= len(set(givers)) == len(givers) <= MAX_GIVERS for givers in found.values())
    assert used.keys() <= set(holders)
    assert max(used.values()) - min((used[holder] for holder in holders), default=0) <= 1
