"""A pool's reserve, with real processes: its nodes wait in jobs as warm standbys and replace lost nodes."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
from job_cases import TINY

from tests.harness.local_pool import LocalPool

FOREVER = ("--steps", "1000000", "--step-seconds", "0.2")


@pytest.fixture
def pool(start_pool: Callable[..., LocalPool]) -> LocalPool:
    return start_pool(4, "--reserve", "1")


def _worlds(pool: LocalPool) -> list[int]:
    """Return the sizes of the job's worlds so far."""
    if not list(pool.journals.glob("one.*.events.jsonl")):
        return []
    return [event["world_size"] for event in pool.events_of("one", "generation_started")]


@pytest.mark.soak
def test_a_node_of_the_reserve_waits_warm_and_replaces_a_lost_node(pool: LocalPool) -> None:
    pool.submit("one", "2:4", TINY, *FOREVER)
    pool.wait(pool.has("one", 3), "three nodes")
    pool.wait(lambda: _worlds(pool)[-1:] == [3], "a generation with all three nodes")
    pool.wait(lambda: pool.events_of("one", "standby_ready"), "a warm standby")
    (standby,) = pool.job("one")["standbys"]
    assert "1 standby" in pool.call("jobs")
    assert [event["standby"] for event in pool.events("node_granted")].count(True) == 1
    mine = pool.job("one")["nodes"][0]
    assert f"{standby} takes the place of {mine}" in pool.call("move", "-j", "one", mine, "--dry-run")
    assert f"{mine} (job one): {standby} joins first, which waits there as a standby" in pool.call(
        "drain", mine, "--dry-run"
    )

    def recovered() -> list[dict[str, Any]]:
        """Return the recoveries from losses, without those for joins."""
        return [event for event in pool.events_of("one", "recovered") if event["action"] != "grow"]

    def warm() -> bool:
        """Return whether a standby has become warm since its grant."""
        grants = {event["node"]: event["time"] for event in pool.events("node_granted")}
        ready = {event["node"]: event["time"] for event in pool.events_of("one", "standby_ready")}
        return any(ready.get(node, 0.0) > grants[node] for node in pool.job("one")["standbys"])

    lost = pool.job("one")["nodes"][0]
    os.kill(pool.pid_of(lost), signal.SIGKILL)
    pool.wait(lambda: len(recovered()) == 1, "a recovery")
    assert recovered()[0]["action"] == "replace"
    after = [event for event in pool.events_of("one", "generation_started") if event["reason"] == "replace"]
    assert after[0]["world_size"] == 3
    assert standby in after[0]["members"]
    pool.wait(
        lambda: [event for event in pool.events("role_changed") if event["node"] == standby],
        "the report of the new role",
    )
    changed = pool.events("role_changed")[0]
    assert (changed["node"], changed["standby"], changed["by"]) == (standby, False, "job")

    # The lost node returns, so three nodes train and one waits. On a busy machine another node may have been lost.
    pool.wait(lambda: pool.has("one", 3)() and warm(), "another warm standby")
    assert lost in {*pool.job("one")["nodes"], *pool.job("one")["standbys"]}
    (waits,) = pool.job("one")["standbys"]
    pool.submit("two", "1:1", TINY, *FOREVER)
    pool.wait(pool.has("two", 1), "a node from job one")
    pool.wait(pool.has("one", 2), "the remaining nodes")
    assert pool.job("one")["standbys"] == [waits], "the standby was moved"
    pool.goes_on("one", "two")
    pool.check_journal_of("one")
    pool.check_owners()
    pool.end()
