"""Tests of a node's fence: a grant starts once, and only after all processes of the previous one have ended."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from holdfast.coordination.pool.fence import Fence, FenceInstruction, ReapGrant, StartGrant
from holdfast.protocol.messages.pool import NodeGrant, NodeState


def grant(version: int, number: int, *, term: int = 1) -> NodeGrant:
    return NodeGrant(term=term, version=version, grant=number, job=f"job{number}" if number else "")


def started(instructions: list[FenceInstruction]) -> list[int]:
    return [one.grant for one in instructions if isinstance(one, StartGrant)]


def reaping(instructions: list[FenceInstruction]) -> list[int]:
    return [one.grant for one in instructions if isinstance(one, ReapGrant)]


def test_a_grant_starts_once() -> None:
    fence = Fence()
    assert started(fence.on_grant(grant(1, 4))) == [4]
    assert fence.on_grant(grant(2, 4)) == []
    assert fence.state == NodeState(runs=4)


def test_a_grant_starts_after_the_previous_one_is_reaped() -> None:
    fence = Fence()
    fence.on_grant(grant(1, 4))
    told = fence.on_grant(grant(2, 5))
    assert (reaping(told), started(told)) == ([4], [])
    assert fence.on_grant(grant(3, 6)) == [], "the previous grant is being reaped"
    assert started(fence.on_reaped(4)) == [6], "only the newest grant starts"
    assert fence.state == NodeState(runs=6, ended=4)


def test_a_node_without_a_job_reaps_its_grant() -> None:
    fence = Fence()
    fence.on_grant(grant(1, 4))
    assert reaping(fence.on_grant(grant(2, 0))) == [4]
    assert started(fence.on_reaped(4)) == []


def test_an_ended_grant_is_not_started_again() -> None:
    fence = Fence()
    fence.on_grant(grant(1, 4))
    assert started(fence.on_reaped(4)) == []
    assert fence.on_grant(grant(2, 4)) == []
    assert started(fence.on_grant(grant(3, 5))) == [5]


def test_messages_of_an_older_term_or_version_are_ignored() -> None:
    fence = Fence()
    fence.on_grant(grant(7, 5, term=2))
    assert fence.on_grant(grant(9, 6, term=1)) == []
    assert fence.on_grant(grant(6, 6, term=2)) == []


def test_reaping_another_grant_does_not_end_the_running_one() -> None:
    fence = Fence()
    fence.on_grant(grant(1, 4))
    assert fence.on_reaped(3) == []
    assert fence.running == 4


@given(st.lists(st.one_of(st.tuples(st.integers(0, 9), st.integers(0, 9)), st.integers(1, 9)), max_size=30))
def test_one_grant_runs_at_a_time_with_increasing_numbers(heard: list[tuple[int, int] | int]) -> None:
    fence, here, newest = Fence(), 0, 0
    for one in heard:
        out = fence.on_grant(grant(*one)) if isinstance(one, tuple) else fence.on_reaped(one)
        if isinstance(one, int) and one == here:
            here = 0
        for number in started(out):
            assert here == 0, f"{here} is still here"
            assert number > newest
            here = newest = number
        assert fence.running == here
