"""A NaN loss is reported at the first skipped step and ends the job after too many skipped steps."""

from __future__ import annotations

from pathlib import Path

from job_cases import StartJob

from holdfast.protocol.events import ActionRequested, CheckpointSaved, JobFailed, RolledBack, StepCommitted, StepSkipped

SCRIPT = Path(__file__).parent / "scripts" / "nan.py"


def test_repeated_nan_losses_fail_the_job_with_its_last_good_step_saved(start_job: StartJob, tmp_path: Path) -> None:
    """The same command with valid data then continues from that step."""
    options = ("--checkpoint-dir", str(tmp_path / "kept"), "--max-skipped-steps", "4")
    job = start_job("--nan-from", "12", nodes=2, options=options, script=SCRIPT)
    assert job.wait_exit(60) == 1, job.story()
    assert [event.in_a_row for event in job.all(StepSkipped)] == [1, 2, 3, 4]
    assert "step_skipped" in [event.about for event in job.all(ActionRequested)]
    assert "4 steps in a row were skipped" in job.all(JobFailed)[0].why
    assert "the last good step is 11" in job.all(JobFailed)[0].why
    assert job.all(CheckpointSaved)[-1].step == 11, job.story()
    again = start_job("--steps", "16", nodes=2, options=options, script=SCRIPT)
    assert again.wait_exit() == 0, again.story()
    assert again.all(RolledBack)[0].to_step == 11
    assert [event.step for event in again.all(StepCommitted)] == [12, 13, 14, 15, 16]
    assert not again.all(StepSkipped)
