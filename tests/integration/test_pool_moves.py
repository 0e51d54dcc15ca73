"""Moves of nodes of a pool's job, with real processes: no other node leaves, and roles change once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from job_cases import TINY

from tests.harness.local_pool import LocalPool

FOREVER = ("--steps", "1000000", "--step-seconds", "0.1")
SLOW_TO_MOVE = ("--stragglers", "move", "--emulate-compute", "0.1/micro-batch", "--allow-faults")


@pytest.fixture
def pool(start_pool: Callable[..., LocalPool]) -> LocalPool:
    return start_pool(3, "--reserve", "1")


def test_a_move_exchanges_two_roles_and_no_other_node_leaves(pool: LocalPool) -> None:
    pool.submit("one", "2:2", TINY, *FOREVER, options=SLOW_TO_MOVE)
    pool.wait(pool.has("one", 2), "two nodes")
    pool.wait(lambda: list(pool.journals.glob("one.*")) and pool.events_of("one", "standby_ready"), "a warm standby")
    mine, (standby,) = pool.job("one")["nodes"][0], pool.job("one")["standbys"]
    other = pool.job("one")["nodes"][1]

    assert f"{standby} has taken {mine}'s place" in pool.call("move", mine, "-j", "one")
    _wait_for_roles(pool, trains={other, standby}, waits=mine, changes=2)

    pool.call("inject", "slow", standby, "--times", "3", "-j", "one")
    pool.wait(lambda: len(pool.events_of("one", "node_moved")) == 2, "the move of the slow node")
    _wait_for_roles(pool, trains={other, mine}, waits=standby, changes=4)

    pool.goes_on("one")
    assert len(pool.events("role_changed")) == 4
    assert not pool.events("node_released")
    assert {event["reason"] for event in pool.events_of("one", "node_left")} == {"moved"}
    pool.check_journal_of("one")
    pool.check_owners()
    pool.end()


def _wait_for_roles(pool: LocalPool, trains: set[str], waits: str, changes: int) -> None:
    """Wait until the pool knows these roles, after this number of role changes."""
    pool.wait(lambda: len(pool.events("role_changed")) >= changes, "the new roles in the pool")
    assert set(pool.job("one")["nodes"]) == trains
    assert pool.job("one")["standbys"] == [waits]
    assert {event["by"] for event in pool.events("role_changed")} == {"job"}
