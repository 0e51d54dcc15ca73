"""Processes of a test run end with it, even if pytest is interrupted or killed in mid-test."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import end_with_tests
from end_with_tests import VARIABLE

DEADLINE_S = 60.0

#: A test that starts a process and never ends it, like a pool that is still starting.
INNER = """
import subprocess, sys, time

def test_a_child_that_never_ends():
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    child = subprocess.Popen([sys.executable, "-c", deaf], start_new_session=True)
    print("pid", child.pid, flush=True)
    time.sleep(600)
"""
CONFTEST = """
import end_with_tests

def pytest_configure(config):
    config.guard = end_with_tests.start_guard()

def pytest_unconfigure(config):
    end_with_tests.end_guard(config.guard)
"""


def is_alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rsplit(")", 1)[1].split()[0] != "Z"


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_processes_of_a_test_run_end_when_pytest_is_interrupted_or_killed(tmp_path: Path, how: signal.Signals) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_inner.py").write_text(INNER)
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
    environment["PYTHONPATH"] = str(Path(end_with_tests.__file__).parent)
    command = [sys.executable, "-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", "-p", "no:xdist", "test_inner.py"]
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True) as tests:
        assert tests.stdout is not None
        line = next(line for line in tests.stdout if "pid" in line)
        pid = int(line.split()[-1])
        assert is_alive(pid)
        tests.send_signal(how)
        tests.wait(DEADLINE_S)
    limit = time.monotonic() + DEADLINE_S
    while is_alive(pid):
        assert time.monotonic() < limit
        time.sleep(0.05)


def test_all_processes_of_one_run_share_one_guard() -> None:
    assert VARIABLE in os.environ, "conftest.py must have started the guard"
    assert end_with_tests.start_guard() is None
