"""Replicas over several workers of a node (docs/layouts.md) join and leave, and the losses stay the same."""

from __future__ import annotations

import pytest
from job_cases import FOREVER, TINY, StartJob, calm_run, check_losses, goes_on, goes_on_until_interrupted

from holdfast.observability.event_lines import read_events
from holdfast.observability.report import committed_steps
from holdfast.protocol.events import (
    FailureDetected,
    GenerationStarted,
    NodeMoved,
    Recovered,
    RolledBack,
    StandbyReady,
    StepCommitted,
    WorkersChanged,
)
from tests.harness.local_job import LocalJob

SPREAD = TINY.with_name("tiny_spread.py")


def _spread(start_job: StartJob, *layout: str, nodes: int, workers: int) -> LocalJob:
    options = ("--workers-per-node", str(workers))
    return start_job(*FOREVER, "--step-seconds", "0.3", *layout, nodes=nodes, options=options, script=SPREAD)


def _check(job: LocalJob, *model: str, least: int) -> None:
    """Check that all steps have the losses, logged metrics and evaluations of an undisturbed run."""
    check_losses(job, *model, script=SPREAD, least=least)
    calm = calm_run("--steps", "50", *model, script=SPREAD)["metrics"]
    steps = [step for step in committed_steps(read_events(job.events_file)) if step.step <= 50]
    assert {name for step in steps for name in step.metrics} == {"seen", "eval/loss"}
    for step in steps:
        assert step.metrics == pytest.approx(calm[step.step - 1], rel=1e-9)
    assert not job.all(RolledBack)


def test_sharded_replicas_leave_and_join_with_unchanged_losses(start_job: StartJob) -> None:
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
    _check_that_a_kill_at_any_phase_loses_nothing(job)
    goes_on_until_interrupted(job)
    _check(job, least=29)


def _check_that_a_kill_at_any_phase_loses_nothing(job: LocalJob) -> None:
    """Kill workers at both local ranks; no node exceeds its limit of restarts."""
    for number, phase in enumerate(("compute", "reducing", "ready", "voted", "passed")):
        goes_on(job)
        since, victim = len(job.events), job.nodes()[number % 3]
        job.inject("kill", victim, worker=number % 2, phase=phase)
        job.wait(Recovered, since=since)
        job.wait(GenerationStarted, reason="join", world_size=6, since=since)


@pytest.mark.soak
def test_sharded_tensor_parallel_replicas_leave_and_join(start_job: StartJob) -> None:
    job = _spread(start_job, "--shard", "2", "--tensor", "2", nodes=2, workers=4)
    job.wait(StepCommitted, step=4)
    job.signal_node(job.nodes()[0])
    job.wait(GenerationStarted, reason="failure", world_size=4)
    goes_on(job)
    job.add_nodes(1)
    job.wait(GenerationStarted, reason="join", world_size=8)
    goes_on_until_interrupted(job)
    _check(job, least=9)


EXPERTS = ("--experts", "6")


def _with_experts(start_job: StartJob, *layout: str) -> LocalJob:
    """Start a job with three nodes, room for two copies of each expert, and one lost node."""
    options = ("--workers-per-node", "2", "--expert-slots", "6", "--verify-state", "1")
    job = start_job(*FOREVER, *("--step-seconds", "0.3"), *layout, *EXPERTS, nodes=3, options=options, script=SPREAD)
    job.wait(StepCommitted, step=4)
    job.signal_node(job.nodes()[0])
    job.wait(GenerationStarted, reason="failure", world_size=4)
    goes_on(job)
    return job


def _kill_a_process(job: LocalJob, node: str, worker: int, phase: str) -> None:
    """Kill a worker, which ends its replica group, and wait until the group has joined again."""
    since, world = len(job.events), job.all(GenerationStarted)[-1].world_size
    job.inject("kill", node, worker=worker, phase=phase)
    job.wait(FailureDetected, node=node, since=since)
    job.wait(GenerationStarted, reason="join", world_size=world, since=since)


@pytest.mark.soak
def test_sharded_replicas_with_experts_leave_and_join(start_job: StartJob) -> None:
    job = _with_experts(start_job, "--shard", "2")
    second = job.nodes()[0]
    job.add_nodes(1)
    job.wait(GenerationStarted, reason="join", world_size=6)
    goes_on(job)
    for phase in ("compute", "reducing", "voted"):
        _kill_a_process(job, second, 1, phase)
        goes_on(job)
    goes_on_until_interrupted(job)
    _check(job, *EXPERTS, least=18)


@pytest.mark.soak
def test_tensor_parallel_replicas_with_experts_leave_and_join(start_job: StartJob) -> None:
    """Each token is sent to its experts by one of two local ranks; a process of each is killed."""
    job = _with_experts(start_job, "--tensor", "2")
    _kill_a_process(job, job.nodes()[0], 0, "compute")
    job.add_nodes(1)
    job.wait(GenerationStarted, reason="join", world_size=6)
    _kill_a_process(job, job.nodes()[1], 1, "reducing")
    goes_on_until_interrupted(job)
    _check(job, *EXPERTS, least=9)


@pytest.mark.parametrize(
    "model",
    [pytest.param((), id="dense"), pytest.param(("--experts", "4"), id="experts", marks=pytest.mark.soak)],
)
def test_a_standby_replaces_a_replica_group_over_several_workers(start_job: StartJob, model: tuple[str, ...]) -> None:
    job = start_job(
        *FOREVER,
        *("--step-seconds", "0.3", "--shard", "2", *model),
        nodes=2,
        options=("--workers-per-node", "2", "--standbys", "1"),
        script=SPREAD,
    )
    job.wait(StandbyReady)
    job.wait(StepCommitted, step=4)
    leaver, stayer = job.nodes()
    job.call("move", leaver)
    moved = job.wait(NodeMoved, from_node=leaver)
    goes_on(job)
    job.wait(StandbyReady, node=leaver)
    job.signal_node(moved.to_node)
    job.wait(NodeMoved, to_node=leaver)
    goes_on_until_interrupted(job)
    _check(job, *model, least=12)
    assert {event.world_size for event in job.all(StepCommitted)} <= {4, 6}
    assert stayer in job.nodes()
