"""Helpers for tests of complete jobs."""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast.observability.event_lines import read_events
from holdfast.observability.history.audit import audit_events
from holdfast.observability.report import committed_steps, make_report
from holdfast.protocol.events import StepCommitted
from tests.harness.local_job import LocalJob
from warm_start import run_warm

TINY = Path(__file__).parent / "scripts" / "tiny.py"
TINY_MOE = TINY.with_name("tiny_moe.py")
#: The arguments of a job that its test ends.
FOREVER = ("--steps", "1000000")

#: The folder of cached undisturbed runs; set by conftest.py.
calm_folder = Path()

#: The socket of the shared zygote; set by conftest.py.
zygote = ""

StartJob = Callable[..., LocalJob]


def check_journal(job: LocalJob) -> None:
    """Check that the journal proves every step once and in order with all samples, except after rollbacks."""
    if not job.events:
        return  # The job was refused before its start.
    audited = audit_events(job.events)
    assert audited.sound, f"{audited.findings}\n{job.story()}"
    assert audited.unproven == 0, job.story()
    time = make_report(job.events).time
    assert sum(time.seconds.values()) == pytest.approx(time.wall_s, rel=0.01), job.story()
    assert min(time.seconds.values()) >= 0.0, job.story()


def goes_on(job: LocalJob, steps: int = 3) -> None:
    """Wait until a job has committed further steps."""
    since = len(job.events)
    before = job.all(StepCommitted)
    last = before[-1].step if before else 0  # A standby may be warm before the first step.
    job.wait(StepCommitted, step=last + steps, since=since)


def goes_on_until_interrupted(job: LocalJob, steps: int = 3) -> None:
    """Wait until a job has committed further steps; Ctrl-C then ends it cleanly."""
    goes_on(job, steps)
    assert job.process is not None
    job.process.send_signal(signal.SIGINT)
    assert job.wait_exit(30) == 130, job.story()


def calm_losses(*args: str, script: Path) -> list[float]:
    """Return the losses of an undisturbed run of a script in one process."""
    return calm_run(*args, script=script)["losses"]


def calm_run(*args: str, script: Path) -> dict[str, Any]:
    """Return the loss file of an undisturbed run of a script in one process, cached for all tests."""
    file = calm_folder / f"{'_'.join((script.stem, *args))}.json"
    with file.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # Another process of pytest may run the same script.
        if not file.exists():
            run_warm(zygote, script, *args, "--losses", str(file)).check_returncode()
    return json.loads(file.read_text())


def check_losses(job: LocalJob, *args: str, script: Path, least: int) -> None:
    """Check that at least `least` committed steps have the losses of an undisturbed run.

    After a rollback only the newest commit of a step counts. `check_journal` checks that no step is missing.
    """
    steps = committed_steps(read_events(job.events_file))
    assert len(steps) >= least, job.story()
    enough = 50 * math.ceil(steps[-1].step / 50)  # Most jobs can use the same 50 steps.
    calm = calm_losses("--steps", str(enough), *args, script=script)
    assert [step.loss for step in steps] == pytest.approx([calm[step.step - 1] for step in steps], rel=1e-9)


def alive(pid: int) -> bool:
    """Return whether a process runs and is not a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rsplit(")", 1)[1].split()[0] != "Z"


def wait_until(true: Callable[[], bool], deadline_s: float = 60.0) -> None:
    """Wait until a condition without an event is true."""
    limit = time.monotonic() + deadline_s
    while not true():
        assert time.monotonic() < limit
        time.sleep(0.01)


def loader_workers(job: LocalJob, node: str) -> list[tuple[int, list[str]]]:
    """Return the loader workers of a node's only worker: pids, and the targets of their descriptors above 2.

    The memory of parcels is left out.
    """
    (worker,) = job.pids(node)[1]
    found: list[tuple[int, list[str]]] = []
    for process in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if process.name.isdigit() and (process / "comm").read_text().strip() == f"loader-{worker}":
                beyond = [entry for entry in (process / "fd").iterdir() if int(entry.name) > 2]
                links = [os.readlink(entry) for entry in beyond]
                found.append((int(process.name), [link for link in links if "holdfast-parcel" not in link]))
    return found
