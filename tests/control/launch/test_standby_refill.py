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


def test_a_standby_that_joins_the_job_is_replaced_once() -> None:
    refilling = with_standbys("standby-0")
    refilling.on_agent_ended("node-1", KILLED)
    assert refilling.count_missing(3) == 0, "the standby still waits"
    refilling.on_event(joined("standby-0"))
    assert refilling.count_missing(3) == 1
    refilling.on_standby_started("standby-1")
    assert refilling.count_missing(4) == 0


def test_a_killed_standby_is_replaced() -> None:
    refilling = with_standbys("standby-0", "standby-1")
    refilling.on_agent_ended("standby-1", KILLED)
    assert refilling.count_missing(4) == 1


def test_a_node_replaced_by_a_standby_becomes_a_standby_itself() -> None:
    refilling = with_standbys("standby-0")
    refilling.on_event(joined("standby-0"))
    assert refilling.count_missing(4) == 0, "node-1 runs and is about to wait"
    refilling.on_event(warm("node-1"))
    refilling.on_agent_ended("node-1", KILLED)
    assert refilling.count_missing(3) == 1


def test_a_standby_that_is_done_or_unusable_is_not_replaced() -> None:
    for code in (EXIT_DONE, EXIT_BAD_INPUT):
        refilling = with_standbys("standby-0")
        refilling.on_agent_ended("standby-0", code)
        assert refilling.count_missing(3) == 0
        assert not refilling.has_given_up


def test_repeatedly_failing_standbys_are_replaced_at_most_three_times() -> None:
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


def test_a_ready_standby_resets_the_number_of_attempts() -> None:
    refilling = with_standbys("standby-0")
    for number in range(20):
        refilling.on_agent_ended(f"standby-{number}", KILLED)
        assert refilling.count_missing(3) == 1
        refilling.on_standby_started(f"standby-{number + 1}")
        refilling.on_event(warm(f"standby-{number + 1}"))


def test_no_standby_is_started_after_the_end_of_the_job() -> None:
    refilling = with_standbys("standby-0")
    refilling.on_event(joined("standby-0"))
    end = JobFinished(time=0.0, job="j", term=1, generation=1, reason="completed", steps=3, samples=9, final_loss=None)
    refilling.on_event(end)
    assert refilling.count_missing(3) == 0


def test_a_job_without_standbys_starts_no_standby() -> None:
    refilling = StandbyRefill((), 3)
    refilling.on_agent_ended("node-1", KILLED)
    assert refilling.count_missing(2) == 0
    assert not refilling.has_given_up
