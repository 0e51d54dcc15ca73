"""Tests of drain forecasts: they change nothing, and the pool then acts as predicted."""

from __future__ import annotations

import pytest
from played_pool import PlayedPool

from holdfast.coordination.pool.foresight import forecast_drain
from holdfast.coordination.pool.inputs import DrainNodes, SuspendJob
from holdfast.errors import BadInputError, UnreachableError
from holdfast.protocol.messages.forecast import DrainForecast


def foreseen(pool: PlayedPool, *names: str) -> list[DrainForecast]:
    before, record = pool.stored, pool.pool.record
    found = forecast_drain(pool.pool.state, names)
    assert (pool.stored, pool.pool.record) == (before, record)
    assert pool.pool.state.flush() == []
    assert [one.node for one in found] == list(dict.fromkeys(names))
    return found


def test_a_free_node_is_forecast_to_replace_a_drained_one() -> None:
    pool = PlayedPool(nodes=3)
    pool.submit("one", least=2, most=2)
    pool.stands("one")
    mine = sorted(pool.nodes_of("one"))
    (free,) = {"n1", "n2", "n3"} - set(mine)
    (found, nobodys) = foreseen(pool, mine[0], free)
    assert (found.to, found.waits) == ("", True), "the free node is drained as well"
    assert nobodys == DrainForecast(node=free, why="no job has it, and none will get it")
    (found,) = foreseen(pool, mine[0])
    assert (found.job, found.to, found.waits, found.cost_s) == ("one", free, False, None)
    assert found.why.startswith(f"{free} joins first, which is free; then the job leaves {mine[0]}")
    pool.feed(DrainNodes((mine[0],)))
    pool.stands("one")
    assert pool.leaving("one") == {mine[0]}
    assert pool.nodes_of("one") == {mine[1], free}


def test_a_drain_is_forecast_to_shrink_a_job_down_to_its_minimum() -> None:
    pool = PlayedPool(nodes=2)
    pool.submit("one", least=1, most=2)
    pool.stands("one")
    (first,) = foreseen(pool, "n1")
    assert not first.waits
    assert "no other node is available: the job goes on with 1" in first.why
    pool.feed(DrainNodes(("n1",)))
    assert pool.leaving("one") == {"n1"}
    assert foreseen(pool, "n1")[0].why == "its job leaves it already"
    pool.stands("one")
    (second,) = foreseen(pool, "n2")
    assert second.waits
    assert "the job needs at least 1" in second.why
    pool.feed(DrainNodes(("n2",)))
    assert not pool.leaving("one")


def test_a_standby_is_forecast_to_replace_a_drained_node() -> None:
    pool = PlayedPool(nodes=3, reserve=1)
    pool.submit("one", least=2, most=2)
    pool.stands("one")
    (standby,) = pool.standbys_of("one")
    assert "costs no training" in foreseen(pool, standby)[0].why
    (mine, _) = sorted(pool.nodes_of("one"))
    (found,) = foreseen(pool, mine)
    assert (found.to, found.waits) == (standby, False)
    assert "which waits there as a standby" in found.why


def test_another_job_is_forecast_to_give_up_a_node() -> None:
    pool = PlayedPool(nodes=4)
    pool.submit("one", least=2, most=2)
    pool.submit("two", least=1, most=2)
    for job in ("one", "two"):
        pool.stands(job)
    mine = min(pool.nodes_of("one"))
    (found,) = foreseen(pool, mine)
    assert found.to in pool.nodes_of("two")
    assert "which job two gives up, which goes on with fewer" in found.why
    pool.feed(DrainNodes((mine,)))
    assert pool.leaving("two") == {found.to}


def test_invalid_forecasts_are_refused_and_leaving_nodes_are_named() -> None:
    pool = PlayedPool(nodes=1)
    with pytest.raises(BadInputError, match="no node is named"):
        forecast_drain(pool.pool.state, ())
    with pytest.raises(UnreachableError, match="there is no node 'n9'"):
        forecast_drain(pool.pool.state, ("n9",))
    pool.submit("one")
    pool.feed(SuspendJob("one"))
    assert foreseen(pool, "n1")[0].why == "its job leaves it already"
