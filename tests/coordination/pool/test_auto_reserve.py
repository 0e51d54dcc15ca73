"""Tests of a reserve sized by the pool: against a simulation of its model, and in a simulated pool."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from played_pool import PlayedPool

from holdfast.coordination.pool.plans.reserving import (
    KNOWN_REPAIR_S,
    Divisions,
    StopTimes,
    compute_reserve_worth,
    estimate_stop_times,
    find_best_reserve,
    observed_repair_s,
)
from holdfast.coordination.pool.share.achieving import MAX_CHANGE_S
from holdfast.coordination.pool.share.interface import Bid
from holdfast.protocol.pool import events as ev
from holdfast.protocol.pool.sharing import JobCosts, JobPace

DAY = 86400.0


def bid(name: str, order: int, *, least: int, has: int, sizes: tuple[int, ...] = (), weight: float = 1.0) -> Bid:
    """Return a job with some nodes; its throughput grows with its nodes."""
    return Bid(
        name=name,
        order=order,
        least=least,
        most=64,
        sizes=sizes,
        weight=weight,
        has=has,
        had=has,
        admitted=True,
        achieves=tuple(float(nodes) for nodes in range(65)),
        in_flop=True,
        may_wait=True,
        change_s=1.0,
    )


def stops(replaced_s: float, hit_s: float, given_s: float) -> dict[str, StopTimes]:
    return dict.fromkeys("abcdefgh", StopTimes(replaced_s=replaced_s, hit_s=hit_s, given_s=given_s))


def test_no_node_is_reserved_if_jobs_recover_quickly_without_it() -> None:
    jobs = (bid("a", 1, least=1, has=4), bid("b", 2, least=1, has=4))
    found = find_best_reserve(jobs, 8, 4.18 / (1000 * DAY), 20 * 3600.0, stops(1.0, 1.0, 12.0))
    assert found.nodes == 0
    assert "each is worth more in a job" in found.why


def test_nodes_that_no_job_can_use_are_reserved() -> None:
    jobs = (bid("a", 1, least=4, has=4, sizes=(4,)), bid("b", 2, least=4, has=4, sizes=(4,)))
    found = find_best_reserve(jobs, 10, 4.18 / (1000 * DAY), 20 * 3600.0, stops(1.0, 60.0, 120.0))
    assert found.nodes == 2
    assert "more is achieved than with none" in found.why


def test_the_reserve_grows_with_failure_rate_and_downtime() -> None:
    jobs = tuple(bid(name, at, least=2, has=8) for at, name in enumerate("abcd", 1))

    def kept(rate: float, hit_s: float) -> int:
        return find_best_reserve(jobs, 32, rate, 3600.0, stops(1.0, hit_s, hit_s + 10.0)).nodes

    by_rate = [kept(often / 3600.0, 300.0) for often in (0.001, 0.02, 0.1, 0.4)]
    assert by_rate == sorted(by_rate)
    assert by_rate[0] == 0
    assert by_rate[-1] > 0
    by_stop = [kept(0.1 / 3600.0, hit_s) for hit_s in (1.0, 60.0, 600.0)]
    assert by_stop == sorted(by_stop)


def test_the_reserve_leaves_all_jobs_their_minimum_nodes() -> None:
    jobs = tuple(bid(name, at, least=4, has=4) for at, name in enumerate("abcd", 1))
    for nodes in range(16, 20):
        found = find_best_reserve(jobs, nodes, 1.0 / 3600.0, 600.0, stops(1.0, 600.0, 900.0))
        assert found.nodes <= nodes - 16


def test_extreme_failure_rates_give_a_valid_reserve() -> None:
    jobs = (bid("a", 1, least=1, has=4), bid("b", 2, least=1, has=4))
    for rate in (1e-30, 1e-3, 1.0, 1e6):
        for repair_s in (0.0, 1.0, 1e12):
            assert 0 <= find_best_reserve(jobs, 8, rate, repair_s, stops(1.0, 1.0, 12.0)).nodes <= 6


def test_the_reserve_stays_if_a_change_does_not_pay_for_its_moves() -> None:
    jobs = (bid("a", 1, least=4, has=4, sizes=(4,)), bid("b", 2, least=4, has=4, sizes=(4,)))
    asked = (jobs, 10, 4.18 / (1000 * DAY), 20 * 3600.0, stops(1.0, 60.0, 120.0))
    assert find_best_reserve(*asked, now=1).nodes == 2
    dear = tuple(replace(job, change_s=1e5) for job in jobs)
    assert find_best_reserve(dear, *asked[1:], now=1).nodes == 1


@pytest.mark.parametrize("reserve", [0, 1, 2])
def test_the_worth_of_a_reserve_equals_a_simulation_of_its_model(reserve: int) -> None:
    """Nodes fail and return; a failure stops the job that it hits for the given time."""
    nodes, rate, repair_s = 8, 1 / 3600.0, 900.0
    jobs = (bid("a", 1, least=2, has=4), bid("b", 2, least=2, has=4, weight=1.2))
    asked = stops(2.0, 40.0, 60.0)
    divisions = Divisions(jobs, nodes, 1e6)
    said = compute_reserve_worth(divisions, 2, rate, repair_s, asked)[reserve]
    found = simulated(divisions, reserve, rate, repair_s, asked, 60_000)
    assert said == pytest.approx(found, rel=0.02)


def simulated(
    divisions: Divisions, reserve: int, rate: float, repair_s: float, stops: dict[str, StopTimes], n: int
) -> float:
    """Return weighted FLOP/s over n failures; repairs take exponential times."""
    rng, now, done, lost = random.Random(7), 0.0, 0.0, 0.0
    back: list[float] = []
    for _ in range(n):
        gap = rng.expovariate(divisions.nodes * rate)
        at = now + gap
        while back and min(back) < at:
            until = min(back)
            done += (until - now) * divisions.waf(divisions.sizes(divisions.nodes - max(len(back), reserve))).sum()
            back.remove(until)
            now = until
        done += (at - now) * divisions.waf(divisions.sizes(divisions.nodes - max(len(back), reserve))).sum()
        now = at
        # As in the model, a training job is hit in proportion to its nodes, and a node in repair counts as one.
        sizes = divisions.sizes(divisions.nodes - reserve)
        hit = rng.random() * divisions.nodes
        waf = divisions.waf(sizes)
        order = sorted(range(len(sizes)), key=lambda j: -divisions.bids[j].weight * sizes[j])
        for job, size in enumerate(sizes):
            if 0 <= hit < size:
                ready, warm = len(back) < reserve, job in order[:reserve]
                known = stops[divisions.bids[job].name]
                lost += waf[job] * (known.replaced_s if ready and warm else known.hit_s)
            hit -= size
        back.append(now + rng.expovariate(1 / repair_s))
    return (done - lost) / now


def test_repair_time_is_the_mean_of_observations_and_a_prior() -> None:
    assert observed_repair_s(()) == KNOWN_REPAIR_S
    assert observed_repair_s((0.0, 0.0, 0.0)) == pytest.approx(KNOWN_REPAIR_S / 4)


def test_measured_failure_costs_replace_guesses() -> None:
    assert estimate_stop_times(JobCosts(), 2.0) == StopTimes(replaced_s=1.0, hit_s=1.0, given_s=13.0)
    assert estimate_stop_times(JobCosts(hit_s=5.0, replaced_s=0.5), 2.0) == StopTimes(
        replaced_s=0.5, hit_s=5.0, given_s=17.0
    )
    absurd = estimate_stop_times(JobCosts(hit_s=1e9, replaced_s=1e9), 2.0)
    assert (absurd.replaced_s, absurd.hit_s) == (MAX_CHANGE_S, MAX_CHANGE_S)


#: the pace of a job that is as fast with four nodes as with eight
FOUR = JobPace(step_s={1: 8.0, 2: 4.0, 4: 2.0, 8: 2.0}, micro_batches=4, samples=4, workers=1, flop_per_sample=1e12)


def report_states(pool: PlayedPool, *jobs: str) -> None:
    for _ in range(5):
        for job in jobs:
            pool.stands(job)


def kept_back(pool: PlayedPool) -> list[int]:
    return [event.reserve for event in pool.of_kind(ev.PlanDecided)]


def played(nodes: int = 6) -> PlayedPool:
    pool = PlayedPool(nodes, policy="waf", auto_reserve=True)
    pool.submit("one", 4, most=4)
    report_states(pool, "one")
    return pool


def test_a_pool_reserves_nodes_its_job_cannot_use_and_reports_why() -> None:
    pool = played()
    assert pool.pool.state.reserve > 0
    assert len(pool.nodes_of("one")) == 4
    assert len(pool.standbys_of("one")) == 1
    plan = pool.of_kind(ev.PlanDecided)[-1]
    assert plan.reserve == pool.pool.state.reserve
    assert "kept back, since a node fails once in" in plan.reserve_why
    assert pool.record.reserve == plan.reserve


def test_a_reserve_is_given_to_a_new_job() -> None:
    pool = played()
    pool.submit("two", 2, most=2)
    report_states(pool, "one", "two")
    assert pool.pool.state.reserve == 0
    assert len(pool.nodes_of("two")) == 2
    assert kept_back(pool)[-1] == 0


def test_another_server_keeps_the_reserve() -> None:
    pool = played()
    before = pool.pool.state.reserve
    pool.restart()
    assert pool.pool.state.reserve == before


def test_repair_times_of_failed_nodes_are_recorded() -> None:
    pool = played()
    lost = min(pool.nodes_of("one"))
    pool.go(lost)
    pool.stands("one", without={lost})
    pool.lives(30)
    pool.come(lost, session="b")
    assert [round(seconds) for seconds in pool.record.repairs] == [30]
    drained = min(pool.nodes_of("one"))
    pool.go(drained)
    pool.come(drained)
    assert len(pool.record.repairs) == 1, "the node was only disconnected"


def test_a_reserve_is_found_for_a_large_pool() -> None:
    jobs = tuple(bid(f"j{at}", at, least=2, has=32) for at in range(1, 33))
    known = {job.name: StopTimes(replaced_s=1.0, hit_s=30.0, given_s=60.0) for job in jobs}
    found = find_best_reserve(jobs, 1024, 4.18 / (1000 * DAY), 20 * 3600.0, known)
    assert 0 <= found.nodes <= 64
    assert np.isfinite(found.gains)
