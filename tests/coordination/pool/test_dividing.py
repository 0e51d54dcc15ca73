"""Tests of the division of nodes among jobs: properties of every policy, and of each one."""

from __future__ import annotations

import pytest
from bids import demands
from hypothesis import example, given
from hypothesis import strategies as st

from holdfast.coordination.pool.share.dividing import divide
from holdfast.coordination.pool.share.interface import POLICY_NAMES, Bid, Demand, Policy
from holdfast.coordination.pool.share.policies import POLICIES

policies = st.sampled_from(list(POLICIES.values()))


def running(name: str, has: int, least: int = 1, most: int = 16, **more: object) -> Bid:
    order = int(name[1:])
    return Bid(name=name, order=order, least=least, most=most, has=has, admitted=True, **more)  # pyright: ignore


def waiting(name: str, least: int = 1, most: int = 16, **more: object) -> Bid:
    return Bid(name=name, order=int(name[1:]), least=least, most=most, **more)  # pyright: ignore


def shares(policy: str, nodes: int, *jobs: Bid, kept_back: int = 0) -> list[int]:
    division = divide(POLICIES[policy], Demand(nodes=nodes, bids=jobs, kept_back=kept_back))
    return [division.nodes[job.name] for job in jobs]


# ---- all policies ----


def test_policy_names_match_the_policies() -> None:
    assert tuple(POLICIES) == POLICY_NAMES


@given(policies, demands())
def test_every_job_has_a_share_and_no_node_is_assigned_twice(policy: Policy, demand: Demand) -> None:
    division = divide(policy, demand)
    assert division.nodes.keys() == {bid.name for bid in demand.bids}
    assert min(division.nodes.values()) >= 0
    assert sum(division.nodes.values()) <= demand.nodes


@given(policies, demands())
def test_running_jobs_keep_their_minimum_nodes(policy: Policy, demand: Demand) -> None:
    """The exceptions are preemptible jobs, which then return all their nodes."""
    nodes = divide(policy, demand).nodes
    for bid in demand.bids:
        if bid.admitted and not bid.preemptible:
            assert nodes[bid.name] >= min(bid.has, bid.smallest)


@given(policies, demands())
def test_a_started_job_has_an_allowed_size(policy: Policy, demand: Demand) -> None:
    nodes = divide(policy, demand).nodes
    for bid in demand.bids:
        size = nodes[bid.name]
        if size and not (bid.admitted and size <= bid.smallest):
            assert bid.least <= size <= bid.most
            assert not bid.sizes or size in bid.sizes


@given(policies, demands())
def test_exactly_the_waiting_jobs_receive_a_reason(policy: Policy, demand: Demand) -> None:
    division = divide(policy, demand)
    idle = {bid.name for bid in demand.bids if not division.nodes[bid.name]}
    firm = {bid.name for bid in demand.bids if bid.admitted and not bid.preemptible}
    assert division.why.keys() == idle - firm
    assert all(division.why.values())


@given(policies, demands(), st.randoms())
def test_the_order_of_the_bids_does_not_matter(policy: Policy, demand: Demand, rng: object) -> None:
    mixed = list(demand.bids)
    rng.shuffle(mixed)  # pyright: ignore
    again = Demand(nodes=demand.nodes, bids=tuple(mixed), kept_back=demand.kept_back)
    assert divide(policy, again) == divide(policy, demand)


#: two jobs with the same gain from one more node, of which the second already runs
ALIKE = Demand(nodes=3, bids=(waiting("j1", most=2, weight=0.5), running("j2", 0, most=2, weight=0.5)))


@example(POLICIES["waf"], ALIKE)
@given(policies, demands())
def test_an_executed_plan_is_stable(policy: Policy, demand: Demand) -> None:
    """The result of a plan does not lead to another plan, so no node moves back and forth."""
    division = divide(policy, demand)
    first = division.nodes
    if sum(first.values()) > demand.nodes - demand.kept_back:
        return
    done = [
        Bid(
            name=bid.name,
            order=bid.order,
            least=bid.least,
            most=bid.most,
            sizes=bid.sizes,
            weight=bid.weight,
            priority=bid.priority,
            has=first[bid.name],
            admitted=first[bid.name] > 0 or (bid.admitted and not bid.preemptible),
            preemptible=bid.preemptible,
            may_wait=bid.may_wait,
            standbys=bid.standbys,
            waiting=division.standbys.get(bid.name, 0),
        )
        for bid in demand.bids
    ]
    again = Demand(nodes=demand.nodes, bids=tuple(done), kept_back=demand.kept_back)
    assert divide(policy, again).nodes == first
    assert divide(policy, again).standbys == division.standbys


@given(policies, demands(preemptible=False))
def test_jobs_start_in_the_order_of_the_queue(policy: Policy, demand: Demand) -> None:
    """Without time limits, no job starts before an earlier queued job of the same priority."""
    nodes = divide(policy, demand).nodes
    queue = policy.order([bid for bid in demand.bids if not bid.admitted])
    begun = [nodes[bid.name] > 0 for bid in queue]
    assert begun == sorted(begun, reverse=True)


@given(policies, demands())
def test_only_preemptible_jobs_use_the_reserve(policy: Policy, demand: Demand) -> None:
    nodes = divide(policy, demand).nodes
    firm = [bid for bid in demand.bids if not bid.preemptible]
    owed = sum(min(bid.has, bid.smallest) for bid in firm)
    assert sum(nodes[bid.name] for bid in firm) <= max(demand.nodes - demand.kept_back, owed)


# ---- each policy ----


def test_the_equal_policy_divides_nodes_evenly() -> None:
    assert shares("equal", 9, running("j1", 7), waiting("j2"), waiting("j3")) == [3, 3, 3]


def test_the_equal_policy_gives_extra_nodes_to_the_jobs_that_have_them() -> None:
    assert shares("equal", 8, running("j1", 2), running("j2", 3), running("j3", 3)) == [2, 3, 3]
    assert shares("equal", 8, running("j1", 3), running("j2", 3), running("j3", 2)) == [3, 3, 2]


def test_the_weighted_policy_divides_nodes_in_proportion_to_weights() -> None:
    assert shares("weighted", 12, waiting("j1", weight=2.0), waiting("j2", weight=1.0), waiting("j3")) == [6, 3, 3]


def test_a_small_weight_does_not_starve_a_job() -> None:
    jobs = (waiting("j1", weight=1000.0), waiting("j2", least=2, weight=0.001))
    assert shares("weighted", 10, *jobs) == [8, 2]


def test_the_highest_priority_gets_its_maximum_and_others_their_minimum() -> None:
    jobs = (running("j1", 6, most=8), waiting("j2", least=2, most=5, priority=1), waiting("j3", priority=-1))
    assert shares("priority", 9, *jobs) == [3, 5, 1]


def test_a_sized_job_gets_its_full_size_or_waits() -> None:
    jobs = (running("j1", 4, most=4), waiting("j2", most=5), waiting("j3", most=3))
    division = divide(POLICIES["sized"], Demand(nodes=8, bids=jobs))
    assert division.nodes == {"j1": 4, "j2": 0, "j3": 0}
    assert division.why["j2"] == "it needs 5 nodes, and 4 can be given"
    assert division.why["j3"] == "j2 is before it: it has no time_limit"


def test_a_sized_job_that_lost_a_node_takes_none_from_others() -> None:
    assert shares("sized", 7, running("j1", 3, most=4), running("j2", 4, most=4)) == [3, 4]
    assert shares("sized", 8, running("j1", 3, most=4), running("j2", 4, most=4)) == [4, 4]


def test_jobs_with_discrete_sizes_get_only_those_sizes() -> None:
    jobs = (waiting("j1", most=8, sizes=(2, 4, 8)), waiting("j2", most=8, sizes=(2, 4, 8)))
    assert shares("equal", 7, *jobs) == [4, 2]


def test_running_jobs_are_restored_to_their_minimum_before_new_jobs_start() -> None:
    assert shares("equal", 5, running("j1", 2, least=4), waiting("j2", least=1)) == [4, 1]
    assert shares("equal", 4, running("j1", 2, least=4), waiting("j2", least=1)) == [4, 0]


def test_jobs_above_their_minimum_give_nodes_to_jobs_below() -> None:
    assert shares("equal", 6, running("j1", 1, least=3), running("j2", 5, least=2)) == [3, 3]


def test_preemptible_jobs_run_on_the_reserve_and_are_preempted() -> None:
    loose = running("j1", 4, least=2, preemptible=True)
    assert shares("equal", 8, loose, waiting("j2", most=6), kept_back=2) == [2, 6]
    assert shares("equal", 8, loose, waiting("j2", most=7), kept_back=1) == [0, 7]


def test_running_preemptible_jobs_continue_before_queued_ones_start() -> None:
    young = running("j2", 2, least=2, preemptible=True)
    assert shares("equal", 3, waiting("j1", least=2, preemptible=True), young) == [0, 3]


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_policy_is_known_by_its_name(policy: str) -> None:
    assert POLICIES[policy].name == policy
