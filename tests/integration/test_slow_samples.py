"""A slow sample is not a hang: no node is quarantined for it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from job_cases import StartJob

from holdfast.protocol.events import FailureDetected, JobFinished, NodeLeft

SCRIPT = Path(__file__).parent / "scripts" / "slow_sample.py"


def test_a_slow_sample_restarts_a_process_but_quarantines_no_node(start_job: StartJob) -> None:
    """In the reproducer slow_sample.py each epoch killed a process, and after six a healthy node was quarantined.

    Without restarts the first counted kill removes a node. The survivor is alone while it loads the sample.
    """
    job = start_job(nodes=2, script=SCRIPT, options=("--max-restarts", "0"))
    job.wait(JobFinished)
    failures = job.all(FailureDetected)
    places = Counter((failure.step, failure.micro_batch) for failure in failures)
    assert all(count == 1 for count in places.values()), job.story()
    assert len(failures) < 3, job.story()
    assert not [event for event in job.all(NodeLeft) if event.reason == "quarantined"], job.story()
    slow = [failure for failure in failures if failure.phase == "compute"]
    assert slow, job.story()
    assert "num_workers" in slow[0].detail
    assert "job.pause" in slow[0].detail
