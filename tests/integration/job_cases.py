"""What the tests of whole jobs share."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.control.local_job import LocalJob

TINY = Path(__file__).parent / "scripts" / "tiny.py"
TINY_MOE = TINY.with_name("tiny_moe.py")

StartJob = Callable[..., LocalJob]


def check_journal(job: LocalJob) -> None:
    """No event is missing, and every step is there once, in order, with all samples (but for roll-backs)."""
    assert [event["seq"] for event in job.events] == list(range(1, len(job.events) + 1))
    wanted = 1
    for event in job.events:
        if event["event"] == "rolled_back":
            wanted = event["to_step"] + 1
        if event["event"] == "step_committed":
            assert event["step"] == wanted, job.story()
            wanted += 1
    samples = {event["samples"] for event in job.all("step_committed")}
    assert len(samples) <= 1


@functools.cache
def calm_losses(*args: str, script: Path = TINY) -> list[float]:
    """Return the losses of a script run alone, undisturbed, in one process; the same run serves many tests."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "calm.json"
        command = [sys.executable, str(script), *args, "--losses", str(file)]
        subprocess.run(command, check=True, env=environment, timeout=120)
        return json.loads(file.read_text())["losses"]


def check_losses(job: LocalJob, steps: int, *args: str) -> None:
    """A job of TINY_MOE has committed exactly these steps, with the losses of an undisturbed run."""
    losses = [event["loss"] for event in job.all("step_committed")]
    assert losses == pytest.approx(calm_losses("--steps", str(steps), *args, script=TINY_MOE), rel=1e-9)


def alive(pid: int) -> bool:
    """Return whether a process runs (a zombie does not)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rsplit(")", 1)[1].split()[0] != "Z"
