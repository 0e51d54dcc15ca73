"""A pool on one machine, without nodes: a server that has served once is restarted after any failure."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from pool_bench import PATIENCE_S, PoolProcess, a_job

from etcd_server import EtcdServer
from holdfast.control.pool_client import PoolClient
from holdfast.control.registry import find_pool
from holdfast.errors import (
    EXIT_BAD_INPUT,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_OUR_FAULT,
    HoldfastError,
    UnreachableError,
)
from holdfast.protocol.job_spec import JobSpec

_MAIN = """
import logging, sys
from pathlib import Path
from holdfast.control.pool.local_pool import run_local_pool
from holdfast.control.pool.settings import PoolSettings
from holdfast.errors import HoldfastError
logging.basicConfig(level=logging.INFO)
folder, store = Path(sys.argv[1]), sys.argv[2]
settings = PoolSettings(store=store, folder=folder / "journals", registry=folder / "registry")
try:
    sys.exit(run_local_pool(settings, 0, {}, lambda line: print(line, file=sys.stderr, flush=True)))
except HoldfastError as error:
    print(error, file=sys.stderr)
    sys.exit(error.exit_code)
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
    """Wait until the condition holds."""
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline, (folder / "log").read_text()
        time.sleep(0.05)


def serves(pool: subprocess.Popen[bytes], folder: Path) -> bool:
    """Return whether a pool answers its commands, which find it even while its server is away."""
    entry = find_pool(folder / "registry", None, None)
    if entry is None:
        return False
    assert entry.pid == pool.pid
    try:
        with PoolClient(entry) as client:
            return client.status()["pool"] == "pool"
    except UnreachableError:
        return False


def test_a_superseded_pool_ends_and_does_not_take_over_again(tmp_path: Path) -> None:
    """Two pools on one store would otherwise take it from each other forever."""
    tmp_path.chmod(0o700)
    store = f"sqlite:{tmp_path}/pool.db"
    pool = start(tmp_path, store)
    try:
        until(lambda: serves(pool, tmp_path), tmp_path)
        again = start(tmp_path, store)
        assert again.wait(PATIENCE_S) == EXIT_BAD_INPUT
        assert f"the store {tmp_path}/pool.db is in use by another pool" in (tmp_path / "log").read_text()
        with PoolProcess(tmp_path, store=store) as other:
            entry = find_pool(tmp_path / "registry", None, None)
            assert entry is not None
            with PoolClient(entry) as client, pytest.raises(HoldfastError):
                client.submit(
                    msgspec.convert(a_job("one"), JobSpec)
                )  # The pool notices the takeover at its next write.
            assert pool.wait(PATIENCE_S) == EXIT_FAILED
            assert "another server has taken over this pool" in (tmp_path / "log").read_text()
            other.check_serves()
    finally:
        pool.kill()
        pool.wait()


def test_a_killed_server_is_restarted_once_its_store_is_available(tmp_path: Path, etcd: EtcdServer) -> None:
    tmp_path.chmod(0o700)
    pool = start(tmp_path, etcd.url)

    try:
        until(lambda: serves(pool, tmp_path), tmp_path)
        etcd.kill()
        (server,) = Path(f"/proc/{pool.pid}/task/{pool.pid}/children").read_text().split()
        os.kill(int(server), signal.SIGKILL)
        until(lambda: (tmp_path / "log").read_text().count("etcd does not answer") >= 2, tmp_path)
        assert pool.poll() is None, "the job must continue to train"
        assert not serves(pool, tmp_path)
        etcd.start()
        until(lambda: serves(pool, tmp_path), tmp_path)
        pool.send_signal(signal.SIGINT)
        assert pool.wait(PATIENCE_S) == EXIT_INTERRUPTED
    finally:
        pool.kill()
        pool.wait()


def test_a_pool_without_a_reachable_store_does_not_start(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    pool = start(tmp_path, "etcd:http://127.0.0.1:9")
    assert pool.wait(PATIENCE_S) == EXIT_OUR_FAULT
    assert "etcd does not answer: http://127.0.0.1:9" in (tmp_path / "log").read_text()


#: A pool with a node that is killed at once. The script leaves a process behind, and then waits.
_LEAVES = """
import os, signal, sys, time
from pathlib import Path
from holdfast.control.pool import local_pool
from holdfast.control.pool.settings import PoolSettings
from holdfast.control.processes import ChildProcess

NODE = '''
import os, signal, sys, time
from pathlib import Path
folder = Path(sys.argv[1])
first, second = folder / "left-1", folder / "left-2"
mine = second if first.exists() else first
if mine == second and os.path.exists("/proc/" + first.read_text()):
    (folder / "found").touch()
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        (folder / "new").write_text(str(os.getpid()))
        (folder / "new").rename(mine)
        time.sleep(1000)
    os._exit(0)
os.wait()
while not mine.exists():
    time.sleep(0.01)
if mine == first:
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(1000)
'''
IDLE = '''import time; time.sleep(1000)'''
folder = Path(sys.argv[1])
def start(pool, name):
    return ChildProcess([sys.executable, "-c", IDLE if name == "server" else NODE, str(folder)])
local_pool._LocalPool._start = start
settings = PoolSettings(store="memory:", folder=folder / "journals", registry=folder / "registry")
sys.exit(local_pool.run_local_pool(settings, 1, {}, lambda line: print(line, flush=True)))
"""


def test_background_processes_of_a_killed_node_end_before_its_restart(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    with (tmp_path / "log").open("ab") as log:
        pool = subprocess.Popen([sys.executable, "-c", _LEAVES, str(tmp_path)], stdout=log, stderr=log)
    try:
        until((tmp_path / "left-2").exists, tmp_path)
        assert not (tmp_path / "found").exists()
        pool.send_signal(signal.SIGINT)
        until(lambda: "Another signal ends everything at once" in (tmp_path / "log").read_text(), tmp_path)
        pool.send_signal(signal.SIGINT)
        assert pool.wait(PATIENCE_S) == EXIT_INTERRUPTED
        assert not Path("/proc", (tmp_path / "left-2").read_text()).exists()
    finally:
        pool.kill()
        pool.wait()
        for left in tmp_path.glob("left-*"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(left.read_text()), signal.SIGKILL)


_FAILS = """
import sys
from pathlib import Path
from holdfast.control.pool import local_pool
from holdfast.control.pool.settings import PoolSettings
from holdfast.control.processes import ChildProcess

folder, codes = Path(sys.argv[1]), [int(code) for code in sys.argv[2:]]
def start(pool, name):
    code = codes.pop(0)
    if code == 0:
        pool._served.touch()
    return ChildProcess([sys.executable, "-c", f"import sys; sys.exit({code or 2})"])
local_pool._LocalPool._start = start
local_pool._BRIEF_S = 0.0  # (however long it took to find out)
settings = PoolSettings(store="memory:", folder=folder / "journals", registry=folder / "registry")
sys.exit(local_pool.run_local_pool(settings, 0, {}, lambda line: print(line, flush=True)))
"""


@pytest.mark.parametrize(("codes", "code"), [((2, 3), 2), ((1, 70, 4), 70), ((0, 70, 2, 4), EXIT_FAILED)])
def test_a_server_that_cannot_serve_is_not_restarted(tmp_path: Path, codes: tuple[int, ...], code: int) -> None:
    """A server that has served (0) is restarted; 4 means that another has taken over."""
    tmp_path.chmod(0o700)
    pool = [sys.executable, "-c", _FAILS, str(tmp_path), *map(str, codes)]
    done = subprocess.run(pool, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == code, done.stdout + done.stderr
