"""Whoever dies while a node with experts gives its place away: nothing is lost, and the next standby takes it."""

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
    """Wait until another standby is to take the place; return its name."""
    (name,) = job.wait(NodesJoined, since=since).names
    return name


def is_whole_again(job: LocalJob) -> None:
    """Wait until three nodes train, nobody is to leave, and a standby is warm."""

    def whole() -> bool:
        with job.client() as client:
            told = client.status()
        warm = any(node["standby"] == "warm" for node in told["nodes"])
        return warm and told["world_size"] == 3 and not told["leaving"] and told["state"] == "running"

    wait_until(whole)


def test_joiners_before_between_and_after_both_parts_and_a_leaver_that_hands_over(start_job: StartJob) -> None:
    job = start_job(*FOREVER, "--step-seconds", "0.6", script=TINY_MOE, options=OPTIONS)
    job.wait(StandbyReady)
    leaver, since = job.nodes()[1], len(job.events)
    with job.client() as client:
        client.move([leaver])
    # before it has entered: the others go on as they were
    before, generations = is_promoted(job, since), len(job.all(GenerationStarted))
    job.signal_node(before)
    job.wait(FailureDetected, node=before)
    since = len(job.events)
    # between the two parts: it takes part in a step, and dies as that is about to pass
    between = is_promoted(job, since)
    if not [event for event in job.all(GenerationStarted) if before in event.members]:
        assert len(job.all(GenerationStarted)) == generations, "nobody had to stop"
    job.inject("kill", between, phase="voted")
    job.wait(FailureDetected, node=between)
    since = len(job.events)
    # after the second one: the node that has left is not needed any more, or still there
    after = is_promoted(job, since)
    job.wait(GenerationStarted, reason="move", since=since)
    job.signal_node(after)
    job.wait(FailureDetected, node=after)
    is_whole_again(job)
    # the one that leaves, once the other has joined, and is given what it has
    leaver, since = job.nodes()[1], len(job.events)
    with job.client() as client:
        client.move([leaver])
    joiner = is_promoted(job, since)
    job.wait(GenerationStarted, reason="join", since=since)
    job.signal_node(leaver)
    moved = job.wait(NodeMoved, from_node=leaver, since=since)
    assert moved.to_node == joiner
    assert job.nodes()[1] == joiner, "at its rank"
    goes_on_until_interrupted(job)
    assert {event.node for event in job.all(FailureDetected)} <= {before, between, after, leaver}
    assert not job.all(RolledBack)
    assert not job.all(WorkersChanged)
    check_losses(job, script=TINY_MOE, least=8)
