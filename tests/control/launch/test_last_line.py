"""The last line of an interrupted job states the current content of its checkpoint directory."""

from __future__ import annotations

import shutil
from pathlib import Path

from holdfast.control.launch.job_view import JobProgress
from holdfast.protocol.checkpoints.directory import seal, write_file
from holdfast.protocol.checkpoints.names import CheckpointName
from holdfast.protocol.events import StepCommitted
from holdfast.protocol.record import KnownCheckpoint
from holdfast.storage import storage_at
from made_events import made


def name_of(step: int) -> CheckpointName:
    return CheckpointName(step=step, term=1, generation=1)


def save(folder: Path, step: int) -> None:
    storage, name = storage_at(str(folder)), name_of(step)
    seal(storage, name, [write_file(storage, name.folder, "part", [b"12345"])])


def standing_after(steps: int, saved: int = 0) -> JobProgress:
    """Return the standing after this many steps, with one reported checkpoint."""
    known = KnownCheckpoint(step=saved, name=name_of(saved).folder, term=1, generation=1)
    standing = JobProgress([known] if saved else [])
    event = StepCommitted(
        time=0.0, job="j", term=1, generation=1, step=steps, loss=None, samples=1, world_size=1, step_s=0.1
    )
    standing.on_event(event)
    return standing


def test_the_last_line_reports_the_saved_step_and_lost_steps(tmp_path: Path) -> None:
    assert standing_after(5).describe(str(tmp_path / "none")) == "nothing is saved: 5 steps are lost"
    assert JobProgress([]).describe(str(tmp_path)) == "no step was done yet"
    save(tmp_path, 3)
    save(tmp_path, 5)
    assert standing_after(5, 5).describe(str(tmp_path)) == "step 5 is saved: the same command goes on from there"
    assert standing_after(7, 5).describe(str(tmp_path)).endswith("from there; 2 later steps are lost")


def test_the_last_line_reports_a_missing_or_truncated_checkpoint(tmp_path: Path) -> None:
    save(tmp_path, 3)
    save(tmp_path, 5)
    (tmp_path / name_of(5).folder / "part").write_bytes(b"12")
    line = standing_after(5, 5).describe(str(tmp_path))
    assert line == (
        f"step 5 was saved, and is in {tmp_path} no more; "
        "step 3 is saved: the same command goes on from there; 2 later steps are lost"
    )
    shutil.rmtree(tmp_path)
    assert standing_after(5, 5).describe(str(tmp_path)).endswith("no more; nothing is saved: 5 steps are lost")


def test_the_last_line_reports_an_unreadable_checkpoint_directory() -> None:
    line = standing_after(5, 5).describe("nonsense://there/checkpoints")
    assert line.startswith("step 5 was saved; what is there now cannot be seen in nonsense://there/checkpoints: ")


def test_progress_tracks_whether_the_job_has_ended() -> None:
    """An agent that ends with its failed job, after being a standby, must not be reported as ended before it joined."""
    standing = JobProgress([])
    states: list[bool] = []
    for kind in ("job_started", "job_failed", "coordinator_restarted", "step_committed", "job_finished"):
        standing.on_event(made(kind))
        states.append(standing.over)
    assert states == [False, True, False, False, True]
