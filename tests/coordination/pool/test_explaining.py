"""Tests of explanations for waiting jobs: each named change suffices, and no smaller one does."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from bids import demands
from hypothesis import given
from hypothesis import strategies as st

from holdfast.coordination.pool.share.dividing import divide
from holdfast.coordination.pool.share.explaining import find_remedies
from holdfast.coordination.pool.share.interface import Bid, Demand, Policy
from holdfast.coordination.pool.share.policies import POLICIES


def running(name: str, has: int, least: int, most: int = 8) -> Bid:
    return Bid(name=name, order=int(name[1:]), least=least, most=most, has=has, admitted=True)


def waiting(name: str, least: int, most: int = 8) -> Bid:
    return Bid(name=name, order=int(name[1:]), least=least, most=most)


def remedies(policy: str, nodes: int, *bids: Bid, of: str) -> list[str]:
    return find_remedies(POLICIES[policy], Demand(nodes=nodes, bids=bids), of)


def test_all_sufficient_changes_are_listed() -> None:
    jobs = (running("j1", 3, 3), running("j2", 3, 2), waiting("j3", 4))
    assert remedies("equal", 6, *jobs, of="j3") == ["3 more nodes", "if it asked for 1 node", "the end of j1"]


def test_a_job_behind_another_needs_nodes_for_both() -> None:
    jobs = (running("j1", 4, 4), waiting("j2", 3), waiting("j3", 1))
    assert remedies("equal", 4, *jobs, of="j3") == ["4 more nodes", "the end of j1"]


def test_a_sized_job_is_advised_to_request_fewer_nodes() -> None:
    jobs = (running("j1", 4, 1, most=4), waiting("j2", 1, most=4))
    assert remedies("sized", 7, *jobs, of="j2") == ["1 more node", "if it asked for 3 nodes", "the end of j1"]


def test_a_job_that_does_not_wait_has_no_advice() -> None:
    assert remedies("equal", 4, waiting("j1", 2), of="j1") == []
    assert remedies("equal", 4, waiting("j1", 2), of="j9") == []


@given(st.sampled_from(list(POLICIES.values())), demands())
def test_the_advised_number_of_extra_nodes_is_minimal(policy: Policy, demand: Demand) -> None:
    for name, size in divide(policy, demand).nodes.items():
        for words in find_remedies(policy, demand, name):
            assert size == 0
            if "more node" in words:
                more = int(words.split()[0])
                assert divide(policy, replace(demand, nodes=demand.nodes + more)).nodes[name]
                assert not divide(policy, replace(demand, nodes=demand.nodes + more - 1)).nodes[name]


@pytest.mark.processor_time
def test_advice_for_a_job_of_a_billion_nodes_is_fast() -> None:
    """A submitted job of this size must not make the pool's server count to a billion."""
    began = time.process_time()
    assert remedies("equal", 8, waiting("j1", 10**9, 10**9), of="j1") == ["if it asked for 8 nodes"]
    greedy = (waiting("j1", 1, 10**9), replace(waiting("j2", 9, 10**9), preemptible=True))
    assert remedies("equal", 8, *greedy, of="j2") == []
    assert time.process_time() - began < 5.0
