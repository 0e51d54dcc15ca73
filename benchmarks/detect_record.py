"""Record how long the workers of a real job spend in each activity, by reading their progress pages.

python benchmarks/detect.py --record
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from recovery import DENSE, DENSE_ARGS

from holdfast.protocol.events import StepCommitted
from holdfast.protocol.messages.progress import Activity
from tests.harness.local_job import LocalJob

RECORDED = Path(__file__).with_name("recorded_times.json")
NODES, STEPS = 4, 120
#: Seconds between two readings of a page. Short activities are seen often enough, as a reading takes microseconds.
_LOOK_S = 5e-4
#: Head of a slot: number, generation, step, since, pid, world, micro-batch, activity (see control.link.progress_page).
_HEAD = struct.Struct("<QQQdIIiI")
#: Number of durations kept per activity.
_KEPT = 600


def _page_of(agent: int) -> mmap.mmap:
    """Return the progress page of an agent on this machine."""
    for entry in Path(f"/proc/{agent}/fd").iterdir():
        if "holdfast-progress" in os.readlink(entry):
            opened = os.open(entry, os.O_RDONLY)
            try:
                return mmap.mmap(opened, 0, prot=mmap.PROT_READ)
            finally:
                os.close(opened)
    raise FileNotFoundError(f"agent {agent} has no page")


def wait_for_step_start(step: int, agent: int) -> float:
    """Wait until the worker of an agent begins a step; return that time in Unix seconds."""
    page = _page_of(agent)
    while True:
        _, _, now, since, *_ = _HEAD.unpack_from(page)
        if now >= step:
            return time.time() - (time.monotonic() - since)
        time.sleep(_LOOK_S)


class _ActivityRecorder:
    """Reads the progress page of one worker, and records each activity that it observed from start to end."""

    def __init__(self, page: mmap.mmap) -> None:
        self.durations: dict[str, list[float]] = {}
        self._page = page
        self._last: tuple[int, float, Activity] | None = None

    def read(self) -> None:
        number, _, _, since, _, _, _, code = _HEAD.unpack_from(self._page)
        if self._last is not None and self._last[0] == number:
            return
        # A reading during a write may see the new number with the old time.
        if self._last is not None and number == self._last[0] + 1 and since >= self._last[1]:
            self.durations.setdefault(str(self._last[2]), []).append(since - self._last[1])
        self._last = number, since, Activity(code)


def load_recording(path: Path = RECORDED) -> dict[str, Any]:
    """Return the recording of a real job: `times` by activity, and a description of the job."""
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def record_job(path: Path, args: Sequence[str] = DENSE_ARGS) -> None:
    """Record a job on this machine."""
    options = ("--nodes", str(NODES), "--checkpoint-every", "10", "--checkpoint-dir")
    with (
        tempfile.TemporaryDirectory(prefix="holdfast-") as checkpoints,
        LocalJob(DENSE, args, options=(*options, checkpoints)) as job,
    ):
        job.wait(StepCommitted, step=20)
        eyes = [_ActivityRecorder(_page_of(job.pids(node)[0])) for node in job.nodes()]
        while job.all(StepCommitted)[-1].step < 20 + STEPS:
            for eye in eyes:
                eye.read()
            time.sleep(_LOOK_S)
        step_s = sorted(event.step_s for event in job.all(StepCommitted)[20:])
    times: dict[str, list[float]] = {}
    for eye in eyes:
        for name, values in eye.durations.items():
            times.setdefault(name, []).extend(values)
    # Reductions include the wait for other workers. Only the shortest show how long one takes once all have arrived.
    times["reducing"] = sorted(times["reducing"])[: len(times["reducing"]) // NODES]
    times["voted"] = sorted(times["voted"])[: len(times["voted"]) // NODES]
    times["paused"] = [20 * value for value in step_s]
    each = round(len(times["compute"]) / max(1, len(times["applying"])))
    rounded = {name: [round(value, 6) for value in values[:_KEPT]] for name, values in sorted(times.items())}
    what = f"the recovery benchmark's dense job, {NODES} nodes, {os.cpu_count()} cores, {STEPS} steps"
    path.write_text(json.dumps({"what": what, "micro_batches": each, "times": rounded}))
    print(
        f"{path}: {', '.join(f'{len(values)} x {name}' for name, values in rounded.items())}; median step "
        f"{step_s[len(step_s) // 2] * 1e3:.0f} ms"
    )
