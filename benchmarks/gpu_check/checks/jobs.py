"""Start the jobs of a check, and read losses and times from their events."""

from __future__ import annotations

import math
import os
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO

from benchmarks.gpu_check.options import CheckFailedError, Device, Options, require
from holdfast.control.processes import die_with_parent
from holdfast.protocol.events import Recovered, StepCommitted
from tests.harness.local_job import LocalJob

ROOT = Path(__file__).resolve().parent.parent.parent.parent
DENSE = ROOT / "examples" / "dense_gpt.py"
#: Steps at the beginning whose times do not count: memory is allocated, kernels are chosen.
WARM_STEPS = 5
#: All workers of a check share one GPU.
SHARED_GPU = ("--set", "backend=gloo")


class CheckJob(LocalJob):
    """A job that ends with the process of the check, even if that is killed."""

    def started(self, output: IO[bytes]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            self.command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=self.environment,
            start_new_session=True,
            preexec_fn=partial(die_with_parent, os.getpid()),
        )


def make_job(
    options: Options,
    name: str,
    arguments: Sequence[str],
    *,
    command: Sequence[str],
    script: Path = DENSE,
    device: Device | None = None,
) -> CheckJob:
    """Return a job with its own folder, as a context manager that starts it.

    Args:
        command: options of `holdfast run`.
        arguments: arguments of the script.
        device: overrides the device of the check.
    """
    folder = options.folder / name
    folder.mkdir(parents=True)
    environment = {"CUDA_VISIBLE_DEVICES": ""} if (device or options.device) == "cpu" else {}
    return CheckJob(script, arguments, options=command, folder=folder, environment=environment)


def finish(job: CheckJob, timeout_s: float) -> None:
    """Wait for the end of a job.

    Raises:
        CheckFailedError: its exit code is not 0. The end of its output is printed.
    """
    code = job.wait_exit(timeout_s)
    if code != 0:
        print(job.story(), flush=True)
        raise CheckFailedError(f"the job {job.folder.name} ended with exit code {code}")


def losses_of(job: CheckJob) -> dict[int, float]:
    """Return the loss of each committed step."""
    return {event.step: event.loss for event in job.all(StepCommitted) if event.loss is not None}


def median_step_s(job: CheckJob, *, first: int = WARM_STEPS, last: int | None = None) -> float:
    """Return the median time of the steps after `first`, up to `last`."""
    times = [
        event.step_s for event in job.all(StepCommitted) if event.step > first and (last is None or event.step <= last)
    ]
    if not times:
        raise CheckFailedError(f"the job {job.folder.name} has no steps after {first}")
    return statistics.median(times)


def largest_difference(losses: Mapping[int, float], wanted: Mapping[int, float]) -> float:
    """Return the largest relative difference of two runs' losses.

    Raises:
        CheckFailedError: they do not have the same steps, or a loss is not a finite number.
    """
    if losses.keys() != wanted.keys() or not losses:
        raise CheckFailedError(f"steps {sorted(losses)} and {sorted(wanted)} cannot be compared")
    for step in losses:  # max() passes over NaN
        require(math.isfinite(losses[step]), f"the loss of step {step} is {losses[step]}")
        require(math.isfinite(wanted[step]), f"the loss of step {step} to compare with is {wanted[step]}")
    return max(abs(loss - wanted[step]) / abs(wanted[step]) for step, loss in losses.items())


def recovery_figures(recovered: Recovered) -> dict[str, float | str]:
    """Return the times of a recovery."""
    return {
        "action": recovered.action,
        "state_source": recovered.state_source,
        "down_s": recovered.down_s,
        "detect_s": recovered.detect_s,
        "decide_s": recovered.decide_s,
        "regroup_s": recovered.regroup_s,
        "transfer_s": recovered.transfer_s,
        "redo_s": recovered.redo_s,
        "moved_gb": recovered.moved_bytes / 1e9,
    }
