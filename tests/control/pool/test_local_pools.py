"""A pool on one machine, without its nodes: its server is started again, whatever it has died of once it has served."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pool_bench import PATIENCE_S

from etcd_server import EtcdServer
from holdfast.control.pool_client import PoolClient
from holdfast.control.registry import find_pool
from holdfast.errors import EXIT_INTERRUPTED, EXIT_OUR_FAULT, UnreachableError

_MAIN = """
import logging, sys
from pathlib import Path
from holdfast.control.pool.local_pool import run_local_pool
from holdfast.control.pool.settings import PoolSettings
logging.basicConfig(level=logging.INFO)
folder, store = Path(sys.argv[1]), sys.argv[2]
settings = PoolSettings(store=store, folder=folder / "journals", registry=folder / "registry")
sys.exit(run_local_pool(settings, 0, {}, lambda line: print(line, file=sys.stderr, flush=True)))
"""


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EtcdServer]:
    server = EtcdServer(tmp_path / "etcd")
    yield server
    server.kill()


def start(folder: Path, store: str) -> subprocess.Popen[bytes]:
    """Start a pool without nodes."""
    with (folder / "log").open("ab") as log:
        return subprocess.Popen([sys.executable, "-c", _MAIN, str(folder), store], stdout=log, stderr=log)


def until(holds: Callable[[], object], folder: Path) -> None:
    """Wait until something holds."""
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline, (folder / "log").read_text()
        time.sleep(0.05)


def test_a_server_that_dies_while_its_store_is_away_is_there_again_once_that_is(
    tmp_path: Path, etcd: EtcdServer
) -> None:
    tmp_path.chmod(0o700)
    pool = start(tmp_path, etcd.url)

    def serves() -> bool:
        entry = find_pool(tmp_path / "registry", None, None)
        if entry is None:
            return False
        assert entry.pid == pool.pid, "its commands find it while its server is away"
        try:
            with PoolClient(entry) as client:
                return client.status()["pool"] == "pool"
        except UnreachableError:
            return False

    try:
        until(serves, tmp_path)
        etcd.kill()
        (server,) = Path(f"/proc/{pool.pid}/task/{pool.pid}/children").read_text().split()
        os.kill(int(server), signal.SIGKILL)
        until(lambda: (tmp_path / "log").read_text().count("etcd does not answer") >= 2, tmp_path)
        assert pool.poll() is None, "its jobs train on"
        assert not serves()
        etcd.start()
        until(serves, tmp_path)
        pool.send_signal(signal.SIGINT)
        assert pool.wait(PATIENCE_S) == EXIT_INTERRUPTED
    finally:
        pool.kill()
        pool.wait()


def test_one_whose_store_is_not_there_at_all_does_not_begin(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    pool = start(tmp_path, "etcd:http://127.0.0.1:9")
    assert pool.wait(PATIENCE_S) == EXIT_OUR_FAULT
    assert "etcd does not answer: http://127.0.0.1:9" in (tmp_path / "log").read_text()
