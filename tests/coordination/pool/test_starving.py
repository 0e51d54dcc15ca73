"""Tests of a pool that may leave low-weight jobs without nodes: they are saved, wait and learn the reason."""

from __future__ import annotations

import dataclasses

import pytest
from bids import demands
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from played_pool import PlayedPool

from holdfast.coordination.pool.inputs import UpdateJob
from holdfast.coordination.pool.share.achieving import Waf
from holdfast.coordination.pool.share.dividing import divide
from holdfast.coordination.pool.share.interface import Bid, Demand
from holdfast.coordination.pool.share.starving import find_starved
from holdfast.protocol.pool import events as ev
from holdfast.protocol.pool.sharing import JobPace

#: the pace of a job with linear speedup
LINEAR = JobPace(
    step_s={nodes: 8.0 / nodes for nodes in range(1, 9)}, micro_batches=8, samples=8, workers=1, flop_per_sample=1e12
)


def played(*weights: float, nodes: int = 4, least: int = 1, saves: bool = True, starves: bool = True) -> PlayedPool:
    """Return a pool with jobs j1, j2, ... that scale alike and have reported their pace."""
    pool = PlayedPool(nodes, policy="waf", starves=starves)
    for number, weight in enumerate(weights, 1):
        pool.submit(f"j{number}", least, saves=saves, weight=weight)
        execute_orders(pool, number)
    for number in range(1, len(weights) + 1):
        if f"j{number}" in pool.job_told and pool.state_of(f"j{number}") == "admitted":
            pool.stands(f"j{number}", pace=LINEAR)
    execute_orders(pool, len(weights))
    pool.lives(61)
    return pool


def execute_orders(pool: PlayedPool, jobs: int = 2) -> None:
    """Make the jobs execute the pool's orders."""
    for _ in range(6):
        for number in range(1, jobs + 1):
            name = f"j{number}"
            state = pool.state_of(name)
            if state == "admitted":
                pool.stands(name)
            elif state == "suspending":
                pool.stands(name, without=set(pool.job_told[name].grants), standing="suspended")


def had(pool: PlayedPool, jobs: int = 2) -> list[int]:
    return [len(pool.nodes_of(f"j{number}")) for number in range(1, jobs + 1)]


def suspended(pool: PlayedPool) -> int:
    return len(pool.of_kind(ev.JobSuspended))


def user_state(pool: PlayedPool, name: str) -> tuple[str, str]:
    job = pool.record.jobs[name]
    return job.user_state, job.why


def test_a_starved_job_names_the_job_that_benefits_more() -> None:
    pool = played(1.0, 1.0)
    assert all(had(pool)), "two equal jobs both keep nodes"
    pool.feed(UpdateJob("j2", {"weight": 3.0}))
    assert pool.state_of("j1") == "suspending"
    execute_orders(pool)
    assert had(pool) == [0, 4]
    state, why = user_state(pool, "j1")
    assert state == "waiting"
    assert "worth more to j2 (1)" in why
    assert "times its weight would do" in why
    assert [event.preempted for event in pool.of_kind(ev.JobSuspended)] == [True]
    assert pool.of_kind(ev.PlanDecided)[-1].waiting == {"j1": why}


def test_a_starved_job_gets_nodes_at_the_reported_weight() -> None:
    pool = played(1.0, 1.0)
    pool.feed(UpdateJob("j2", {"weight": 3.0}))
    execute_orders(pool)
    times = float(user_state(pool, "j1")[1].split("; ")[1].split(" ")[0])
    pool.feed(UpdateJob("j1", {"weight": times * 0.9}))
    execute_orders(pool)
    assert had(pool)[0] == 0
    pool.feed(UpdateJob("j1", {"weight": times * 1.1}))
    execute_orders(pool)
    assert had(pool)[0] > 0


def test_a_starved_job_starts_again_after_the_other_ends() -> None:
    pool = played(1.0, 1.0)
    pool.feed(UpdateJob("j2", {"weight": 3.0}))
    execute_orders(pool)
    pool.stands("j2", without=set(pool.nodes_of("j2")), standing="finished")
    execute_orders(pool, 1)
    assert had(pool, 1) == [4]
    assert user_state(pool, "j1") == ("admitted", "")


def test_measurements_neither_starve_nor_start_a_job() -> None:
    pool = played(1.0, 1.0)
    pool.feed(UpdateJob("j2", {"weight": 3.0}))
    execute_orders(pool)
    before = suspended(pool)
    for factor in (2.0, 0.5, 5.0, 0.2, 2.0):
        slower = replace(LINEAR, step_s={nodes: seconds * factor for nodes, seconds in LINEAR.step_s.items()})
        pool.stands("j2", pace=slower)
        execute_orders(pool)
    assert suspended(pool) == before
    assert user_state(pool, "j1")[0] == "waiting"
    assert had(pool) == [0, 4]


def test_a_returning_node_does_not_starve_another_job() -> None:
    pool = played(1.0, 1.0)
    pool.feed(UpdateJob("j2", {"weight": 3.0}))
    execute_orders(pool)
    before = suspended(pool)
    for number in range(5):
        lost = min(pool.nodes_of("j2"))
        pool.go(lost)
        pool.stands("j2", without={lost})
        pool.come(lost, session=f"s{number}")
        execute_orders(pool)
    assert suspended(pool) == before
    assert had(pool) == [0, 4]


def test_a_job_without_checkpoints_keeps_its_minimum() -> None:
    pool = played(1.0, 1.0, saves=False)
    pool.feed(UpdateJob("j2", {"weight": 3.0}))
    execute_orders(pool)
    assert had(pool) == [1, 3]


def test_a_plan_names_jobs_it_would_starve_if_starving_is_disabled() -> None:
    pool = played(1.0, 1.0, starves=False)
    pool.feed(UpdateJob("j2", {"weight": 3.0}))
    execute_orders(pool)
    assert had(pool) == [1, 3]
    plan = pool.of_kind(ev.PlanDecided)[-1]
    assert list(plan.starved) == ["j1"]
    assert "worth more to j2 (1)" in plan.starved["j1"]


def test_a_new_job_starts_immediately_only_with_a_high_weight() -> None:
    pool = played(1.0)
    pool.submit("j2", 4, weight=5.0)
    execute_orders(pool)
    assert had(pool) == [0, 4]
    pool.stands("j2", pace=LINEAR)
    pool.lives(61)
    pool.submit("j3", 1, weight=0.1)
    execute_orders(pool, 3)
    assert had(pool, 3) == [0, 4, 0]
    assert user_state(pool, "j3")[0] == "queued"
    assert "worth more to j2" in user_state(pool, "j3")[1]


def test_a_recently_started_job_is_not_starved_for_a_minute() -> None:
    pool = PlayedPool(4, policy="waf", starves=True)
    for name, weight in (("j1", 1.0), ("j2", 5.0)):
        pool.submit(name, weight=weight)
        pool.stands(name)
        pool.stands(name, pace=LINEAR)
    execute_orders(pool)
    assert had(pool) == [1, 3]
    pool.lives(61)
    execute_orders(pool)
    assert had(pool) == [0, 4]


def test_a_restarted_server_keeps_a_starved_job_waiting() -> None:
    pool = played(1.0, 1.0)
    pool.feed(UpdateJob("j2", {"weight": 3.0}))
    execute_orders(pool)
    nodes = sorted(pool.connections)
    pool.restart()
    for node in nodes:
        pool.come(node)
    pool.tick()
    execute_orders(pool)
    assert user_state(pool, "j1")[0] == "waiting"
    assert had(pool) == [0, 4]


@given(demands(), st.booleans())
def test_divisions_with_starving_are_feasible_for_all_jobs(demand: Demand, calm: bool) -> None:
    demand = Demand(nodes=demand.nodes, bids=tuple(map(may, demand.bids)), kept_back=demand.kept_back, calm=calm)
    division = divide(Waf(starves=True), demand)
    assert sum(division.nodes.values()) + sum(division.standbys.values()) <= demand.nodes
    for bid in demand.bids:
        size = division.nodes[bid.name]
        if size and not bid.admitted:
            assert bid.smallest <= size <= bid.largest
        if not size and not bid.preemptible:
            assert division.why[bid.name]
        if not bid.preemptible and bid.admitted and (calm or not bid.may_starve):
            assert size >= min(bid.has, bid.smallest) or demand.nodes - demand.kept_back < _kept(demand)


def may(bid: Bid) -> Bid:
    return dataclasses.replace(bid, may_starve=bid.order % 2 == 0)


def _kept(demand: Demand) -> int:
    return sum(min(bid.has, bid.smallest) for bid in demand.bids if bid.admitted and not bid.preemptible)


@pytest.mark.parametrize("weight", [1.0, 2.5])
def test_the_predicted_starved_jobs_are_the_starved_jobs(weight: float) -> None:
    linear = tuple(float(nodes) for nodes in range(9))
    one = Bid(name="a", order=1, least=2, most=8, has=2, had=2, admitted=True, achieves=linear, in_flop=True)
    two = dataclasses.replace(one, name="b", order=2, weight=weight)
    bids = (one, two)
    found = divide(Waf(starves=True), Demand(nodes=4, bids=tuple(map(starvable, bids)), failure_rate=1e-6)).nodes
    assert {name for name, nodes in found.items() if not nodes} == set(find_starved(bids, 4, 1e-6))


def starvable(bid: Bid) -> Bid:
    return dataclasses.replace(bid, may_starve=True)
