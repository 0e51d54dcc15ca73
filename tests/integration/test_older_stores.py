"""A store restored from a backup while its job trains: no coordinator uses it, and no worker is stopped."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from job_cases import FOREVER, StartJob, alive, goes_on_until_interrupted

from etcd_server import EtcdServer
from holdfast.protocol.events import CoordinatorRestarted, GenerationStarted, JobStarted, StepCommitted


@dataclass
class Backups:
    """A store and its copies: `save` makes a copy, `put` replaces the store by a copy, `leave` stops the server."""

    url: str
    save: Callable[[str], None]
    put: Callable[[str], None]
    leave: Callable[[], None] = lambda: None


def _copy(source: Path, target: Path) -> None:
    with (
        contextlib.closing(sqlite3.connect(source)) as here,
        contextlib.closing(sqlite3.connect(target)) as there,
    ):
        here.backup(there)


def _sqlite(folder: Path) -> Backups:
    store = folder / "store.sqlite"

    def put(name: str) -> None:
        for side in ("-wal", "-shm"):
            Path(f"{store}{side}").unlink(missing_ok=True)
        _copy(folder / name, folder / f"{name}.new")
        (folder / f"{name}.new").replace(store)  # A running coordinator keeps its open file.

    return Backups(f"sqlite:{store}", lambda name: _copy(store, folder / name), put)


def _etcd(folder: Path) -> Backups:
    server = EtcdServer(folder / "etcd")

    def save(name: str) -> None:
        server.kill()
        shutil.copytree(folder / "etcd", folder / name)
        server.start()

    def put(name: str) -> None:
        server.kill()
        shutil.rmtree(folder / "etcd")
        shutil.copytree(folder / name, folder / "etcd")
        server.start()

    return Backups(server.url, save, put, server.kill)


@pytest.fixture(params=[_sqlite, _etcd], ids=["sqlite", "etcd"])
def backups(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Backups]:
    store = request.param(tmp_path)
    yield store
    store.leave()


def test_no_coordinator_starts_from_an_older_store_and_training_continues(
    start_job: StartJob, backups: Backups
) -> None:
    job = start_job(*FOREVER, "--step-seconds", "0.1", nodes=2, options=("--store", backups.url))
    job.wait(StepCommitted, step=3)
    backups.save("old")
    job.add_nodes(1)
    job.wait(GenerationStarted, generation=2)
    job.wait(StepCommitted, step=job.all(StepCommitted)[-1].step + 3)
    pids = [pid for node in job.nodes() for pid in (job.pids(node)[0], *job.pids(node)[1])]
    backups.save("newest")

    (started,) = job.all(JobStarted)
    # A running coordinator would detect the changed store and stop first.
    os.kill(started.coordinator_pid, signal.SIGSTOP)
    backups.put("old")
    os.kill(started.coordinator_pid, signal.SIGKILL)
    job.wait_output("is older than the job: it ends with event")
    job.wait_output("training goes on without a coordinator")
    assert [pid for pid in pids if not alive(pid)] == []
    assert job.all(CoordinatorRestarted) == []

    last = job.all(StepCommitted)[-1].step
    backups.put("newest")
    job.wait(CoordinatorRestarted)
    job.wait(StepCommitted, step=last + 1)
    assert [pid for pid in pids if not alive(pid)] == []
    assert len(job.all(GenerationStarted)) == 2
    goes_on_until_interrupted(job)
