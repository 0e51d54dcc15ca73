"""Real jobs on this machine: real processes, really killed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from job_cases import TINY, StartJob, check_journal

from holdfast.control.local_job import LocalJob


@pytest.fixture
def start_job(tmp_path: Path) -> Iterator[StartJob]:
    """Start jobs of the tiny script; all are over when the test is, and every journal is whole."""
    jobs: list[LocalJob] = []

    def start(*args: str, nodes: int = 3, options: tuple[str, ...] = (), script: Path = TINY) -> LocalJob:
        folder = tmp_path / f"job{len(jobs)}"
        folder.mkdir()
        job = LocalJob(
            script,
            args,
            options=("--nodes", str(nodes), "--allow-faults", *options),
            folder=folder,
            environment={"XDG_RUNTIME_DIR": str(tmp_path)},
        )
        jobs.append(job)
        return job.__enter__()

    yield start
    for job in jobs:
        job.__exit__(None, None, None)
    for job in jobs:
        check_journal(job)
