"""Unreachable workers are named, and reachable ones are not."""

from __future__ import annotations

import socket

from holdfast.protocol.names import node_of, worker_id
from holdfast.protocol.plan import GenerationPlan, Member
from holdfast.runtime.groups.unreachable_members import AT_ONCE, CONNECT_S, LONGEST_S, find_unreachable


def member(node: str, port: int) -> Member:
    return Member(worker=worker_id(node, 0, "a"), host="127.0.0.1", state_port=port)


def test_only_members_with_a_closed_port_are_reported() -> None:
    with socket.create_server(("127.0.0.1", 0)) as open_, socket.create_server(("127.0.0.1", 0)) as closing:
        port, closed = open_.getsockname()[1], closing.getsockname()[1]
        closing.close()
        plan = GenerationPlan(term=1, generation=1, members=(member("a", port), member("b", port), member("c", closed)))
        assert find_unreachable(plan, "a/0/a") == ("c/0/a",)


def test_the_own_node_and_members_without_a_port_are_not_checked() -> None:
    plan = GenerationPlan(term=1, generation=1, members=(member("a", 1), member("b", 0)))
    assert find_unreachable(plan, "a/0/a", lambda host, port: False) == ()


def test_the_check_of_thousands_of_unreachable_members_ends_in_time() -> None:
    """One second each, 32 at a time, would take minutes, during which no other worker learns of the failure."""
    members = tuple(
        Member(worker=worker_id(f"n{node}", index, "a"), host="h", state_port=1)
        for node in range(1000)
        for index in range(8)
    )
    asked: list[float] = []

    def connects(host: str, port: int) -> bool:
        asked.append(1.0)
        return False

    named = find_unreachable(
        GenerationPlan(term=1, generation=1, members=members), "n10/0/a", connects, lambda: sum(asked) / AT_ONCE
    )
    assert len(named) <= (LONGEST_S + CONNECT_S) * AT_ONCE
    assert len({node_of(worker) for worker in named}) == len(named) > LONGEST_S * AT_ONCE / 2
    ranks = [int(node_of(worker)[1:]) for worker in named]
    assert ranks == sorted(ranks)
    assert ranks[0] == 11, "each worker must start with the ranks after its own"


def test_all_members_are_checked() -> None:
    plan = GenerationPlan(term=1, generation=1, members=tuple(member(f"n{index}", index) for index in range(1, 101)))
    named = find_unreachable(plan, "n1/0/a", lambda host, port: port % 2 == 0)
    assert named == tuple(f"n{index}/0/a" for index in range(3, 101, 2))
