"""Replicas that lie on several workers of a node (docs/layouts.md) come and go, and compute the same."""

from __future__ import annotations

from job_cases import FOREVER, TINY, StartJob, check_losses, goes_on, goes_on_until_interrupted

from holdfast.protocol.events import (
    FailureDetected,
    GenerationStarted,
    Recovered,
    RolledBack,
    StepCommitted,
    WorkersChanged,
)
from holdfast.testing.local_job import LocalJob

SPREAD = TINY.with_name("tiny_spread.py")


def _spread(start_job: StartJob, *layout: str, nodes: int, workers: int) -> LocalJob:
    options = ("--workers-per-node", str(workers))
    return start_job(*FOREVER, "--step-seconds", "0.3", *layout, nodes=nodes, options=options, script=SPREAD)


def test_sharded_replicas_come_and_go(start_job: StartJob) -> None:
    job = _spread(start_job, "--shard", "2", nodes=3, workers=2)
    job.wait(StepCommitted, step=5)
    first, second = job.nodes()[:2]
    job.signal_node(first)
    job.wait(GenerationStarted, reason="failure", world_size=4)
    goes_on(job)
    job.add_nodes(1)
    job.wait(GenerationStarted, reason="join", world_size=6)
    goes_on(job)
    since = len(job.events)
    job.inject("exit", second, worker=1)
    failed = job.wait(FailureDetected, node=second, since=since)
    assert failed.kind == "process_exit"
    job.wait(WorkersChanged, node=second, since=since)
    job.wait(GenerationStarted, reason="join", world_size=6, since=since)
    goes_on_until_interrupted(job)
    check_losses(job, script=SPREAD, least=14)
    assert not job.all(RolledBack)


def test_a_kill_at_any_phase_of_a_sharded_step_loses_nothing(start_job: StartJob) -> None:
    job = _spread(start_job, "--shard", "2", nodes=6, workers=2)
    job.wait(StepCommitted)
    for number, phase in enumerate(("compute", "reducing", "ready", "voted", "passed")):
        goes_on(job)
        since, victim = len(job.events), job.nodes()[1]
        job.inject("kill", victim, worker=number % 2, phase=phase)
        job.wait(Recovered, since=since)
    goes_on_until_interrupted(job)
    check_losses(job, script=SPREAD, least=14)
    assert not job.all(RolledBack)


def test_tensor_parallel_replicas_that_are_sharded_too(start_job: StartJob) -> None:
    job = _spread(start_job, "--shard", "2", "--tensor", "2", nodes=2, workers=4)
    job.wait(StepCommitted, step=4)
    job.signal_node(job.nodes()[0])
    job.wait(GenerationStarted, reason="failure", world_size=4)
    goes_on(job)
    job.add_nodes(1)
    job.wait(GenerationStarted, reason="join", world_size=8)
    goes_on_until_interrupted(job)
    check_losses(job, script=SPREAD, least=9)
    assert not job.all(RolledBack)
