"""Tests that failures measured by jobs and seen by the pool affect its plans and are sent to its jobs."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from played_pool import PlayedPool

from holdfast.coordination.pool.granting import GUESSED_CHANGE_S, RESTART_S, SAVED_S
from holdfast.coordination.pool.inputs import JobMessage
from holdfast.coordination.pool.plans.deciding import KNOWN_RATE
from holdfast.coordination.pool.share.achieving import MAX_CHANGE_S, guess_throughput
from holdfast.coordination.pool.share.interface import Bid
from holdfast.coordination.pool.what_if import LoseNode, compute_what_if
from holdfast.protocol.pool.events import PlanDecided
from holdfast.protocol.pool.sharing import JobCosts, JobState


def report_costs(pool: PlayedPool, job: str, costs: JobCosts, without: frozenset[str] = frozenset()) -> None:
    told = pool.job_told[job]
    held = frozenset(number for node, number in told.grants.items() if node not in without)
    pool.feed(
        JobMessage(
            job,
            JobState(submission=told.submission, heard=told.version, held=held, trains=held, move_s=2.0, costs=costs),
        )
    )


def bid_of(pool: PlayedPool, job: str) -> Bid:
    demand = pool.pool._allocator.build_demand()  # pyright: ignore[reportPrivateUsage]
    return next(bid for bid in demand.bids if bid.name == job)


def played() -> PlayedPool:
    pool = PlayedPool(4, policy="waf")
    pool.submit("one")
    pool.stands("one")
    return pool


@pytest.mark.parametrize("foreseen", [True, False])
def test_the_cost_of_a_loss_is_the_measured_downtime_of_the_job(foreseen: bool) -> None:
    pool = played()
    bid = bid_of(pool, "one")
    assert (bid.change_s, bid.hit_s) == (GUESSED_CHANGE_S, GUESSED_CHANGE_S)
    costs = JobCosts(hit_s=30.0)
    report_costs(pool, "one", costs)
    bid = bid_of(pool, "one")
    assert (bid.change_s, bid.hit_s) == (2.0, 30.0)
    lost = frozenset({min(pool.nodes_of("one"))})
    would = compute_what_if(pool.config.policy, *pool.pool.preview_change(LoseNode(min(lost))))
    if foreseen:
        pool.foresee()
    pool.go(min(lost))
    report_costs(pool, "one", costs, lost)
    plan = pool.of_kind(PlanDecided)[-1]
    assert plan.source == ("table" if foreseen else "solved")
    # The cost is the guessed throughput of four nodes for 30 s, not for the 2 s of a move.
    assert would.worth is not None
    assert plan.cost == pytest.approx(would.worth.cost)
    assert plan.cost == pytest.approx(30.0 * guess_throughput(1.0, 4)[4], rel=1e-6)


def test_absurd_reported_costs_do_not_block_changes() -> None:
    pool = played()
    told = pool.job_told["one"]
    held = frozenset(told.grants.values())
    absurd = JobCosts(hit_s=1e9, replaced_s=1e9, rolled_back_s=1e9)
    said = JobState(submission=1, heard=told.version, held=held, trains=held, move_s=1e9, costs=absurd)
    pool.feed(JobMessage("one", said))
    bid = bid_of(pool, "one")
    assert bid.change_s == bid.hit_s == MAX_CHANGE_S
    assert max(bid.lost_share) < 0.01
    pool.submit("two")
    pool.stands("one")
    assert len(pool.nodes_of("one")) == len(pool.nodes_of("two")) == 2


def test_measured_rollback_costs_and_save_intervals_replace_guesses() -> None:
    pool = played()

    def undone(costs: JobCosts) -> float:
        report_costs(pool, "one", costs)
        return bid_of(pool, "one").lost_share[1]

    guessed = undone(JobCosts())
    assert undone(JobCosts(saves_every_s=60.0)) == pytest.approx(
        guessed * (RESTART_S + 30.0) / (RESTART_S + SAVED_S / 2)
    )
    assert undone(JobCosts(rolled_back_s=33.0)) == pytest.approx(guessed * 33.0 / (RESTART_S + SAVED_S / 2))


def test_the_failure_rate_is_sent_again_only_if_it_changes_much() -> None:
    pool = played()
    first = pool.job_told["one"].failure_rate
    assert first == pytest.approx(KNOWN_RATE, rel=0.01)
    before = pool.job_told["one"]
    pool.lives(20)
    pool.stands("one")
    assert pool.job_told["one"] is before
    lost = min(pool.nodes_of("one"))
    pool.go(lost)
    pool.stands("one", without={lost})
    assert pool.job_told["one"].failure_rate > 1.25 * first


@pytest.mark.parametrize("policy", ["equal", "waf"])
def test_jobs_receive_the_failure_rate_under_any_policy_and_after_a_restart(policy: str) -> None:
    pool = PlayedPool(2, policy=policy)
    pool.submit("one")
    pool.stands("one")
    assert pool.job_told["one"].failure_rate > 0
    nodes = sorted(pool.connections)
    pool.job_told.clear()
    pool.restart()
    for node in nodes:
        pool.come(node)
    pool.tick()
    assert pool.job_told["one"].failure_rate > 0


def test_costs_of_an_ended_job_are_dropped() -> None:
    pool = played()
    report_costs(pool, "one", JobCosts(hit_s=3.0))
    assert pool.pool.state.costs["one"].hit_s == 3.0
    pool.stands("one", without=pool.nodes_of("one"), standing="finished")
    assert "one" not in pool.pool.state.costs
    assert replace(JobCosts(), hit_s=1.0) != JobCosts()
