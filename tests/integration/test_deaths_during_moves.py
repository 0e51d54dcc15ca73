"""Nodes die while a standby replaces a node with experts: nothing is lost, and the next standby takes over."""

from __future__ import annotations

from job_cases import FOREVER, TINY_MOE, StartJob, check_losses, goes_on_until_interrupted, wait_until

from holdfast.protocol.events import (
    FailureDetected,
    GenerationStarted,
    NodeMoved,
    NodesJoined,
    RolledBack,
    StandbyReady,
    WorkersChanged,
)
from tests.harness.local_job import LocalJob

OPTIONS = ("--standbys", "1", "--verify-state", "1", "--expert-slots", "8")


def is_promoted(job: LocalJob, since: int) -> str:
    """Wait until another standby starts to take over; return its name."""
    (name,) = job.wait(NodesJoined, since=since).names
    return name


def is_whole_again(job: LocalJob) -> None:
    """Wait until three nodes train, no node is draining, and a standby is warm."""

    def is_complete() -> bool:
        with job.client() as client:
            status = client.status()
        warm = any(node["standby"] == "warm" for node in status["nodes"])
        return warm and status["world_size"] == 3 and not status["leaving"] and status["state"] == "running"

    wait_until(is_complete)


def test_a_move_survives_the_death_of_the_standby_or_the_draining_node(start_job: StartJob) -> None:
    job = start_job(*FOREVER, "--step-seconds", "0.6", script=TINY_MOE, options=OPTIONS)
    job.wait(StandbyReady)
    leaver, since = job.nodes()[1], len(job.events)
    with job.client() as client:
        client.move([leaver])
    # The standby dies before it has entered: the others continue unchanged.
    before, generations = is_promoted(job, since), len(job.all(GenerationStarted))
    job.signal_node(before)
    job.wait(FailureDetected, node=before)
    since = len(job.events)
    # The standby dies between the two parts, at the end of a step in which it takes part.
    between = is_promoted(job, since)
    if not [event for event in job.all(GenerationStarted) if before in event.members]:
        assert len(job.all(GenerationStarted)) == generations, "the other nodes were stopped"
    job.inject("kill", between, phase="voted")
    job.wait(FailureDetected, node=between)
    since = len(job.events)
    # The standby dies after the second part: the draining node has left, or is still connected.
    after = is_promoted(job, since)
    job.wait(GenerationStarted, reason="move", since=since)
    job.signal_node(after)
    job.wait(FailureDetected, node=after)
    is_whole_again(job)
    # The draining node dies after the standby has joined and while it receives the experts.
    leaver, since = job.nodes()[1], len(job.events)
    with job.client() as client:
        client.move([leaver])
    joiner = is_promoted(job, since)
    job.wait(GenerationStarted, reason="join", since=since)
    job.signal_node(leaver)
    moved = job.wait(NodeMoved, from_node=leaver, since=since)
    assert moved.to_node == joiner
    assert job.nodes()[1] == joiner, "the standby has a different rank"
    goes_on_until_interrupted(job)
    assert {event.node for event in job.all(FailureDetected)} <= {before, between, after, leaver}
    assert not job.all(RolledBack)
    assert not job.all(WorkersChanged)
    check_losses(job, script=TINY_MOE, least=8)
