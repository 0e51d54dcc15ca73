"""Programs of the user: holdfast waits for their own end, not for the processes that they leave running."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from holdfast.control.programs import ProgramError, run_program

#: Leaves a process of another session behind, which keeps stdin and stderr open.
LEAVES = "setsid sleep 60 & echo $! > {pid}; "


@pytest.fixture
def left(tmp_path: Path) -> Path:
    return tmp_path / "pid"


def run(script: Path, text: str, patience_s: float, data: bytes = b"") -> None:
    script.write_text(f"#!/bin/sh\n{text}\n")
    script.chmod(0o755)

    async def run_it() -> None:
        async with asyncio.timeout(patience_s):
            await run_program(str(script), data)

    asyncio.run(run_it())


def kill_left_process(left: Path) -> None:
    """Kill the process that the program left; it must still run, which proves that the call did not wait for it."""
    os.kill(int(left.read_text()), signal.SIGKILL)


def test_a_process_that_a_program_left_running_is_not_awaited(tmp_path: Path, left: Path) -> None:
    run(tmp_path / "run", LEAVES.format(pid=left) + "exit 0", 20.0)
    kill_left_process(left)


def test_stderr_of_a_program_is_reported_while_its_child_keeps_it_open(tmp_path: Path, left: Path) -> None:
    with pytest.raises(ProgramError, match=r"run ended with 3: the fan stands still$"):
        run(tmp_path / "run", LEAVES.format(pid=left) + "echo the fan stands still >&2; exit 3", 20.0)
    kill_left_process(left)


def test_a_timeout_does_not_wait_for_processes_that_the_program_left(tmp_path: Path, left: Path) -> None:
    with pytest.raises(TimeoutError):
        run(tmp_path / "run", LEAVES.format(pid=left) + "exec sleep 60", 3.0)
    kill_left_process(left)


def test_a_program_may_read_or_ignore_its_input(tmp_path: Path) -> None:
    data = b"x" * 1_000_000
    run(tmp_path / "reads", f"cat > {tmp_path}/got", 20.0, data)
    assert (tmp_path / "got").read_bytes() == data
    run(tmp_path / "does-not", "exit 0", 20.0, data)
