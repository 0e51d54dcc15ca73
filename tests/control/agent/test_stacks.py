"""Stack dumps of a worker's threads, taken without the worker's help."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.control.agent.stacks import StackReader, make_worker_stacks
from holdfast.control.processes import ProcessHandle
from holdfast.coordination.timing.reading import CollectiveWait, ProgressAccount

SCRIPT = """
import sys, threading, time
from holdfast.control.link.stacks import dump_stacks_on_signal

def evaluates_for_ever():
    print("ready", flush=True)
    while True:
        pass  # the interpreter's lock is seldom free

kept = dump_stacks_on_signal(sys.argv[1])
threading.Thread(target=time.sleep, args=(1e6,), daemon=True).start()
evaluates_for_ever()
"""


@pytest.fixture
def busy(tmp_path: Path) -> Iterator[tuple[ProcessHandle, str]]:
    """A process that computes forever, and the path of its stack dumps."""
    path = str(tmp_path / "worker.stacks")
    with subprocess.Popen([sys.executable, "-c", SCRIPT, path], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        handle = ProcessHandle(process.pid)
        yield handle, path
        handle.send_signal(signal.SIGKILL)
        handle.close()


async def ask(*processes: tuple[ProcessHandle, str]) -> dict[str, str]:
    return await StackReader({f"a/{index}/0": one for index, one in enumerate(processes)}).read()


def test_the_stack_of_a_busy_process_can_be_dumped_repeatedly(busy: tuple[ProcessHandle, str]) -> None:
    async def story() -> None:
        for _ in range(2):
            found: dict[str, str] = {}
            while not found:  # On a busy machine, the process may get no core for a tenth of a second.
                found = await ask(busy)
            assert found["a/0/0"].count("in evaluates_for_ever") == 1
            assert "0x" not in found["a/0/0"]

    asyncio.run(story())


def test_a_stopped_process_dumps_no_stack(busy: tuple[ProcessHandle, str]) -> None:
    busy[0].send_signal(signal.SIGSTOP)
    assert asyncio.run(ask(busy)) == {}
    assert Path(busy[1]).read_text() == ""


def test_a_process_that_cannot_dump_its_stack_is_not_harmed(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        handle = ProcessHandle(process.pid)
        assert asyncio.run(ask((handle, str(tmp_path / "none")), (handle, ""))) == {}
        handle.close()
        process.communicate(b"\n")
        assert process.returncode == 0


def test_stack_reports_contain_the_newest_collectives() -> None:
    waits = (
        CollectiveWait(what="all_to_all", size=4, bytes=64, since=10.0, until=10.5),
        CollectiveWait(what="commit", size=4, bytes=8, since=11.0, until=None),
    )
    message = make_worker_stacks(
        7, {"a/0/0": "a stack"}, {"a/0/0": ProgressAccount(waits=waits), "a/1/0": ProgressAccount()}, 12.0
    )
    assert message.number == 7
    first, second = message.workers
    assert [(one.what, one.began_s, one.took_s) for one in first.collectives] == [
        ("all_to_all", 2.0, 0.5),
        ("commit", 1.0, None),
    ]
    assert (first.stack, second.stack, second.collectives) == ("a stack", "", ())
