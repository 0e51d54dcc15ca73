"""Ctrl-C and SIGTERM where there is a checkpoint directory: what was trained is saved, and the same command goes on."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from job_cases import FOREVER, TINY_MOE, StartJob, alive, check_journal

from holdfast.protocol.events import CheckpointSaved, JobFinished, RolledBack, StepCommitted


@pytest.mark.parametrize(
    ("number", "code", "options"),
    [(signal.SIGINT, 130, ()), (signal.SIGTERM, 75, ("--on-node-failure", "restart-all"))],
)
def test_an_interrupted_job_goes_on_where_it_was(
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


def test_experts_are_saved_too(start_job: StartJob, tmp_path: Path) -> None:
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
