"""Draining nodes of a pool and scaling its jobs, with real processes."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from job_cases import TINY

from tests.harness.local_pool import LocalPool

FOREVER = ("--steps", "1000000", "--step-seconds", "0.2")


@pytest.fixture
def pool(start_pool: Callable[..., LocalPool]) -> LocalPool:
    return start_pool(3)


@pytest.mark.soak
def test_a_pool_drains_nodes_and_scales_and_compacts_a_job(pool: LocalPool) -> None:
    pool.submit("one", "2:2", TINY, *FOREVER)
    pool.wait(pool.has("one", 2), "two nodes")
    pool.goes_on("one")
    drained = pool.job("one")["nodes"][0]
    assert f"{drained} is drained" in pool.call("drain", drained)
    assert drained not in pool.job("one")["nodes"]
    assert len(pool.job("one")["nodes"]) == 2, "no other node joined before the drained node left"
    nodes = {node["node"]: node for node in json.loads(pool.call("nodes", "--json"))["nodes"]}
    assert (nodes[drained]["job"], nodes[drained]["drained"]) == ("", True)
    assert f"{drained}" in pool.call("nodes")
    assert not [event for event in pool.events_of("one", "recovered") if event["action"] == "replace"]
    assert not pool.events_of("one", "failure_detected"), "the drain was reported as a failure"

    assert "one may have 3 nodes" in pool.call("scale", "-j", "one", "3")
    assert "its share is 2 now" in pool.call("scale", "-j", "one", "+1"), "the share must stay 2 without a third node"
    assert f"{drained} may be given" in pool.call("undrain", drained)
    pool.wait(pool.has("one", 3), "a third node")
    assert "needs 2 nodes" in pool.call("scale", "-j", "one", "1", code=4)
    pool.call("scale", "-j", "one", "2")
    pool.wait(pool.has("one", 2), "two nodes again")
    assert "there is no node 'nowhere'" in pool.call("drain", "nowhere", code=3)
    pool.goes_on("one")
    _check_that_it_moves_together(pool)
    pool.check_journal_of("one")
    pool.check_owners()
    pool.end()


def _check_that_it_moves_together(pool: LocalPool) -> None:
    """Check that a job on two racks moves to two nodes of one rack when nodes are free there."""
    here = set(pool.job("one")["nodes"])
    assert "no job is worth moving" in pool.call("move", "--compact")
    for name in ("a0", "a1"):
        pool.add_node(name, "--rack", "r1")
    pool.wait(lambda: len(pool.events("node_added")) == 5, "two more nodes")
    assert set(pool.job("one")["nodes"]) == here, "the job moved without a request"
    left = min(here)
    (foreseen,) = json.loads(pool.call("drain", left, "--dry-run", "--json"))["forecast"]
    assert (foreseen["job"], foreseen["waits"]) == ("one", False)
    assert foreseen["to"] not in {"", *here}
    assert "one: 2 -> 1 racks" in pool.call("move", "--compact", "--dry-run")
    assert set(pool.job("one")["nodes"]) == here
    output = pool.call("move", "--compact")
    assert "one: 2 -> 1 racks" in output
    assert "2 moves, one after another" in output
    assert set(pool.job("one")["nodes"]) == {"a0", "a1"}
    worlds = [event["world_size"] for event in pool.events_of("one", "generation_started")]
    assert min(worlds[1:]) >= 2, "the job had fewer nodes than its share"
    assert not pool.events_of("one", "failure_detected")
    pool.goes_on("one")
