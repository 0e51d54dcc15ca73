"""Child processes: waiting for them, ending them, and reaping all of them."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import time

import pytest

from holdfast.control.processes import (
    ChildProcess,
    ProcessHandle,
    describe_exit,
    end_all,
    is_stopped,
    wait_or_end_frozen,
)

DEADLINE = 60.0
SLEEP = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(1000)"]
STUBBORN = [
    sys.executable,
    "-c",
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(1000)",
]


def wait_until(condition, what: str) -> None:
    deadline = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def start(command: list[str]) -> ChildProcess:
    """Start a child and wait until it runs its own code."""
    reader, writer = os.pipe()
    child = ChildProcess(command, stdout=writer)
    os.close(writer)
    with os.fdopen(reader) as lines:
        assert lines.readline() == "up\n"
    return child


def test_a_child_can_be_awaited_and_is_reaped() -> None:
    async def story() -> None:
        child = ChildProcess([sys.executable, "-c", "raise SystemExit(7)"])
        assert await asyncio.wait_for(child.wait(), DEADLINE) == 7
        assert await child.wait() == 7

    asyncio.run(story())


def test_a_child_has_its_own_process_group() -> None:
    child = start(SLEEP)
    assert os.getpgid(child.pid) == child.pid
    child.send_signal(signal.SIGKILL)
    assert child.reap() == -signal.SIGKILL
    child.send_signal(signal.SIGKILL)  # The process has ended, so this signal reaches no process.


@pytest.mark.parametrize(("command", "stop"), [(SLEEP, False), (SLEEP, True), (STUBBORN, False)])
def test_all_children_end_even_if_stopped_or_ignoring_sigterm(command: list[str], stop: bool) -> None:
    async def story() -> None:
        children = [start(command) for _ in range(2)]
        if stop:
            for child in children:
                child.send_signal(signal.SIGSTOP)
        await asyncio.wait_for(end_all(children, grace_s=0.3), DEADLINE)
        assert {child.code for child in children} <= {-signal.SIGTERM, -signal.SIGKILL}

    asyncio.run(story())


def test_stopped_processes_are_distinguished_from_running_processes() -> None:
    child = start(SLEEP)
    assert not is_stopped(child.pid)
    child.send_signal(signal.SIGSTOP)
    wait_until(lambda: is_stopped(child.pid), "the stop is seen")
    child.send_signal(signal.SIGKILL)
    child.reap()
    assert not is_stopped(child.pid)


def test_a_handle_of_a_reaped_process_sends_no_signals() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    handle = ProcessHandle(child.pid)
    assert handle.is_reaped
    handle.send_signal(signal.SIGKILL)
    handle.close()


def test_file_descriptors_are_closed() -> None:
    async def story() -> None:
        for _ in range(3):
            child = ChildProcess([sys.executable, "-c", ""], stdin=subprocess.PIPE)
            await asyncio.wait_for(child.wait(), DEADLINE)

    asyncio.run(story())
    gc.collect()  # Free the descriptors that earlier tests left open.
    before = len(os.listdir("/proc/self/fd"))
    asyncio.run(story())
    assert len(os.listdir("/proc/self/fd")) == before


PARENT = """
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", '''
import os, sys, time
from holdfast.control.processes import die_with_parent
die_with_parent(os.getppid())
print(os.getpid(), flush=True)
time.sleep(1000)
'''])
child.wait()
"""


def test_a_child_dies_with_its_parent() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    parent.stdout.close()
    handle = ProcessHandle(pid)
    asyncio.run(asyncio.wait_for(handle.wait_ended(), DEADLINE))
    handle.close()


@pytest.mark.parametrize(
    ("code", "words"), [(0, "exit code 0"), (7, "exit code 7"), (-9, "SIGKILL"), (-250, "signal 250")]
)
def test_exit_codes_are_described(code: int, words: str) -> None:
    assert describe_exit(code) == words


def test_a_child_that_stays_stopped_is_ended() -> None:
    async def story() -> None:
        child = start(SLEEP)
        child.send_signal(signal.SIGSTOP)
        assert await asyncio.wait_for(wait_or_end_frozen(child, 0.1), DEADLINE) == -signal.SIGKILL

    asyncio.run(story())


def test_a_child_that_resumes_in_time_is_not_ended() -> None:
    async def story() -> None:
        child = start(SLEEP)
        waiting = asyncio.ensure_future(wait_or_end_frozen(child, 0.8))
        for _ in range(4):  # The child is stopped for longer than the limit in total, but never in one stretch.
            child.send_signal(signal.SIGSTOP)
            await asyncio.sleep(0.3)
            child.send_signal(signal.SIGCONT)
            await asyncio.sleep(0.3)
        assert not waiting.done()
        child.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(waiting, DEADLINE) == -signal.SIGTERM

    asyncio.run(story())


def test_the_end_of_a_child_is_noticed_at_once_despite_a_long_limit() -> None:
    async def story() -> None:
        child = ChildProcess([sys.executable, "-c", "raise SystemExit(7)"])
        assert await asyncio.wait_for(wait_or_end_frozen(child, 1e6), DEADLINE) == 7

    asyncio.run(story())
