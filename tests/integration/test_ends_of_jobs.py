"""The ends of jobs: finished, interrupted, failed, or refused before the start."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import job_cases
from job_cases import FOREVER, TINY, StartJob, alive, goes_on_until_interrupted

from holdfast.protocol.events import (
    CheckpointRejected,
    CheckpointSaved,
    JobFailed,
    JobFinished,
    JobStarted,
    RolledBack,
    StepCommitted,
)


def test_ctrl_c_ends_all_processes_of_a_job(start_job: StartJob) -> None:
    memory = set(os.listdir("/dev/shm"))
    job = start_job(*FOREVER, "--step-seconds", "0.05")
    job.wait(StepCommitted, step=3)
    pids = [pid for node in job.nodes() for pid in (job.pids(node)[0], *job.pids(node)[1])]
    pids.append(job.wait(JobStarted).coordinator_pid)
    assert job.process is not None
    job.process.send_signal(signal.SIGINT)
    assert job.wait_exit() == 130
    assert [pid for pid in pids if alive(pid)] == []
    assert set(os.listdir("/dev/shm")) <= memory


def test_losing_all_copies_without_a_checkpoint_fails_the_job_with_an_alert(
    start_job: StartJob, tmp_path: Path
) -> None:
    alerts = tmp_path / "alerts"
    job = start_job(*FOREVER, "--step-seconds", "0.1", nodes=2, options=("--alert", f"tee -a {alerts}"))
    job.wait(StepCommitted, step=5)
    for node in job.nodes():
        job.signal_node(node)
    assert job.wait_exit() == 1
    assert "no live copy" in job.output()
    (failed,) = job.all(JobFailed)
    assert json.loads(alerts.read_text().splitlines()[-1])["about_seq"] == failed.seq


def test_a_job_that_lost_all_copies_rolls_back_past_a_damaged_checkpoint(start_job: StartJob, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    options = ("--checkpoint-dir", str(folder), "--checkpoint-every", "10")
    gate = tmp_path / "go"
    job = start_job("--steps", "32", "--gate", str(gate), "--gate-at", "15", "25", nodes=2, options=options)
    job.wait(CheckpointSaved, step=10)
    (tmp_path / "go-15").touch()  # A checkpoint that is due during another write is left out.
    job.wait(CheckpointSaved, step=20)
    newest = max(path for path in folder.iterdir() if path.name.startswith("step-"))
    victim = max((path for path in newest.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    os.truncate(victim, victim.stat().st_size // 2)
    since = len(job.events)
    for node in job.nodes():
        for worker in job.pids(node)[1]:
            os.kill(worker, signal.SIGKILL)
    rejected = job.wait(CheckpointRejected, since=since)
    assert rejected.name == newest.name
    job.wait(RolledBack, to_step=10, since=since)
    (tmp_path / "go-25").touch()
    assert job.wait_exit() == 0


def test_a_job_resumes_from_its_checkpoints(start_job: StartJob, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    options = ("--checkpoint-dir", str(folder), "--checkpoint-every", "10")
    first = start_job("--steps", "90", "--stop-at", "20", nodes=2, options=options)
    assert first.wait_exit() == 0
    (finished,) = first.all(JobFinished)
    assert (finished.reason, finished.why, finished.steps, finished.resumable) == ("stopped", "good enough", 20, False)
    again = start_job("--steps", "20", nodes=3, options=options)
    assert again.wait_exit() == 0
    assert again.all(RolledBack)[0].to_step == 20
    assert not again.all(StepCommitted)


def run(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(cwd), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "holdfast", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=90, cwd=cwd, env=environment)


def test_bad_input_to_the_script_is_reported_without_a_traceback(tmp_path: Path) -> None:
    """tests/cli has the inputs that the command line itself refuses."""
    bad = ("--global-batch", "10", "--micro-batch", "4")
    done = run("run", "--nodes", "2", "--zygote", job_cases.zygote, str(TINY), *bad, cwd=tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "global_batch is 10 and micro_batch is 4: " in done.stderr + done.stdout
    assert "Traceback" not in done.stderr + done.stdout


def test_a_worker_with_a_different_configuration_is_refused_and_the_job_continues(start_job: StartJob) -> None:
    job = start_job(*FOREVER, "--step-seconds", "0.1", nodes=2)
    job.wait(StepCommitted, step=3)
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(job.folder.parent), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "holdfast", "agent", "--address", job.url, "--node-name", "other"]
    command += ["--", str(TINY), "--steps", "81"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "differ" in done.stderr
    goes_on_until_interrupted(job)
    assert {e.world_size for e in job.all(StepCommitted)} == {2}
