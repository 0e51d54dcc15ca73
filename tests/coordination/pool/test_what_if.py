"""Tests that a predicted plan equals the plan after the change, and that the question changes nothing."""

from __future__ import annotations

from typing import Any

import pytest
from played_pool import PlayedPool, a_job

from holdfast.coordination.pool.inputs import DrainNodes, SubmitJob
from holdfast.coordination.pool.share.policies import POLICIES
from holdfast.coordination.pool.what_if import AddJob, AddNodes, Change, LoseNode, WhatIf, compute_what_if
from holdfast.errors import BadInputError, UnreachableError
from holdfast.protocol.job_spec import OutputSpec, PaceSpec
from holdfast.protocol.pool.events import PlanDecided


def a_pool(policy: str) -> PlayedPool:
    pool = PlayedPool(6, policy=policy, expected=8)
    for name in ("one", "two"):
        pool.submit(name, 1, 3)
        pool.stands(name)
    pool.stands("one")
    return pool


def paced(step_s: tuple[float, ...]) -> dict[str, Any]:
    pace = PaceSpec(step_s=step_s, micro_batches=24, samples=24)
    return {"pace": pace, "output": OutputSpec(flop_per_sample=1e9)}


def newest(pool: PlayedPool) -> dict[str, int]:
    return pool.of_kind(PlanDecided)[-1].shares


def asked(pool: PlayedPool, change: Change) -> WhatIf:
    return compute_what_if(pool.config.policy, *pool.pool.preview_change(change))


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_what_if_plan_equals_the_later_plan_and_changes_nothing(policy: str) -> None:
    pool = a_pool(policy)
    stored, told = pool.stored, len(pool.events)
    lost = min(pool.nodes_of("one"))
    would_lose, would_add = asked(pool, LoseNode(lost)), asked(pool, AddNodes(2))
    would_begin = asked(pool, AddJob(a_job("three", 2, 2)))
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
    pool.feed(SubmitJob(a_job("three", 2, 2)))
    assert newest(pool) == would_begin.shares
    assert would_begin.shares["three"] or would_begin.waiting["three"]
    assert (would_begin.worth is None) == (policy != "waf")


@pytest.mark.parametrize("step_s", [(9.0, 9.0, 9.0), (1.0, 0.5, 0.34, 0.25)])
def test_a_what_if_plan_uses_the_specified_pace_of_a_new_job(step_s: tuple[float, ...]) -> None:
    def made() -> PlayedPool:
        pool = PlayedPool(6, policy="waf", expected=8)
        for name in ("one", "two"):
            pool.submit(name, 1, 8, **paced((1.0, 0.6, 0.4, 0.35)))
            pool.stands(name)
        pool.stands("one")
        return pool

    third = a_job("three", 1, 6, **paced(step_s))
    would, pool = asked(made(), AddJob(third)), made()
    pool.feed(SubmitJob(third))
    assert newest(pool) == would.shares
    assert would.worth is not None
    assert pool.of_kind(PlanDecided)[-1].gain == pytest.approx(would.worth.gain)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (AddNodes(8187), "8187 nodes cannot come: a pool has at most 8192, and this one has 6"),
        (LoseNode("n9"), "there is no node 'n9': the nodes are n1, n2"),
        (LoseNode("n6"), "node n6 is not there to be lost"),
        (AddNodes(0), "0 nodes cannot come"),
        (AddJob(a_job("one")), "a job of this name is admitted"),
        (AddJob(a_job("large", 9, 9)), "job large needs 9 nodes"),
        (AddJob(a_job("wrong", 3, 2)), "min_nodes is 3"),
    ],
)
def test_impossible_what_if_changes_are_refused(change: Change, said: str) -> None:
    pool = a_pool("waf")
    pool.feed(DrainNodes(("n6",)))
    with pytest.raises((BadInputError, UnreachableError), match=said):
        asked(pool, change)
