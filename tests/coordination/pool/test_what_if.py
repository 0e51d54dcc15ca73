"""The plan that would follow a change is the one that follows it; and asking changes nothing."""

from __future__ import annotations

import pytest
from played_pool import PlayedPool, a_job

from holdfast.coordination.pool.inputs import DrainNodes, Submit
from holdfast.coordination.pool.plans.what_if import Add, Change, HandIn, Lose, WhatIf, what_if
from holdfast.coordination.pool.share.policies import POLICIES
from holdfast.errors import BadInputError, UnreachableError
from holdfast.protocol.pool.events import PlanDecided


def a_pool(policy: str) -> PlayedPool:
    pool = PlayedPool(6, policy=policy, expected=8)
    for name in ("one", "two"):
        pool.submit(name, 1, 3)
        pool.stands(name)
    pool.stands("one")
    return pool


def newest(pool: PlayedPool) -> dict[str, int]:
    return pool.of_kind(PlanDecided)[-1].shares


def asked(pool: PlayedPool, change: Change) -> WhatIf:
    return what_if(pool.config.policy, *pool.pool.changed(change))


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_what_would_follow_is_what_follows_and_asking_changes_nothing(policy: str) -> None:
    pool = a_pool(policy)
    stored, told = pool.stored, len(pool.events)
    lost = min(pool.nodes_of("one"))
    would_lose, would_add = asked(pool, Lose(lost)), asked(pool, Add(2))
    would_begin = asked(pool, HandIn(a_job("three", 2, 2)))
    assert (pool.stored, len(pool.events)) == (stored, told)
    assert (would_lose.nodes_now, would_lose.nodes, would_add.nodes) == (6, 5, 8)
    assert dict(would_lose.shares_now) == {"one": 3, "two": 3}
    pool.go(lost)
    pool.stands("one", without={lost})
    assert newest(pool) == would_lose.shares
    pool = a_pool(policy)
    pool.come("n7")
    pool.come("n8")
    assert newest(pool) == would_add.shares
    pool = a_pool(policy)
    pool.feed(Submit(a_job("three", 2, 2)))
    assert newest(pool) == would_begin.shares
    assert would_begin.shares["three"] or would_begin.waiting["three"]
    assert (would_begin.worth is None) == (policy != "waf")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (Add(8187), "8187 nodes cannot come: a pool has 8192 at the most, and this one 6"),
        (Lose("n9"), "there is no node 'n9': the nodes are n1, n2"),
        (Lose("n6"), "node n6 is not there to be lost"),
        (Add(0), "0 nodes cannot come"),
        (HandIn(a_job("one")), "a job of this name is admitted"),
        (HandIn(a_job("large", 9, 9)), "job large needs 9 nodes"),
        (HandIn(a_job("wrong", 3, 2)), "min_nodes is 3"),
    ],
)
def test_what_cannot_happen_is_refused(change: Change, said: str) -> None:
    pool = a_pool("waf")
    pool.feed(DrainNodes(("n6",)))
    with pytest.raises((BadInputError, UnreachableError), match=said):
        asked(pool, change)
