"""A script alone, without an agent's zygote: its loader workers come from its own zygote, and all processes end."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "scripts" / "alone.py"
DEADLINE_S = 120.0


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A temporary folder with a path short enough for sockets, unlike pytest's paths."""
    with tempfile.TemporaryDirectory(prefix="hf-") as folder:
        yield Path(folder)


def test_a_killed_script_leaves_no_processes_or_directories(temporary: Path) -> None:
    """This is the only cold start with loader workers and without a zygote to ask."""
    command = [sys.executable, str(SCRIPT)]
    environment = {"TMPDIR": str(temporary), "PYTHONPATH": ":".join(sys.path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as script:
        assert script.stdout is not None
        line = script.stdout.readline().split()
        assert line[:2] == ["loader", "workers"], line
        loaders = [int(word) for word in line[2:]]
        (zygote,) = {parent(pid) for pid in loaders}
        assert parent(zygote) == script.pid
        assert list(temporary.glob("holdfast-*"))
        script.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + DEADLINE_S
    while any(map(runs, (zygote, *loaders))) or list(temporary.glob("holdfast-*")):
        assert time.monotonic() < deadline
        time.sleep(0.02)
