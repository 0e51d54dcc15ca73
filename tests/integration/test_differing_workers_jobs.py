"""Scripts that make workers differ: the next step detects it, and the report names the script as the cause."""

from __future__ import annotations

from job_cases import TINY, StartJob

from holdfast.protocol.events import CorruptionFound, FailureDetected, NodeLeft, StepCommitted

LEFTOVER = TINY.with_name("leftover.py")


def test_a_learning_rate_that_differs_on_every_worker_fails_the_job(start_job: StartJob) -> None:
    job = start_job("random", script=LEFTOVER)
    assert job.wait_exit(60) == 1, job.story()
    (found,) = job.all(CorruptionFound)
    assert (found.step, found.what, found.likely_cause) == (2, "settings", "script")
    assert "no majority of them agrees (lr 0." in found.detail
    assert "the likely cause is the script" in job.output()
    assert [step.step for step in job.all(StepCommitted)] == [1]


def test_an_optimizer_that_counts_outside_its_state_is_detected_after_a_join(start_job: StartJob) -> None:
    """The worker that joins is replaced once, and then the job ends: no healthy node is quarantined."""
    job = start_job("counts", script=LEFTOVER)
    job.wait(StepCommitted, step=3)
    job.inject("exit", job.nodes()[1], worker=0)
    assert job.wait_exit(90) == 1, job.story()
    assert [(found.what, found.likely_cause) for found in job.all(CorruptionFound)] == [("settings", "script")] * 2
    differing = [failed for failed in job.all(FailureDetected) if failed.category == "replica_differs"]
    assert len(differing) == 1
    assert "(lr 0.0" in differing[0].detail
    assert "quarantined" not in [left.reason for left in job.all(NodeLeft)]
    assert "(2 times in 300 s)" in job.output()
