"""Training continues without the coordinator, and failures meanwhile are handled later."""

from __future__ import annotations

import os
import signal
import time

from job_cases import FOREVER, StartJob, goes_on_until_interrupted

from holdfast.coordination.config import CoordinatorConfig
from holdfast.protocol.events import (
    CoordinatorRestarted,
    FailureDetected,
    GenerationStarted,
    JobStarted,
    Recovered,
    StepCommitted,
)
from holdfast.protocol.job_spec import JobSpec

LEASE_S = CoordinatorConfig(spec=JobSpec()).lease_s


def test_training_continues_while_the_coordinator_is_dead(start_job: StartJob) -> None:
    # A forked coordinator would be back before a step is done, so this job starts cold.
    job = start_job("--steps", "45", "--step-seconds", "0.4", cold=True)
    job.wait(StepCommitted, step=5)
    killed = job.events[-1].time
    os.kill(job.wait(JobStarted).coordinator_pid, signal.SIGKILL)
    back = job.wait(CoordinatorRestarted)
    assert back.term == 2
    assert job.wait_exit() == 0
    away = [e for e in job.all(StepCommitted) if killed < e.time < back.time]
    assert away, "no step was committed without the coordinator"
    assert [e.step for e in job.all(StepCommitted)] == list(range(1, 46))
    assert len(job.all(GenerationStarted)) == 1
    assert not job.all(FailureDetected)


def test_a_node_lost_while_the_coordinator_is_dead_is_detected_after_its_restart(start_job: StartJob) -> None:
    job = start_job(*FOREVER, "--step-seconds", "0.4")
    job.wait(StepCommitted, step=5)
    victim = job.nodes()[1]
    os.kill(job.wait(JobStarted).coordinator_pid, signal.SIGKILL)
    job.signal_node(victim)
    failure = job.wait(FailureDetected, node=victim)
    assert failure.kind == "lease_expired"
    job.wait(Recovered, action="shrink")
    goes_on_until_interrupted(job)


def test_a_coordinator_paused_longer_than_a_lease_expels_no_node(start_job: StartJob) -> None:
    job = start_job(*FOREVER, "--step-seconds", "0.4")
    job.wait(StepCommitted, step=5)
    pid = job.wait(JobStarted).coordinator_pid
    os.kill(pid, signal.SIGSTOP)
    # Wait longer than a lease, by the clock, because a paused process has no events.
    signal.sigtimedwait([], LEASE_S + 1)
    os.kill(pid, signal.SIGCONT)
    # It would expel a node wrongly either at once or when a lease that starts now expires.
    late = time.time() + LEASE_S + 1
    job.wait(StepCommitted, lambda event: event.time > late)
    assert len(job.all(GenerationStarted)) == 1
    assert not job.all(FailureDetected)
