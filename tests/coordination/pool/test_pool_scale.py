"""Tests of the CPU cost of an arrival, a loss and idle time in a pool of 1,024 nodes and 32 jobs."""

from __future__ import annotations

import time

import pytest
from played_pool import PlayedPool, a_job

from holdfast.coordination.inputs import Tick
from holdfast.coordination.pool.inputs import NodeMessage, SubmitJob
from holdfast.coordination.pool.share.policies import POLICIES
from holdfast.protocol.messages.pool import NodeAlive

NODES, JOBS = 1024, 32


def _full(policy: str, nodes: int = NODES) -> PlayedPool:
    pool = PlayedPool(policy=policy, expected=nodes)
    for number in range(nodes):
        pool.come(f"n{number}", rack=f"r{number // 16}")
    for number in range(JOBS):
        pool.submit(f"j{number}", least=nodes // 128, most=31 if policy == "sized" else nodes)
        for before in range(number):
            pool.stands(f"j{before}")
    return pool


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.processor_time
def test_an_arrival_and_a_loss_are_decided_within_a_second(policy: str) -> None:
    # A policy that uses throughput solves again for each submitted job; test_foreseen_plans does that at full size.
    nodes = NODES // 4 if POLICIES[policy].uses_throughput else NODES
    pool = _full(policy, nodes)
    assert len(pool.record.grants) >= (nodes // JOBS - 1) * JOBS
    begun = time.process_time()
    pool.feed(SubmitJob(a_job("late", least=8, most=31)))
    arrival_s = time.process_time() - begun
    assert pool.state_of("late") == "admitted"
    lost = min(pool.nodes_of("j0"))
    begun = time.process_time()
    pool.stands("j0", without={lost})
    loss_s = time.process_time() - begun
    assert max(arrival_s, loss_s) <= 1.0


@pytest.mark.processor_time
def test_ten_idle_seconds_take_less_than_one_cpu_second() -> None:
    pool = _full("equal")
    told = len(pool.events)
    begun = time.process_time()
    for _ in range(10):
        for connection in pool.connections.values():
            assert pool.feed(NodeMessage(connection, NodeAlive())) == []
        for _ in range(10):
            assert pool.feed(Tick(), 0.1) == []
    assert time.process_time() - begun <= 1.0
    assert len(pool.events) == told
