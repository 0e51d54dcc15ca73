"""Faults from `inject` in a running job: slow nodes, a clock jump, a full disk, a silent link and a corrupt state."""

from __future__ import annotations

import errno
import os
import re
import time
from pathlib import Path
from typing import Any

import pytest
from job_cases import FOREVER, StartJob, goes_on

from holdfast.protocol.events import (
    CheckpointFailed,
    CheckpointSaved,
    FailureDetected,
    JobFailed,
    NodeLeft,
    Recovered,
)
from holdfast.protocol.names import node_of
from tests.harness.local_job import LocalJob

#: The time limit of each wait.
DEADLINE_S = 60.0


def who_is_slow(job: LocalJob, fault: str, node: str, key: str, times: float) -> str:
    """Make a node slow, and return the node that the status then lists as clearly slowest.

    The fault is injected repeatedly, because on a busy machine the process may have been replaced.
    """
    until = time.monotonic() + DEADLINE_S
    while time.monotonic() < until:
        job.inject(fault, node, times=times)
        goes_on(job)
        with job.client() as client:
            scored: list[dict[str, Any]] = client.status()[key]
        if scored and scored[0]["score"] > 1.6 and scored[0]["worker"].startswith(f"{node}/"):
            return node_of(scored[0]["worker"])
    pytest.fail(f"the status does not list {node} as slowest\n{job.story()}")


def test_one_job_handles_all_injected_faults_in_sequence(start_job: StartJob, tmp_path: Path) -> None:
    kept = ("--checkpoint-dir", str(tmp_path / "checkpoints"), "--checkpoint-every", "3")
    wide = ("--step-seconds", "0.5", "--hidden", "30000")
    job = start_job(*FOREVER, *wide, nodes=4, options=(*kept, "--verify-state", "1"))
    job.wait(CheckpointSaved, step=3)
    _, second, third, _ = job.nodes()

    job.inject("clock-jump", third, by_s=-7200.0)
    job.wait_output("clock was set by -7200.0 s; nothing is decided by it")
    assert who_is_slow(job, "slow", second, "paces", 2.0) == second
    assert who_is_slow(job, "slow-link", third, "links", 20.0) == third
    assert re.search(rf"^{third} .* slow: ", job.call("status"), re.MULTILINE)
    assert [failure for failure in job.all(FailureDetected) if failure.severity == 1] == [], job.story()
    assert job.all(NodeLeft) == [], "a node was removed"

    job.inject("disk-full", job.nodes()[0])
    failed = job.wait(CheckpointFailed, node=job.nodes()[0])
    assert failed.why == f"injected fault: {os.strerror(errno.ENOSPC)}"

    since = len(job.events)
    job.inject("link-down", third)
    failure = job.wait(FailureDetected, node=third, since=since)
    assert (failure.kind, failure.severity) == ("lease_expired", 1), job.story()
    assert job.wait(NodeLeft, since=since).node == third
    job.wait(Recovered, lambda e: third not in job.nodes(), since=since)
    goes_on(job)

    job.inject("corrupt-state", second)
    why = job.wait(JobFailed).why
    assert "replicas diverged" in why
    assert f"the state of {second} differs from that of the 2 other nodes" in why, why
    assert job.wait_exit(DEADLINE_S) == 1
