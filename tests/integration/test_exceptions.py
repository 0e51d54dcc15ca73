"""Exceptions of scripts: on one node the process restarts; on every node the job ends with its state saved."""

from __future__ import annotations

from pathlib import Path

import pytest
from job_cases import FOREVER, TINY, StartJob, goes_on_until_interrupted

from holdfast.protocol.events import (
    CheckpointSaved,
    FailureDetected,
    GenerationStarted,
    JobFailed,
    NodeLeft,
    RolledBack,
    StepCommitted,
    WorkersChanged,
)
from tests.harness.local_job import LocalJob

RAISING = TINY.with_name("raising.py")
SLOWLY = (*FOREVER, "--step-seconds", "0.06")


def saving(folder: Path) -> tuple[str, ...]:
    return ("--checkpoint-dir", str(folder / "kept"), "--checkpoint-every", "1000")


def check_ended(job: LocalJob) -> JobFailed:
    """Check that the job ended soon after the first exception, saved its state and blamed no node."""
    assert job.wait_exit(60) == 1, job.story()
    (failed,) = job.all(JobFailed)
    assert failed.time - job.all(FailureDetected)[0].time < 5.0, job.story()
    assert job.all(CheckpointSaved)[-1].step == job.all(StepCommitted)[-1].step, job.story()
    assert {event.reason for event in job.all(NodeLeft)} <= {"failed"}, job.story()
    assert not job.all(RolledBack)
    return failed


def test_a_sample_that_always_raises_ends_the_job(start_job: StartJob, tmp_path: Path) -> None:
    job = start_job(*SLOWLY, "--where", "load", "--at", "500", options=saving(tmp_path), script=RAISING)
    failed = check_ended(job)
    first, second = job.all(FailureDetected)
    assert (first.step, first.micro_batch) == (second.step, second.micro_batch)
    assert first.step == job.all(StepCommitted)[-1].step + 1
    assert (first.category, first.phase, first.severity) == ("software_error", "compute", 2)
    where = f"step {first.step}, micro-batch {first.micro_batch}: ValueError: bad load 500 (raising.py, line "
    assert failed.why.startswith(where), failed.why
    assert failed.why.endswith(f"(on nodes {first.node}, {second.node})")
    assert failed.traceback.startswith("Traceback (most recent call last):\n")
    assert failed.traceback.endswith("ValueError: bad load 500\n")
    assert failed.why in job.output()


@pytest.mark.parametrize(
    ("where", "expected"),
    [("interrupt", "KeyboardInterrupt (raising.py"), ("exit", "sys.exit(7) (r")],
)
def test_a_job_saves_its_state_before_it_fails_if_all_ranks_raise(
    start_job: StartJob, tmp_path: Path, where: str, expected: str
) -> None:
    job = start_job(*SLOWLY, "--where", where, "--at", "7", nodes=2, options=saving(tmp_path), script=RAISING)
    failed = check_ended(job)
    assert expected in failed.why
    assert job.all(StepCommitted)[-1].step == 6


def test_an_exception_on_one_node_restarts_its_process_and_the_others_continue(
    start_job: StartJob, tmp_path: Path
) -> None:
    once = tmp_path / "once"
    once.touch()
    job = start_job(*SLOWLY, "--where", "loop", "--at", "5", "--once", str(once), script=RAISING)
    failure = job.wait(FailureDetected)
    assert (failure.kind, failure.step, failure.micro_batch) == ("exception", 5, None)
    since = job.events.index(failure)
    assert job.wait(GenerationStarted, since=since).world_size == 2
    job.wait(WorkersChanged, node=failure.node, since=since)
    job.wait(GenerationStarted, reason="join", world_size=3, since=since)
    goes_on_until_interrupted(job)
    assert len(job.all(FailureDetected)) == 1
    assert not job.all(RolledBack)


def test_the_only_worker_saves_its_state_and_is_restarted_after_an_exception(
    start_job: StartJob, tmp_path: Path
) -> None:
    """No other node has its state. The work is blamed for the second failure, because no other node exists."""
    job = start_job(*SLOWLY, "--where", "compute", "--at", "5", nodes=1, options=saving(tmp_path), script=RAISING)
    assert job.wait_exit(60) == 1, job.story()
    assert [event.step for event in job.all(CheckpointSaved)] == [4], job.story()
    assert [event.to_step for event in job.all(RolledBack)] == [4], job.story()
    assert len(job.all(FailureDetected)) == 2
    assert "bad compute 5" in job.all(JobFailed)[0].why


@pytest.mark.parametrize(
    ("where", "expected"),
    [("before", "ValueError: bad before 0 (raising.py, line "), ("done", "the script ended before its first step")],
)
def test_a_script_that_ends_before_its_loop_on_all_nodes_fails_the_job(
    start_job: StartJob, where: str, expected: str
) -> None:
    job = start_job(*FOREVER, "--where", where, script=RAISING)
    assert job.wait_exit(60) == 1, job.story()
    assert expected in job.all(JobFailed)[0].why
    assert not [event for event in job.all(NodeLeft) if event.reason == "quarantined"]
