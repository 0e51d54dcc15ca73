"""Tests of a pool that divides its nodes by the throughput of its jobs."""

from __future__ import annotations

from itertools import pairwise

import pytest
from msgspec.structs import replace
from played_pool import PlayedPool

from holdfast.coordination.pool.inputs import NextPlansSolved, UpdateJob
from holdfast.coordination.pool.plans.paces import merge_pace
from holdfast.coordination.pool.plans.remeasuring import RETRY_S
from holdfast.protocol.pool import events as ev
from holdfast.protocol.pool.sharing import JobPace


def pace(*step_s: float, flop: float = 1e12) -> JobPace:
    """Return the measured pace of a job with 1.. nodes; 0 means not measured."""
    known = {nodes: seconds for nodes, seconds in enumerate(step_s, 1) if seconds}
    return JobPace(step_s=known, micro_batches=8, samples=8, workers=1, flop_per_sample=flop)


#: eight rounds, then four, two and one: the speed grows with the nodes
GROWS = pace(8.0, 4.0, 3.0, 2.0, 2.0, 2.0, 2.0, 1.0)
#: a second node hardly increases the speed
DOES_NOT = pace(8.0, 7.5, 7.4, 7.3, 7.3, 7.3, 7.3, 7.2)


def two_jobs(nodes: int = 6) -> PlayedPool:
    pool = PlayedPool(nodes, policy="waf")
    pool.submit("one")
    pool.submit("two")
    pool.stands("one")
    pool.stands("two")
    return pool


def settled(pool: PlayedPool) -> list[int]:
    """Make the jobs return and accept nodes as planned; return their numbers of nodes."""
    for _ in range(4):
        for job in ("one", "two"):
            pool.stands(job)
    return [len(pool.nodes_of(job)) for job in ("one", "two")]


def newest(pool: PlayedPool) -> ev.PlanDecided:
    return pool.of_kind(ev.PlanDecided)[-1]


def test_two_unmeasured_jobs_get_equal_shares() -> None:
    assert settled(two_jobs()) == [3, 3]


def test_a_job_with_more_measured_benefit_gets_more_nodes() -> None:
    pool = two_jobs()
    settled(pool)
    pool.stands("one", pace=DOES_NOT)
    pool.stands("two", pace=GROWS)
    assert settled(pool) == [2, 4], "five nodes need as many rounds as four"
    plan = newest(pool)
    assert plan.trigger == "a job's measurement"
    assert plan.before == {"one": 1, "two": 5}, "the first result arrived before the second"
    assert plan.gain is not None
    assert plan.cost is not None
    assert plan.gain > plan.cost > 0
    assert plan.next_best not in (None, plan.shares)
    assert plan.given_up is not None
    assert plan.given_up >= 0


def test_a_job_keeps_its_minimum_and_unused_weight_brings_no_node() -> None:
    pool = two_jobs(8)
    settled(pool)
    pool.stands("one", pace=GROWS)
    pool.stands("two", pace=GROWS)
    assert settled(pool) == [4, 4]
    pool.feed(UpdateJob("one", {"weight": 2.0, "min_nodes": 3}))
    assert settled(pool) == [4, 4], "a fifth node brings no gain"
    pool.feed(UpdateJob("one", {"min_nodes": 5}))
    assert settled(pool)[0] == 5
    assert newest(pool).trigger == "job one changed"


def test_a_similar_new_measurement_does_not_change_the_plan() -> None:
    pool = two_jobs()
    pool.stands("one", pace=GROWS)
    pool.stands("two", pace=GROWS)
    sizes, told = settled(pool), len(pool.of_kind(ev.PlanDecided))
    pool.stands("one", pace=pace(8.5, 4.2, 3.2, 2.1, 2.1, 2.1, 2.1, 1.1))
    assert settled(pool) == sizes
    assert len(pool.of_kind(ev.PlanDecided)) == told
    kept = pool.record.jobs["one"].pace
    assert kept is not None
    assert kept.step_s[1] == 8.5


def test_a_newly_known_flop_per_sample_changes_the_plan() -> None:
    pool = two_jobs()
    settled(pool)
    pool.stands("one", pace=GROWS)
    pool.stands("two", pace=replace(GROWS, flop_per_sample=0.0))
    assert settled(pool) == [4, 2]
    pool.stands("two", pace=replace(GROWS, flop_per_sample=1e15))
    assert settled(pool) == [2, 4], "each of its samples costs a thousand times the other's"
    assert newest(pool).trigger == "a job's measurement"


@pytest.mark.parametrize("spell", [1, 2, 3, 8])
def test_a_temporarily_slow_job_keeps_its_nodes(spell: int) -> None:
    pool = PlayedPool(4, policy="waf")
    pool.submit("one")
    known: dict[int, float] = {}

    def trains(times: float) -> None:
        nodes = len(pool.nodes_of("one"))
        known[nodes] = times * (8.0 / nodes + 0.1)
        pool.stands("one", pace=replace(GROWS, step_s=dict(known)))
        pool.stands("one")
        pool.tick(60.0)

    pool.stands("one")
    known.update({1: 8.1, 2: 4.1, 3: 2.77})  # it had fewer nodes before
    for slower in (1.0, *[4.0] * spell, 1.0, 1.0):
        trains(slower)
        assert len(pool.nodes_of("one")) == 4
    assert pool.record.jobs["one"].pace == replace(GROWS, step_s={1: 8.1, 2: 4.1, 3: 2.77, 4: 2.1})


@pytest.mark.parametrize("still", [False, True], ids=["it is as fast as it should be", "it is as slow"])
def test_a_slow_number_of_nodes_is_retried_at_increasing_intervals(*, still: bool) -> None:
    """After one of four machines was slow, the job once kept three nodes permanently, even after its recovery."""
    pool = PlayedPool(4, policy="waf")
    pool.submit("one")
    pool.stands("one")
    known = {1: 8.1, 2: 4.1, 3: 2.77}

    def trains(seconds: float) -> int:
        known[len(pool.nodes_of("one"))] = seconds
        pool.stands("one", pace=replace(GROWS, step_s=dict(known)))
        pool.stands("one")
        pool.tick(60.0)
        return len(pool.nodes_of("one"))

    assert trains(9.0) == 3
    tried: list[float] = []
    since = pool.now
    for _ in range(500):
        if trains((9.0 if still else 2.1) if len(pool.nodes_of("one")) == 4 else 2.77) == 4:
            tried.append(pool.now - since)
    if still:
        apart = [after - before for before, after in pairwise(tried) if after - before > 600.0]
        assert 1 <= len(apart) <= 3
        assert min(apart) > 1.9 * RETRY_S
        assert len(tried) < 20
    else:
        assert RETRY_S <= tried[0] <= RETRY_S + 300.0
        assert len(tried) > 400, "the job keeps its size"


def test_older_measurements_are_scaled_by_the_newest_slowdown() -> None:
    before = replace(GROWS, step_s={1: 8.0, 2: 4.0, 4: 2.0})
    said = replace(GROWS, step_s={2: 4.4, 4: 2.0})
    assert merge_pace(before, said, said) == before, "the message contains nothing new"
    now = replace(GROWS, step_s={2: 4.4, 4: 3.0, 5: 1.0})
    assert merge_pace(before, now, said).step_s == {1: 12.0, 2: 6.0, 4: 3.0, 5: 1.0}
    assert merge_pace(before, now, None).step_s == pytest.approx({1: 10.4, 2: 4.4, 4: 3.0, 5: 1.0})
    assert merge_pace(before, replace(GROWS, step_s={4: 1e300}), said).step_s[1] == 1e9
    other = replace(now, micro_batches=9)
    assert merge_pace(before, other, said) == merge_pace(None, other, None) == other


def test_measurements_survive_a_server_restart() -> None:
    pool = two_jobs()
    settled(pool)
    pool.stands("one", pace=DOES_NOT)
    pool.stands("two", pace=GROWS)
    sizes = settled(pool)
    nodes = sorted(pool.connections)
    pool.restart()
    for node in nodes:
        pool.come(node)
    pool.tick()
    assert settled(pool) == sizes


@pytest.mark.parametrize("foreseen", [True, False])
def test_the_plan_after_a_loss_is_looked_up_if_precomputed(foreseen: bool) -> None:
    pool = two_jobs()
    settled(pool)
    pool.stands("one", pace=GROWS)
    pool.stands("two", pace=GROWS)
    sizes = settled(pool)
    if foreseen:
        pool.foresee()
    lost = min(pool.nodes_of("one"))
    pool.go(lost)
    pool.stands("one", without={lost})
    plan = newest(pool)
    assert plan.trigger == "1 node lost"
    assert plan.source == ("table" if foreseen else "solved")
    assert sum(plan.shares.values()) <= 5
    assert sum(settled(pool)) == sum(plan.shares.values()) < sum(sizes)
    pool.come(lost, session="b")
    assert sum(settled(pool)) >= sum(plan.shares.values())


def test_looked_up_and_solved_plans_are_equal() -> None:
    looked_up, solved = two_jobs(), two_jobs()
    for pool in (looked_up, solved):
        settled(pool)
        pool.stands("one", pace=GROWS)
        pool.stands("two", pace=DOES_NOT)
        settled(pool)
    looked_up.foresee()
    for pool in (looked_up, solved):
        pool.go(min(pool.nodes_of("two")))
        pool.stands("two", without=set(pool.nodes_of("two")) - set(pool.connections))
    assert newest(looked_up).shares == newest(solved).shares
    assert (newest(looked_up).source, newest(solved).source) == ("table", "solved")


def test_outdated_and_incomplete_precomputed_plans_are_not_used() -> None:
    pool = two_jobs()
    settled(pool)
    early = pool.question
    assert early is not None
    pool.stands("one", pace=GROWS)
    settled(pool)
    assert pool.question is not None
    assert pool.question.number > early.number
    pool.feed(NextPlansSolved(early.number, early.solve()))
    pool.feed(NextPlansSolved(pool.question.number, ()))
    lost = min(pool.nodes_of("one"))
    pool.go(lost)
    pool.stands("one", without={lost})
    assert newest(pool).source == "solved"


@pytest.mark.parametrize("endangered", ["one", "two"])
def test_a_job_with_single_expert_copies_gets_more_nodes(endangered: str) -> None:
    """The speed is the same with four and two nodes as with two and four; on four, each expert has two copies."""
    pool = two_jobs()
    settled(pool)
    for job in ("one", "two"):
        pool.stands(job, pace=replace(GROWS, experts=8, slots=4) if job == endangered else GROWS)
    assert settled(pool) == ([4, 2] if endangered == "one" else [2, 4])


def test_plans_are_not_precomputed_again_because_time_passes() -> None:
    """Each question costs a process and seconds of CPU time."""
    pool = two_jobs()
    settled(pool)
    pool.foresee()
    asked = pool.question
    for _ in range(5):
        pool.tick(1.0)
        settled(pool)
    assert pool.question is asked


def test_precomputation_after_a_looked_up_plan_uses_the_newest_failure_rate() -> None:
    pool = two_jobs()
    settled(pool)
    pool.stands("one", pace=GROWS)
    pool.stands("two", pace=GROWS)
    settled(pool)
    pool.foresee()
    first = pool.question
    lost = min(pool.nodes_of("one"))
    pool.go(lost)
    pool.stands("one", without={lost})
    assert newest(pool).source == "table"
    assert first is not None
    assert pool.question is not None
    assert pool.question.demand.failure_rate > first.demand.failure_rate, "a node has failed since the first question"


def test_only_failures_are_counted_and_not_nodes_taken_by_the_pool() -> None:
    pool = two_jobs()
    settled(pool)
    pool.stands("one", pace=DOES_NOT)
    pool.stands("two", pace=GROWS)
    settled(pool)
    assert pool.record.failures == 0
    lost = min(pool.nodes_of("two"))
    pool.go(lost)
    pool.stands("two", without={lost})
    assert pool.record.failures == 1


@pytest.mark.parametrize(
    "said",
    [
        JobPace(step_s={2: 0.0}),
        JobPace(step_s={2: 1e-300, 3: 1e12}, micro_batches=1, samples=1, flop_per_sample=1e30),
        JobPace(step_s={2: 1.0}, micro_batches=10**40, samples=10**400, workers=10**40, flop_per_sample=1e30),
        JobPace(step_s={2: 1.0}, micro_batches=8, samples=8, workers=1, experts=10**40, slots=10**40),
    ],
)
def test_an_impossible_pace_does_not_break_the_pool(said: JobPace) -> None:
    pool = two_jobs()
    pool.stands("one", pace=said)
    pool.stands("two", pace=GROWS)
    pool.submit("three")
    assert sum(pool.of_kind(ev.PlanDecided)[-1].shares.values()) == 6
    pool.restart()


def test_a_job_gets_its_only_allowed_size_even_if_it_was_slower() -> None:
    pool = PlayedPool(4, policy="waf")
    pool.submit("one", 1, 2)
    pool.stands("one")
    pool.stands("one", pace=pace(2.0, 2.2))
    pool.feed(UpdateJob("one", {"max_nodes": 3}))
    assert pool.record.jobs["one"].share == 1
    pool.feed(UpdateJob("one", {"max_nodes": 3, "sizes": [3]}))
    assert pool.record.jobs["one"].share == 3
