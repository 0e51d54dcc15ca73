"""Who cannot be reached is named; who can is not."""

from __future__ import annotations

import socket

from holdfast.protocol.names import worker_id
from holdfast.protocol.plan import GenerationPlan, Member
from holdfast.runtime.groups.reach import unreachable


def member(node: str, port: int) -> Member:
    return Member(worker=worker_id(node, 0, "a"), host="127.0.0.1", state_port=port)


def test_a_closed_port_is_named_and_an_open_one_is_not() -> None:
    with socket.create_server(("127.0.0.1", 0)) as open_, socket.create_server(("127.0.0.1", 0)) as closing:
        port, closed = open_.getsockname()[1], closing.getsockname()[1]
        closing.close()
        plan = GenerationPlan(term=1, generation=1, members=(member("a", port), member("b", port), member("c", closed)))
        assert unreachable(plan, "a/0/a") == ("c/0/a",)


def test_nobody_asks_its_own_node_or_a_member_without_a_port() -> None:
    plan = GenerationPlan(term=1, generation=1, members=(member("a", 1), member("b", 0)))
    assert unreachable(plan, "a/0/a", lambda host, port: False) == ()


def test_all_are_asked() -> None:
    plan = GenerationPlan(term=1, generation=1, members=tuple(member(f"n{index}", index) for index in range(1, 101)))
    named = unreachable(plan, "n1/0/a", lambda host, port: port % 2 == 0)
    assert named == tuple(f"n{index}/0/a" for index in range(3, 101, 2))
