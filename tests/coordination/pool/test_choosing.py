"""Tests of the nodes that a job receives and returns: few racks, few zones."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from holdfast.coordination.pool.node_selection.choosing import select_nodes, select_surplus
from holdfast.protocol.pool.record import PoolNode


def nodes(**racks: str) -> dict[str, PoolNode]:
    """Return nodes by name, each in its ZONE-RACK."""
    zones = {place: place.partition("-")[0] for place in racks.values()}
    return {name: PoolNode(name=name, session="a", zone=zones[place], rack=place) for name, place in racks.items()}


def test_the_smallest_sufficient_rack_is_chosen() -> None:
    there = nodes(a="z-1", b="z-1", c="z-1", d="z-2", e="z-2", f="z-3")
    assert select_nodes(there, [], there, 2) == ["d", "e"]
    assert select_nodes(there, [], there, 1) == ["f"]


def test_the_largest_rack_is_chosen_first_if_none_suffices() -> None:
    there = nodes(a="z-1", b="z-1", c="z-1", d="z-2", e="z-2", f="z-3")
    assert select_nodes(there, [], there, 4) == ["a", "b", "c", "f"]


def test_nodes_in_the_rack_or_zone_of_the_job_are_preferred() -> None:
    there = nodes(a="z-1", b="z-2", c="z-2", d="y-3", e="y-3")
    assert select_nodes(there, ["a"], ["b", "c", "d", "e"], 2) == ["b", "c"], "its own zone"
    assert select_nodes(there, ["b"], ["a", "c", "d", "e"], 1) == ["c"], "its own rack"


def test_nodes_in_one_sufficient_zone_are_preferred() -> None:
    there = nodes(a="y-1", b="y-2", c="z-3", d="z-4", e="z-5")
    assert select_nodes(there, [], there, 3) == ["c", "d", "e"]
    assert select_nodes(there, [], there, 2) == ["a", "b"]


def test_isolated_and_disconnected_nodes_are_returned_first() -> None:
    there = nodes(a="z-1", b="z-1", c="z-2", d="z-1")
    assert select_surplus(there, there, there, 1) == ["c"]
    assert select_surplus(there, there, {"a", "c", "d"}, 2) == ["b", "c"]


@given(st.lists(st.sampled_from(("y-1", "y-2", "z-3", "z-4")), max_size=12), st.integers(0, 14), st.integers(0, 3))
def test_the_requested_number_of_distinct_nodes_is_chosen(places: list[str], count: int, mine: int) -> None:
    there = nodes(**{f"n{number:02}": place for number, place in enumerate(places)})
    names = sorted(there)
    free = names[mine:]
    chosen = select_nodes(there, names[:mine], free, count)
    assert len(chosen) == len(set(chosen)) == min(count, len(free))
    assert set(chosen) <= set(free)
    assert len(set(select_surplus(there, names, names, count))) == min(count, len(names))
