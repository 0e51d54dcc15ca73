"""Workers that join later take over layers that were frozen and unfrozen during training."""

from __future__ import annotations

from job_cases import TINY, StartJob, check_losses

from holdfast.protocol.events import GenerationStarted, StepCommitted

FREEZING = TINY.with_name("freezing.py")


def test_joining_workers_take_over_frozen_layers_and_added_parameter_groups(start_job: StartJob) -> None:
    """One worker joins while a layer is frozen, one after a parameter group was added; their scripts did neither."""
    job = start_job("--steps", "50", "--step-seconds", "0.2", nodes=2, options=("--verify-state", "1"), script=FREEZING)
    for step in (7, 17):
        job.wait(StepCommitted, step=step)
        since = len(job.events)
        job.inject("exit", job.nodes()[1], worker=0)
        job.wait(GenerationStarted, reason="join", since=since)
    assert job.wait_exit(120) == 0, job.story()
    check_losses(job, script=FREEZING, least=50)
