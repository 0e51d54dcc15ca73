"""A launched job keeps its number of standbys: when one takes over a rank or dies, another is started."""

from __future__ import annotations

from holdfast.control.launch.standby_refill import StandbyRefill
from holdfast.errors import EXIT_BAD_INPUT, EXIT_DONE, EXIT_FAILED
from holdfast.protocol.events import JobFinished, NodesJoined, StandbyReady
from holdfast.protocol.plan import JoinedNode

KILLED = -9


def joined(*names: str) -> NodesJoined:
    nodes = tuple(JoinedNode(node=name, agent_pid=1, worker_pids=()) for name in names)
    return NodesJoined(time=0.0, job="j", term=1, generation=1, nodes=nodes)


def warm(name: str) -> StandbyReady:
    return StandbyReady(time=0.0, job="j", term=1, generation=1, node=name, roles=1, warm_s=0.5)


def with_standbys(*standbys: str) -> StandbyRefill:
    """Return the state with three training nodes and these standbys."""
    refilling = StandbyRefill(standbys, 3)
    refilling.on_event(joined("node-0", "node-1", "node-2"))
    for name in standbys:
        refilling.on_event(warm(name))
    assert refilling.count_missing(3 + len(standbys)) == 0
    return refilling


def test_where_one_has_taken_a_place_another_is_started_once() -> None:
    refilling = with_standbys("standby-0")
    refilling.on_agent_ended("node-1", KILLED)
    assert refilling.count_missing(3) == 0, "the standby still waits"
    refilling.on_event(joined("standby-0"))
    assert refilling.count_missing(3) == 1
    refilling.on_standby_started("standby-1")
    assert refilling.count_missing(4) == 0


def test_where_one_dies_another_is_started() -> None:
    refilling = with_standbys("standby-0", "standby-1")
    refilling.on_agent_ended("standby-1", KILLED)
    assert refilling.count_missing(4) == 1


def test_a_node_that_gives_its_place_away_and_waits_is_a_standby() -> None:
    refilling = with_standbys("standby-0")
    refilling.on_event(joined("standby-0"))
    assert refilling.count_missing(4) == 0, "node-1 runs and is about to wait"
    refilling.on_event(warm("node-1"))
    refilling.on_agent_ended("node-1", KILLED)
    assert refilling.count_missing(3) == 1


def test_one_that_leaves_as_it_was_asked_or_is_of_no_use_is_not_replaced() -> None:
    for code in (EXIT_DONE, EXIT_BAD_INPUT):
        refilling = with_standbys("standby-0")
        refilling.on_agent_ended("standby-0", code)
        assert refilling.count_missing(3) == 0
        assert not refilling.has_given_up


def test_none_is_started_for_ever() -> None:
    refilling = with_standbys("standby-0")
    started = 0
    refilling.on_agent_ended("standby-0", EXIT_FAILED)
    while refilling.count_missing(3):
        started += 1
        assert not refilling.has_given_up
        refilling.on_standby_started(f"standby-{started}")
        refilling.on_agent_ended(f"standby-{started}", EXIT_FAILED)
        assert started < 100
    assert started == 3
    assert refilling.has_given_up


def test_one_that_was_warm_leaves_as_many_tries_as_before() -> None:
    refilling = with_standbys("standby-0")
    for number in range(20):
        refilling.on_agent_ended(f"standby-{number}", KILLED)
        assert refilling.count_missing(3) == 1
        refilling.on_standby_started(f"standby-{number + 1}")
        refilling.on_event(warm(f"standby-{number + 1}"))


def test_none_is_started_for_a_job_that_is_over() -> None:
    refilling = with_standbys("standby-0")
    refilling.on_event(joined("standby-0"))
    end = JobFinished(time=0.0, job="j", term=1, generation=1, reason="completed", steps=3, samples=9, final_loss=None)
    refilling.on_event(end)
    assert refilling.count_missing(3) == 0


def test_a_job_without_standbys_starts_none() -> None:
    refilling = StandbyRefill((), 3)
    refilling.on_agent_ended("node-1", KILLED)
    assert refilling.count_missing(2) == 0
    assert not refilling.has_given_up
