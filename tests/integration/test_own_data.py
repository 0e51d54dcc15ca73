"""Unseeded random data differ between nodes, so the job is refused before its first step."""

from __future__ import annotations

from pathlib import Path

from job_cases import StartJob

from holdfast.protocol.events import JobFailed, StepCommitted

SCRIPT = Path(__file__).parent / "scripts" / "own_data.py"


def test_nodes_with_different_unseeded_data_are_refused_with_a_remedy(start_job: StartJob) -> None:
    """This also holds on one machine with all workers forked from one process."""
    job = start_job(nodes=2, script=SCRIPT)
    assert job.wait_exit(60) == 2, job.story()
    (failed,) = job.all(JobFailed)
    assert "worker 0 of node-0" in failed.why
    assert "worker 0 of node-1" in failed.why
    assert "torch.manual_seed" in failed.why
    assert not job.all(StepCommitted)
    seeded = start_job("--seed", "1", nodes=2, script=SCRIPT)
    assert seeded.wait_exit(60) == 0, seeded.story()
    assert len(seeded.all(StepCommitted)) == 6
