"""Fixtures for jobs of real processes on this machine, which tests kill."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import job_cases
import pytest
from job_cases import TINY, StartJob, check_journal

from tests.harness.local_job import LocalJob
from tests.harness.local_pool import LocalPool
from warm_jobs import WarmJob, run_here


@pytest.fixture(scope="session", autouse=True)
def _share_calm_runs(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Share undisturbed runs between all processes of pytest, in the parent of their temporary folders."""
    folder = tmp_path_factory.getbasetemp()
    job_cases.calm_folder = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder


@pytest.fixture(scope="session", autouse=True)
def _share_a_zygote(warm_torch: str) -> None:
    """Share a zygote from which jobs fork their workers."""
    job_cases.zygote = warm_torch


@pytest.fixture
def start_job(tmp_path: Path, warm_commands: str) -> Iterator[StartJob]:
    """Start jobs of the tiny script; at teardown end all jobs and check every journal."""
    jobs: list[LocalJob] = []

    def start(
        *args: str, nodes: int = 3, options: tuple[str, ...] = (), script: Path = TINY, cold: bool = False
    ) -> LocalJob:
        folder = tmp_path / f"job{len(jobs)}"
        folder.mkdir()
        shared = () if cold else ("--zygote", job_cases.zygote)
        job = (LocalJob if cold else partial(WarmJob, warm_commands))(
            script,
            args,
            options=("--nodes", str(nodes), "--allow-faults", *shared, *options),
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


@pytest.fixture
def start_pool(tmp_path: Path) -> Iterator[Callable[..., LocalPool]]:
    """Start a pool with a number of nodes; at teardown end all its processes."""
    with pools_in(tmp_path) as start:
        yield start


@pytest.fixture(scope="module")
def start_shared_pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., LocalPool]]:
    """Start a pool for all tests of a file, which must be in one xdist_group."""
    with pools_in(tmp_path_factory.mktemp("pool")) as start:
        yield start


@contextmanager
def pools_in(folder: Path) -> Generator[Callable[..., LocalPool]]:
    """Yield a function that starts pools with their files in a folder; kill all their processes at the end."""
    folder.chmod(0o700)
    pools: list[LocalPool] = []

    def start(nodes: int, *options: str) -> LocalPool:
        pools.append(LocalPool(folder, nodes, *options, run=run_here))
        return pools[-1]

    yield start
    for pool in pools:
        if pool.process.poll() is None:
            pool.process.kill()
            pool.process.wait()
        for pid, _ in pool.processes():
            os.kill(pid, signal.SIGKILL)
