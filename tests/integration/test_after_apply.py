"""`protect(after_apply=...)`: the script's hook in each step, and jobs in which it raises."""

from __future__ import annotations

from pathlib import Path

from job_cases import FOREVER, TINY_MOE, StartJob

from holdfast.protocol.events import (
    CheckpointSaved,
    FailureDetected,
    JobFailed,
    RolledBack,
    StepCommitted,
    WorkersChanged,
)
from tests.harness.local_job import LocalJob

RAISING = ("--raise-at", "5")


def check_saved(job: LocalJob, step: int) -> None:
    """Check that the job failed once with the script's exception and saved the step, without a retry."""
    assert job.wait_exit(60) == 1, job.story()
    (failed,) = job.all(JobFailed)
    assert f"after_apply raised at step {step} on node-" in failed.why
    assert "ZeroDivisionError: of the script (" in failed.why
    assert "averaging.py:" in failed.why
    assert job.output().splitlines()[-2].count("of the script") == 1, job.output()
    assert job.all(StepCommitted)[-1].step == step
    assert job.all(CheckpointSaved)[-1].step == step, job.story()
    assert not [event for event in job.events if isinstance(event, WorkersChanged | RolledBack)], job.story()


def saving(folder: Path) -> tuple[str, ...]:
    return ("--checkpoint-dir", str(folder / "kept"), "--checkpoint-every", "1000")


def test_an_after_apply_error_on_one_rank_saves_the_step_and_fails_the_job(start_job: StartJob, tmp_path: Path) -> None:
    """The experts that only this rank holds are also saved."""
    options = saving(tmp_path)
    job = start_job(*FOREVER, *RAISING, "--raise-on", "1", nodes=2, options=options, script=TINY_MOE)
    check_saved(job, 5)
    assert not job.all(FailureDetected)
    again = start_job("--steps", "6", nodes=2, options=options, script=TINY_MOE)
    assert again.wait_exit() == 0, again.story()
    assert again.all(RolledBack)[0].to_step == 5
    assert [event.step for event in again.all(StepCommitted)] == [6]


def test_an_after_apply_error_on_all_survivors_saves_the_step_and_fails_the_job(
    start_job: StartJob, tmp_path: Path
) -> None:
    """A node dies after all survivors have passed step 5 and before they apply it; each survivor applies it."""
    gate = tmp_path / "go"
    job = start_job(*FOREVER, *RAISING, "--gate", str(gate), options=saving(tmp_path))
    job.wait(StepCommitted, step=4)
    victim, *survivors = job.nodes()
    for survivor in survivors:
        job.inject("hold", survivor, step=5, phase="passed")
    job.inject("kill", victim, step=5, phase="passed")
    job.wait_output("will strike at step 5, passed", times=3)
    (tmp_path / "go-5").touch()
    check_saved(job, 5)
    assert [event.node for event in job.all(FailureDetected)] == [victim], job.story()
