"""Measure snapshots to memory, a checkpoint, and the transfer of the whole state to a joining worker."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

from benchmarks.gpu_check.checks.jobs import SHARED_GPU, make_job, median_step_s
from benchmarks.gpu_check.options import Figures, Options, require
from holdfast.protocol.events import CheckpointSaved, GenerationStarted, Recovered, SnapshotSaved, StepCommitted

SHARED_MEMORY = Path("/dev/shm")
#: Free memory that snapshots need, as a multiple of the state: the old one, the new one, and some reserve.

ROOM = 3
_BYTES_PER_PARAMETER = 12  # float32, and AdamW's two moments


def run(options: Options, figures: Figures) -> None:
    """Save the state of one worker, then send it to a second one."""
    layers, dim, context, steps = (2, 64, 32, 12) if options.device == "cpu" else (12, 2048, 128, 40)
    if options.device == "cuda" and options.quick:
        layers, dim = 6, 1024
    nbytes = 12 * layers * dim**2 * _BYTES_PER_PARAMETER
    in_memory = _free(SHARED_MEMORY) > ROOM * nbytes
    folder = SHARED_MEMORY if in_memory else options.folder
    figures["state_gb"], figures["snapshots_in"] = nbytes / 1e9, str(SHARED_MEMORY) if in_memory else "a folder on disk"
    sizes = ("--layers", str(layers), "--dim", str(dim), "--heads", str(dim // 64), "--context", str(context))
    batches = ("--global-batch", "8", "--micro-batch", "4")
    command = (
        *("--nodes", "1", *SHARED_GPU, "--snapshot-every", "10", "--snapshot-dir", str(folder)),
        *("--checkpoint-dir", str(options.folder / "checkpoints"), "--checkpoint-every", str(steps)),
    )
    with make_job(options, "saved", (*sizes, *batches, "--steps", "1000000"), command=command) as job:
        snapshots = [job.wait(SnapshotSaved, timeout=90.0)]
        job.wait(SnapshotSaved, lambda event: event.step > snapshots[0].step, timeout=60.0)
        snapshots = job.all(SnapshotSaved)
        figures["snapshot"] = [saved_figures(event, nbytes) for event in snapshots[:3]]
        figures["step_s"] = median_step_s(job)
        figures["slowest_step_s"] = max(event.step_s for event in job.all(StepCommitted) if event.step > 1)
        figures["checkpoint"] = saved_figures(job.wait(CheckpointSaved, timeout=90.0), nbytes)
        since, asked = len(job.events), time.time()
        job.add_nodes(1)
        grown = job.wait(GenerationStarted, lambda event: event.world_size == 2, since=since, timeout=90.0)
        first = job.wait(StepCommitted, lambda event: event.world_size == 2, since=since, timeout=60.0)
        figures["joined"] = {"after_s": grown.time - asked, "first_step_s": first.step_s}
        moved = job.wait(Recovered, since=since, timeout=60.0)
        figures["transfer"] = {
            "gb": moved.moved_bytes / 1e9,
            "s": moved.transfer_s,
            "gb_per_s": moved.moved_bytes / 1e9 / max(moved.transfer_s, 1e-9),
        }
        require(moved.moved_bytes >= nbytes, f"{moved.moved_bytes} bytes were sent, but the state has {nbytes}")


def saved_figures(event: SnapshotSaved | CheckpointSaved, nbytes: int) -> dict[str, float]:
    """Return the figures of an event; raise `CheckFailedError` if it has saved less than the state."""
    require(event.saved_bytes >= nbytes, f"step {event.step}: {event.saved_bytes} of {nbytes} bytes are saved")
    return {
        "gb": event.saved_bytes / 1e9,
        "save_s": event.save_s,
        "apply_waits_s": event.stall_s,
        "gb_per_s": event.saved_bytes / 1e9 / max(event.save_s, 1e-9),
    }


def _free(folder: Path) -> int:
    return shutil.disk_usage(folder).free if folder.is_dir() else 0
