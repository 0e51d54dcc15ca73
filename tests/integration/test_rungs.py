"""A process that dies repeatedly: its rank is held, its node is quarantined, and a user undrains the node."""

from __future__ import annotations

import os
import signal

import pytest
from job_cases import FOREVER, StartJob, goes_on_until_interrupted

from holdfast.errors import RefusedError, UnreachableError
from holdfast.protocol.events import (
    FailureDetected,
    GenerationStarted,
    NodeLeft,
    NodeRepaired,
    Recovered,
    StepCommitted,
)
from tests.harness.local_job import LocalJob

SLOWLY = (*FOREVER, "--step-seconds", "0.06")
HOLD = ("--on-process-failure", "hold", "--max-restarts", "1")


def kill_process(job: LocalJob, node: str) -> int:
    """Kill a node's newest worker; return the number of events before."""
    since = len(job.events)
    os.kill(job.pids(node)[1][0], signal.SIGKILL)
    return since


def test_a_process_that_dies_too_often_quarantines_its_node(start_job: StartJob) -> None:
    job = start_job(*SLOWLY, options=HOLD)
    job.wait(StepCommitted, step=3)
    ranks = job.nodes()
    since = kill_process(job, "node-1")
    recovered = job.wait(Recovered, since=since)
    assert (recovered.action, recovered.state_source) == ("restart", "live"), job.story()
    assert job.nodes() == ranks, "the new process has a different rank"
    since = kill_process(job, "node-1")
    left = job.wait(NodeLeft, reason="quarantined", since=since)
    assert left.node == "node-1", job.story()
    assert "its workers have failed 2 times in 300 s: " in left.detail
    assert [failure.tries for failure in job.all(FailureDetected)] == [1, 2]
    assert [event.action for event in job.all(Recovered)] == ["restart", "shrink"]
    with job.client() as client:
        with pytest.raises(
            (RefusedError, UnreachableError),
            match=r"node node-7 is not in the job, and neither drained nor quarantined: .*: node-1",
        ):
            client.undrain("node-7")
        assert client.undrain("node-1"), "the launcher must start the node's agent"
    assert job.wait(NodeRepaired, since=since).repair == "ticket"
    job.wait(GenerationStarted, reason="join", world_size=3, since=since)
    goes_on_until_interrupted(job)


def test_a_node_that_fails_its_preflight_check_does_not_join(start_job: StartJob) -> None:
    job = start_job(*SLOWLY, nodes=1, options=("--preflight", "sh -c 'echo fan 3 stands >&2; exit 5'"))
    assert job.wait_exit(60) == 1, job.story()
    (left,) = job.all(NodeLeft)
    assert (left.node, left.reason) == ("node-0", "quarantined")
    assert left.detail.endswith("sh ended with 5: fan 3 stands")
