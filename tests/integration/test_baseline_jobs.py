"""Baseline policies in real jobs: static experts, restarts from checkpoints, and emulated compute."""

from __future__ import annotations

import json
from pathlib import Path

from job_cases import FOREVER, TINY, TINY_MOE, StartJob, check_losses, goes_on_until_interrupted

from holdfast.observability.event_lines import read_events
from holdfast.observability.report import make_report
from holdfast.protocol.events import (
    CheckpointSaved,
    GenerationStarted,
    Recovered,
    RolledBack,
    StepCommitted,
    WorkersChanged,
)
from tests.harness.local_job import LocalJob


def test_with_static_experts_an_idle_node_replaces_a_failed_one(start_job: StartJob) -> None:
    options = ("--static-experts", "--emulate-compute", "0.0005/token")
    job = start_job(*FOREVER, "--step-seconds", "0.8", nodes=5, options=options, script=TINY_MOE)
    started = job.wait(GenerationStarted)
    assert started.world_size == 4  # 8 experts with 6 slots per node: 2 nodes hold one replica of each.
    job.wait(StepCommitted, step=3)
    status = json.loads(job.call("status", "--json"))
    idle = [node["node"] for node in status["nodes"] if node["workers"][0]["rank"] is None]
    assert len(idle) == 1
    assert {len(held) for layer in status["experts"]["layers"] for held in layer.values()} == {4}
    job.signal_node(started.members[0])
    again = job.wait(GenerationStarted, reason="failure")
    assert again.world_size == 4
    assert idle[0] in again.members
    assert job.wait(Recovered).state_source == "live"
    goes_on_until_interrupted(job)
    check_losses(job, script=TINY_MOE, least=6)


def test_a_restart_of_all_workers_loads_the_checkpoint_and_repeats_lost_steps(
    start_job: StartJob, tmp_path: Path
) -> None:
    options = ("--on-node-failure", "restart-all", "--static-experts", "--emulate-compute", "0.0002/token")
    options = (*options, "--checkpoint-dir", str(tmp_path / "kept"), "--checkpoint-every", "4")
    job = start_job(*FOREVER, "--step-seconds", "0.8", nodes=4, options=options, script=TINY_MOE)
    job.wait(CheckpointSaved, step=4)
    job.wait(StepCommitted, step=7)
    job.signal_node(job.nodes()[1])
    back = job.wait(RolledBack)
    assert back.to_step == 4
    assert back.why == "all workers were started again"
    recovered = job.wait(Recovered)
    assert (recovered.action, recovered.state_source) == ("restart_all", "checkpoint")
    assert recovered.redo_s > 0
    again = job.wait(GenerationStarted, reason="rollback")
    assert again.world_size == 2
    goes_on_until_interrupted(job, 6)
    check_losses(job, script=TINY_MOE, least=10)
    assert len({pid for event in job.all(WorkersChanged) for pid in event.worker_pids}) >= 2
    assert "EMULATED: 0.0002 s per token" in job.output()
    assert make_report(read_events(job.events_file)).emulated_token_s == 0.0002


def seconds_a_step(job: LocalJob, since: int) -> float:
    """Return the mean duration of five complete steps after an index of the journal."""
    before = job.wait(StepCommitted, since=since)
    after = job.wait(StepCommitted, step=before.step + 5, since=since)
    return (after.time - before.time) / 5


def test_emulated_steps_take_longer_in_a_smaller_world_and_on_a_slow_rank(start_job: StartJob) -> None:
    job = start_job(*FOREVER, nodes=3, options=("--emulate-compute", "0.05/micro-batch"))
    job.wait(StepCommitted, step=2)
    assert seconds_a_step(job, len(job.events)) >= 0.09  # Each rank has two of 6 micro-batches.
    victim = job.nodes()[1]
    job.inject("slow", victim, times=3.0)
    job.wait(StepCommitted, lambda e: e.step_s >= 0.25, since=len(job.events))
    job.inject("slow", victim, times=1.0)
    job.wait(StepCommitted, lambda e: e.step_s < 0.25, since=len(job.events))
    job.signal_node(victim)
    again = job.wait(GenerationStarted, reason="failure")
    assert again.world_size == 2
    assert seconds_a_step(job, job.events.index(again)) >= 0.135  # Each rank has three.
    goes_on_until_interrupted(job)
    check_losses(job, script=TINY, least=10)
    assert "the accelerator is EMULATED: 0.05 s per micro-batch" in job.output()
    assert make_report(read_events(job.events_file)).emulated_micro_batch_s == 0.05
