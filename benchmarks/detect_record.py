"""Records how long a real job's workers are about what: from their pages of progress, which this process only reads.

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
#: what is short now and then is seen all the same: a look takes microseconds
_LOOK_S = 5e-4
#: the head of a slot: number, generation, step, since, pid, world, micro-batch, activity (control.link.progress_page)
_HEAD = struct.Struct("<QQQdIIiI")
#: of each activity so many durations are kept
_KEPT = 600


def _page_of(agent: int) -> mmap.mmap:
    """Return the page of an agent of ours."""
    for entry in Path(f"/proc/{agent}/fd").iterdir():
        if "holdfast-progress" in os.readlink(entry):
            opened = os.open(entry, os.O_RDONLY)
            try:
                return mmap.mmap(opened, 0, prot=mmap.PROT_READ)
            finally:
                os.close(opened)
    raise FileNotFoundError(f"agent {agent} has no page")


def begin_of(step: int, agent: int) -> float:
    """Wait until the worker of an agent begins a step; return when that was, in unix seconds."""
    page = _page_of(agent)
    while True:
        _, _, now, since, *_ = _HEAD.unpack_from(page)
        if now >= step:
            return time.time() - (time.monotonic() - since)
        time.sleep(_LOOK_S)


class _Eye:
    """Looks at one worker, and notes how long each activity has taken that it saw from begin to end."""

    def __init__(self, page: mmap.mmap) -> None:
        self.durations: dict[str, list[float]] = {}
        self._page = page
        self._last: tuple[int, float, Activity] | None = None

    def look(self) -> None:
        number, _, _, since, _, _, _, code = _HEAD.unpack_from(self._page)
        if self._last is not None and self._last[0] == number:
            return
        # (a look in the middle of a store may see a number without its time)
        if self._last is not None and number == self._last[0] + 1 and since >= self._last[1]:
            self.durations.setdefault(str(self._last[2]), []).append(since - self._last[1])
        self._last = number, since, Activity(code)


def recorded(path: Path = RECORDED) -> dict[str, Any]:
    """Return what was recorded of a real job: `times` by activity, and what it was."""
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def record(path: Path, args: Sequence[str] = DENSE_ARGS) -> None:
    """Record a job on this machine."""
    options = ("--nodes", str(NODES), "--checkpoint-every", "10", "--checkpoint-dir")
    with (
        tempfile.TemporaryDirectory(prefix="holdfast-") as checkpoints,
        LocalJob(DENSE, args, options=(*options, checkpoints)) as job,
    ):
        job.wait(StepCommitted, step=20)
        eyes = [_Eye(_page_of(job.pids(node)[0])) for node in job.nodes()]
        while job.all(StepCommitted)[-1].step < 20 + STEPS:
            for eye in eyes:
                eye.look()
            time.sleep(_LOOK_S)
        step_s = sorted(event.step_s for event in job.all(StepCommitted)[20:])
    times: dict[str, list[float]] = {}
    for eye in eyes:
        for name, values in eye.durations.items():
            times.setdefault(name, []).extend(values)
    # What waits for others is theirs, too: of a reduction only the shortest says how long it takes once all are there.
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
