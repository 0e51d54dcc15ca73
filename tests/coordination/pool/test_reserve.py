"""Tests of the reserve: the jobs with standbys, the use of standbys, and that no job waits for the pool."""

from __future__ import annotations

from bids import demands
from hypothesis import given
from hypothesis import strategies as st
from played_pool import PlayedPool

from holdfast.coordination.pool.share.dividing import divide
from holdfast.coordination.pool.share.interface import Bid, Demand
from holdfast.coordination.pool.share.policies import POLICIES
from holdfast.coordination.pool.share.standbys import assign_standbys
from holdfast.protocol.job_spec import RecoverySpec
from holdfast.protocol.pool import events as ev


def test_reserve_nodes_are_standbys_of_running_jobs() -> None:
    pool = PlayedPool(nodes=4, reserve=1)
    pool.submit("one")
    pool.stands("one")
    assert pool.nodes_of("one") == {"n1", "n2", "n3"}
    assert pool.standbys_of("one") == {"n4"}
    assert pool.node_told[pool.connections["n4"]].standby
    told = pool.job_told["one"]
    assert told.standbys == {told.grants["n4"]}
    assert [event.node for event in pool.of_kind(ev.NodeGranted) if event.standby] == ["n4"]


def test_a_promoted_standby_is_followed_by_another_once_a_node_is_free() -> None:
    pool = PlayedPool(nodes=4, reserve=1)
    pool.submit("one")
    pool.stands("one")
    pool.go("n1")
    pool.stands("one", without={"n1"}, taken={"n4"})
    assert pool.nodes_of("one") == {"n2", "n3", "n4"}
    assert pool.standbys_of("one") == set()
    assert [(event.node, event.standby, event.by) for event in pool.of_kind(ev.RoleChanged)] == [("n4", False, "job")]
    assert pool.of_kind(ev.JobResized) == [], "the job has as many nodes as before"
    pool.come("n1", session="b")
    assert pool.standbys_of("one") == {"n1"}


def test_a_cold_standby_joins_its_job_after_the_loss_of_a_node() -> None:
    pool = PlayedPool(nodes=4, reserve=1)
    pool.submit("one")
    pool.stands("one")
    heard = pool.job_told["one"].version
    pool.go("n1")
    pool.stands("one", without={"n1"})
    assert pool.nodes_of("one") == {"n2", "n3", "n4"}
    assert [(event.node, event.by) for event in pool.of_kind(ev.RoleChanged)] == [("n4", "pool")]
    assert pool.job_told["one"].version > heard
    assert pool.job_told["one"].standbys == frozenset()


def test_an_outdated_job_state_does_not_undo_the_join_of_a_standby() -> None:
    pool = PlayedPool(nodes=4, reserve=1)
    pool.submit("one")
    pool.stands("one")
    before = pool.job_told["one"]
    pool.go("n1")
    pool.stands("one", without={"n1"})
    after, pool.job_told["one"] = pool.job_told["one"], before
    pool.stands("one", without={"n1"})  # repeated with the old grants, so that it still waits
    assert pool.standbys_of("one") == set()
    pool.job_told["one"] = after
    pool.stands("one")
    assert pool.nodes_of("one") == {"n2", "n3", "n4"}


def test_a_job_without_a_standby_receives_one_of_another_job() -> None:
    pool = PlayedPool(nodes=5, reserve=1)
    pool.submit("one", least=2, most=2)
    pool.submit("two", least=2, most=2, weight=3.0)
    pool.stands("one")
    pool.stands("two")
    pool.stands("one")
    (standby,) = pool.standbys_of("two")  # its weight is greater
    lost, stays = sorted(pool.nodes_of("one"))
    pool.go(lost)
    pool.stands("one", without={lost})
    assert pool.leaving("two") == {standby}
    pool.stands("two")
    assert pool.nodes_of("one") == {stays, standby}
    assert not pool.record.grants[standby].standby
    assert len(pool.nodes_of("two")) == 2


def test_a_job_that_shrinks_keeps_its_standby_as_one() -> None:
    pool = PlayedPool(nodes=5, reserve=1)
    pool.submit("one")
    pool.stands("one")
    assert pool.standbys_of("one") == {"n5"}
    pool.submit("two", least=2)
    pool.stands("one")
    assert len(pool.nodes_of("one")) == len(pool.nodes_of("two")) == 2
    assert pool.standbys_of("one") == {"n5"}


def test_a_job_with_the_shrink_policy_has_no_standby() -> None:
    pool = PlayedPool(nodes=4, reserve=1)
    pool.submit("one", recovery=RecoverySpec(on_node_failure="shrink"))
    pool.stands("one")
    assert pool.nodes_of("one") == {"n1", "n2", "n3"}
    assert pool.standbys_of("one") == set()


def test_a_job_has_its_own_standbys_if_no_other_job_needs_the_nodes() -> None:
    pool = PlayedPool(nodes=5)
    pool.submit("one", most=2, recovery=RecoverySpec(standbys=2))
    pool.stands("one")
    assert len(pool.nodes_of("one")) == len(pool.standbys_of("one")) == 2
    pool.submit("two", least=2, most=2)
    assert len(pool.leaving("one")) == 1
    pool.stands("one")
    assert len(pool.nodes_of("two")) == 2
    assert len(pool.standbys_of("one")) == 1
    pool.submit("loose", preemptible=True)
    assert pool.state_of("loose") == "queued", "it receives only the nodes that all others leave over"


def test_preemptible_jobs_run_on_reserve_nodes_that_are_not_standbys() -> None:
    pool = PlayedPool(nodes=5, reserve=2)
    pool.submit("loose", preemptible=True)
    assert len(pool.nodes_of("loose")) == 5
    pool.submit("firm", least=2, most=2)
    for _ in range(3):
        pool.stands("loose")
        pool.stands("firm")
    assert len(pool.nodes_of("firm")) == 2
    assert len(pool.standbys_of("firm")) == 1
    assert len(pool.nodes_of("loose")) == 2


def test_a_move_in_a_job_changes_the_roles_recorded_by_the_pool() -> None:
    pool = PlayedPool(nodes=4, reserve=1)
    pool.submit("one")
    pool.stands("one")
    pool.stands("one", taken={"n4"}, waiting={"n2"})
    assert pool.nodes_of("one") == {"n1", "n3", "n4"}
    assert pool.standbys_of("one") == {"n2"}
    assert {(event.node, event.standby) for event in pool.of_kind(ev.RoleChanged)} == {("n4", False), ("n2", True)}


def test_a_restarted_server_knows_the_standbys() -> None:
    pool = PlayedPool(nodes=4, reserve=1)
    pool.submit("one")
    pool.stands("one")
    pool.restart()
    assert pool.standbys_of("one") == {"n4"}
    for node in ("n1", "n2", "n3", "n4"):
        pool.come(node)
    pool.stands("one")
    assert pool.standbys_of("one") == {"n4"}


@given(demands(), st.sampled_from(sorted(POLICIES)))
def test_standbys_are_usable_and_fit_the_number_of_nodes(demand: Demand, policy: str) -> None:
    division = divide(POLICIES[policy], demand)
    assert sum(division.nodes.values()) + sum(division.standbys.values()) <= demand.nodes
    assert sum(count > 0 for count in division.standbys.values()) >= min(
        demand.kept_back,
        sum(division.nodes[one.name] >= one.smallest for one in demand.bids if one.may_wait and not one.preemptible),
        demand.nodes - sum(division.nodes[one.name] for one in demand.bids if not one.preemptible),
    )
    for one in demand.bids:
        waits = division.standbys.get(one.name, 0)
        assert waits <= max(1, one.standbys)
        if waits:
            assert one.may_wait
            assert not one.preemptible
            assert division.nodes[one.name] >= one.smallest


def _running(name: str, order: int, weight: float = 1.0, waiting: int = 0) -> Bid:
    return Bid(
        name=name, order=order, least=1, most=9, weight=weight, waiting=waiting, may_wait=True, admitted=True, has=1
    )


@given(
    st.lists(st.tuples(st.sampled_from((0.5, 1.0, 2.0)), st.integers(1, 9)), min_size=1, max_size=6), st.integers(0, 6)
)
def test_the_jobs_with_most_to_lose_get_the_standbys(jobs: list[tuple[float, int]], reserve: int) -> None:
    bids = [_running(f"j{place}", place, weight) for place, (weight, _) in enumerate(jobs)]
    nodes = {one.name: size for one, (_, size) in zip(bids, jobs, strict=True)}
    given_to = assign_standbys(bids, nodes, reserve, reserve)
    losses = {one.name: one.weight * nodes[one.name] for one in bids}
    assert len(given_to) == min(reserve, len(bids))
    left_out = [losses[name] for name in losses if name not in given_to]
    assert all(losses[name] >= max(left_out, default=0) for name in given_to)


def test_a_standby_changes_its_job_only_if_another_would_lose_twice_as_much() -> None:
    one = _running("one", 1, waiting=1)
    two = _running("two", 2)
    assert assign_standbys([one, two], {"one": 3, "two": 6}, 1, 1) == {"one": 1}
    assert assign_standbys([one, two], {"one": 3, "two": 7}, 1, 1) == {"two": 1}
