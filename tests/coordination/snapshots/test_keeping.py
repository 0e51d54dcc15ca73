from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.coordination.snapshots.keeping import peers_of


@given(st.lists(st.sampled_from(["", "x", "y", "z"]), max_size=17), st.integers(1, 5))
def test_every_node_has_as_many_others_as_are_asked_for_or_all_there_are(racks: list[str], threshold: int) -> None:
    nodes = {f"n{place}": rack for place, rack in enumerate(racks)}
    for node, peers in peers_of(nodes, threshold).items():
        assert node not in peers
        assert len(set(peers)) == len(peers) == min(threshold, len(nodes)) - 1
    assert peers_of(nodes, threshold).keys() == nodes.keys()


def test_groups_keep_copies_within_themselves() -> None:
    peers = peers_of(dict.fromkeys("abcdef", ""), 2)
    assert {frozenset((node, *others)) for node, others in peers.items()} == {
        frozenset("ab"),
        frozenset("cd"),
        frozenset("ef"),
    }


def test_the_node_left_over_joins_the_last_group() -> None:
    peers = peers_of(dict.fromkeys("abcde", ""), 2)
    assert peers == {"a": ("b",), "b": ("a",), "c": ("d",), "d": ("e",), "e": ("c",)}


@pytest.mark.parametrize("racks", ["xxxyyy", "xyxyxy", "xxxxyz"])
def test_copies_lie_in_other_racks_as_far_as_there_are_any(racks: str) -> None:
    nodes = {f"n{place}": rack for place, rack in enumerate(racks)}
    apart = sum(nodes[node] != nodes[peer] for node, (peer,) in peers_of(nodes, 2).items())
    alone = max(0, 2 * max(racks.count(rack) for rack in racks) - len(racks))
    assert apart == len(racks) - alone
