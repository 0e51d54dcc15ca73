"""Levels: every member's share reaches all members, in small groups on few levels that all members agree on."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.planning.levels import FAN_OUT, FLAT_UP_TO, Levels, compute_levels


def everybodys(nodes: list[str], flat_up_to: int = 1, fan_out: int = 3) -> list[Levels]:
    return [compute_levels(nodes, member, flat_up_to=flat_up_to, fan_out=fan_out) for member in range(len(nodes))]


def after_each_level(levels: list[Levels]) -> list[list[set[int]]]:
    """Return, for each level, the set of shares that each member has. Only owners go on."""
    known = [{member} for member in range(len(levels))]
    history: list[list[set[int]]] = []
    for number, owners in enumerate(levels[0].owners):
        reached = list(known)
        for member, mine in enumerate(levels):
            if number < len(mine.groups) and mine.groups[number].index(member) < owners:
                reached[member] = set().union(*(known[other] for other in mine.groups[number]))
        known = reached
        history.append(known)
    return history


def owns_to_the_end(levels: Levels, member: int) -> bool:
    return all(group.index(member) < owners for group, owners in zip(levels.groups, levels.owners, strict=False))


NODES = st.lists(st.integers(1, 6), min_size=1, max_size=30).flatmap(
    lambda sizes: st.permutations([f"n{node}" for node, size in enumerate(sizes) for _ in range(size)])
)


@settings(max_examples=30, deadline=None)
@given(NODES, st.integers(1, 20), st.integers(2, 6))
def test_the_highest_owners_have_every_share_exactly_once(nodes: list[str], flat_up_to: int, fan_out: int):
    levels = everybodys(nodes, flat_up_to, fan_out)
    assert len({mine.owners for mine in levels}) == 1
    for number in range(len(levels[0].owners)):
        # All members of a group see the same group, and no member is in two groups of a level.
        groups = {mine.groups[number] for mine in levels if number < len(mine.groups)}
        here = [member for group in groups for member in group]
        assert len(set(here)) == len(here)
        assert all(levels[member].groups[number] == group for group in groups for member in group)
    history = after_each_level(levels)
    owners = [member for member, mine in enumerate(levels) if owns_to_the_end(mine, member)]
    assert len(owners) == math.prod(levels[0].owners)
    for member in owners:
        assert history[-1][member] == set(range(len(nodes)))
    for known in history[:-1]:
        assert all(len(share) < len(nodes) for share in known)


@settings(max_examples=30, deadline=None)
@given(NODES, st.integers(2, 6))
def test_groups_are_small_and_levels_few(nodes: list[str], fan_out: int):
    levels = everybodys(nodes, 1, fan_out)
    most = max(nodes.count(node) for node in nodes)
    assert len(levels[0].owners) <= 1 + math.ceil(math.log(len(nodes), fan_out) + 1e-9) + 1
    for mine in levels:
        assert all(len(group) <= max(fan_out + 1, most) for group in mine.groups)


@settings(max_examples=30, deadline=None)
@given(NODES, st.integers(2, 6))
def test_each_member_receives_less_than_twice_the_part_that_it_owns(nodes: list[str], fan_out: int):
    for mine in everybodys(nodes, 1, fan_out):
        for group, owners in zip(mine.groups, mine.owners, strict=False):
            assert len(group) < 2 * owners + (owners == 1)


def test_the_first_level_is_within_nodes_and_the_next_between_equal_parts():
    nodes = ["a"] * 3 + ["b"] * 3
    assert everybodys(nodes)[4] == Levels(owners=(3, 2), groups=((3, 4, 5), (1, 4)))
    # If one node has one more worker, that worker owns nothing.
    assert everybodys(["a", "a", "b", "b", "b"])[4] == Levels(owners=(2, 2), groups=((2, 3, 4),))


def test_nodes_of_too_different_sizes_are_ignored():
    assert everybodys(["a", "b", "b", "b"], fan_out=2)[3] == Levels(owners=(2, 2), groups=((2, 3), (1, 3)))


def test_a_prime_number_of_nodes_only_makes_some_groups_larger():
    levels = compute_levels([str(node) for node in range(1021)], 0)
    assert levels.owners == (7, 8, 8, 2)
    assert [len(group) for group in levels.groups] == [8, 8, 8, 2]


def test_a_world_of_thousands_needs_few_connections():
    nodes = [str(node) for node in range(1024) for _ in range(8)]
    levels = compute_levels(nodes, 4711)
    assert levels.owners == (8, 8, 8, 8, 2)
    assert sum(len(group) - 1 for group in levels.groups) == 29


@pytest.mark.parametrize("ranks", [1, FLAT_UP_TO])
def test_small_worlds_are_flat(ranks: int):
    flat = Levels(owners=(ranks,), groups=(tuple(range(ranks)),))
    assert compute_levels(["a"] * ranks, 0) == flat
    assert compute_levels([str(node) for node in range(ranks)], 0) == flat


def test_a_few_nodes_with_one_worker_each_are_flat():
    assert compute_levels([str(node) for node in range(FAN_OUT)], 3).owners == (FAN_OUT,)


@pytest.mark.parametrize(("member", "fan_out"), [(2, 3), (-1, 3), (0, 1)])
def test_invalid_members_and_fan_outs_are_refused(member: int, fan_out: int):
    with pytest.raises(ValueError, match="give a member below"):
        compute_levels(["a", "b"], member, fan_out=fan_out)
