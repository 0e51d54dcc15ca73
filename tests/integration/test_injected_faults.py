"""What `inject` does to a job that goes on: who is slow, what is said and decides nothing, a link that is silent."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from job_cases import FOREVER, StartJob, goes_on

from holdfast.protocol.events import (
    CheckpointSaved,
    FailureDetected,
    GenerationStarted,
    JobFailed,
    NodeLeft,
    Recovered,
    StepCommitted,
)
from holdfast.testing.local_job import LocalJob

#: for what must come
DEADLINE_S = 60.0


def status_until(job: LocalJob, found: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """Return the first status of a job that is as it is wanted."""
    until = time.monotonic() + DEADLINE_S
    with job.client() as client:
        while not found(status := client.status()):
            if time.monotonic() > until:
                pytest.fail(f"{status}\n{job.story()}")
            time.sleep(0.1)  # (nobody tells of a status)
    return status


def test_one_job_meets_them_one_after_the_other(start_job: StartJob, tmp_path: Path) -> None:
    kept = ("--checkpoint-dir", str(tmp_path / "checkpoints"), "--checkpoint-every", "10")
    job = start_job(*FOREVER, "--step-seconds", "0.6", nodes=4, options=(*kept, "--verify-state", "1"))
    job.wait(CheckpointSaved, step=10)
    first, second, third, _ = job.nodes()

    job.inject("slow", second, times=2.0)
    job.inject("clock-jump", third, by_s=-7200.0)
    job.inject("disk-full", first)
    job.wait_output("clock was set by -7200.0 s; nothing is decided by it")
    job.wait_output(f"failed: OSError: [Errno {errno.ENOSPC}] injected fault: {os.strerror(errno.ENOSPC)}")
    status = status_until(job, lambda it: bool(it["paces"]) and it["paces"][0]["score"] > 1.5)
    assert status["paces"][0]["worker"].startswith(f"{second}/"), status["paces"]
    assert job.all(FailureDetected) == [], job.story()
    assert len(job.all(GenerationStarted)) == 1, "nobody is taken out"
    saved = len(job.all(CheckpointSaved))

    since = len(job.events)
    job.inject("link-down", third)
    failure = job.wait(FailureDetected, since=since)
    assert (failure.node, failure.kind, failure.severity) == (third, "lease_expired", 1), job.story()
    assert job.wait(NodeLeft, since=since).node == third
    assert job.wait(Recovered, since=since).action == "shrink"
    assert third not in job.nodes()
    goes_on(job)
    assert len(job.all(CheckpointSaved)) == saved, "whoever is first writes, and its disk is full"

    job.inject("corrupt-state", second)
    assert "replicas diverged" in job.wait(JobFailed).why
    assert job.wait_exit(DEADLINE_S) == 1
    assert job.all(StepCommitted)[-1].step >= 10
