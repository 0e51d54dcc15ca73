"""Ctrl-C and SIGTERM with a checkpoint directory: the state is saved, and the same command continues the job."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from job_cases import FOREVER, TINY, TINY_MOE, StartJob, alive, check_journal

from holdfast.observability.history.audit import audit_lines
from holdfast.protocol.events import CheckpointSaved, JobFinished, RolledBack, StepCommitted
from tests.harness.local_job import LocalJob


@pytest.mark.parametrize(
    ("number", "code", "options"),
    [(signal.SIGINT, 130, ()), (signal.SIGTERM, 75, ("--on-node-failure", "restart-all"))],
)
def test_an_interrupted_job_saves_its_last_step_and_resumes_from_it(
    start_job: StartJob, tmp_path: Path, number: int, code: int, options: tuple[str, ...]
) -> None:
    folder = tmp_path / "checkpoints"
    options = (*options, "--checkpoint-dir", str(folder), "--checkpoint-every", "1000")
    first = start_job(*FOREVER, "--step-seconds", "0.05", nodes=2, options=options)
    first.wait(StepCommitted, step=5)
    pids = [pid for node in first.nodes() for pid in (first.pids(node)[0], *first.pids(node)[1])]
    assert first.process is not None
    first.process.send_signal(number)
    assert first.wait_exit(60) == code, first.story()
    assert [pid for pid in pids if alive(pid)] == []
    check_journal(first)
    step = first.all(StepCommitted)[-1].step
    assert [event.step for event in first.all(CheckpointSaved)] == [step], first.story()
    assert f"step {step} is saved: the same command goes on from there" in first.output()
    (finished,) = first.all(JobFinished)
    why = f"ended by {signal.Signals(number).name}"
    assert (finished.reason, finished.why, finished.resumable, finished.steps) == ("stopped", why, True, step)

    again = start_job(*FOREVER, nodes=2, options=options)
    assert again.wait(RolledBack).to_step == step
    assert again.wait(StepCommitted).step == step + 1
    assert again.process is not None
    again.process.send_signal(number)
    again.process.send_signal(number)
    assert again.wait_exit(30) == code, again.story()


def test_a_stopped_moe_job_saves_its_experts_and_resumes(start_job: StartJob, tmp_path: Path) -> None:
    options = ("--checkpoint-dir", str(tmp_path / "checkpoints"), "--checkpoint-every", "1000")
    first = start_job(*FOREVER, "--step-seconds", "0.4", nodes=2, options=options, script=TINY_MOE)
    first.wait(StepCommitted, step=5)
    with first.client() as client:
        client.checkpoint()
    asked = first.wait(CheckpointSaved).step
    first.wait(StepCommitted, step=asked + 1)
    answer = first.call("stop")
    assert first.wait_exit(60) == 75, first.story()
    step = first.all(StepCommitted)[-1].step
    assert f"stopped (holdfast stop): {step} steps" in answer
    assert f"step {step} is saved" in answer
    assert [event.step for event in first.all(CheckpointSaved)] == [asked, step], first.story()
    again = start_job("--steps", str(step + 3), nodes=3, options=options, script=TINY_MOE)
    assert again.wait_exit() == 0, again.story()
    assert [event.step for event in again.all(StepCommitted)] == [step + 1, step + 2, step + 3]


def test_a_command_resumes_its_job_and_events_file_after_ctrl_c_or_sigkill(start_job: StartJob, tmp_path: Path) -> None:
    """The job survives Ctrl-C and `kill -9` of the command; a second command at the same time is refused."""
    options = ("--checkpoint-dir", str(tmp_path / "ck"), "--checkpoint-every", "2")
    job = start_job(*FOREVER, "--step-seconds", "0.05", nodes=2, options=options)
    job.wait(StepCommitted, step=5)
    assert job.process is not None
    job.process.send_signal(signal.SIGINT)
    assert job.wait_exit(60) == 130, job.story()
    saved = job.all(CheckpointSaved)[-1].step

    def again(*args: str) -> LocalJob:
        more = LocalJob(TINY, args, options=("--nodes", "2", *options), folder=job.folder, environment=job.environment)
        started.append(more.__enter__())
        return more

    started: list[LocalJob] = []
    try:
        second = again(*FOREVER, "--step-seconds", "0.05")
        assert second.wait(RolledBack).to_step == saved
        second.wait(StepCommitted, step=saved + 4)
        third = again(*FOREVER)
        assert third.wait_exit(60) == 2, third.story()
        assert f"is used by job '{TINY.stem}'" in third.output()
        second.wait(StepCommitted, step=saved + 8)
        assert second.process is not None
        second.process.kill()
        second.wait_exit(30)
        before = len(second.output())
        last = again("--steps", str(saved + 20))
        assert last.wait_exit(120) == 0, last.story()
        shown = last.output()[before:]
        assert "the job resumes from its checkpoint" in shown
        assert "no live copy" not in shown
        assert "holdfast scale" not in shown
        assert shown.count("joined, workers") <= 2, "events of an earlier run were printed"
    finally:
        for one in started:
            one.__exit__(None, None, None)
    assert audit_lines(job.events_file.read_bytes().splitlines(keepends=True)).sound
