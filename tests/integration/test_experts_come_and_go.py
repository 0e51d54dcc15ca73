"""A job with MoE layers loses and gains nodes: experts are replaced and moved, and the losses stay the same."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

import pytest
from job_cases import FOREVER, TINY_MOE, StartJob, check_losses, goes_on, goes_on_until_interrupted

from holdfast.protocol.events import (
    CheckpointSaved,
    FailureDetected,
    GenerationStarted,
    JobFailed,
    NodesJoined,
    Recovered,
    RolledBack,
    StepCommitted,
    WorkersChanged,
)
from holdfast.protocol.plan import FaultThreshold
from tests.harness.local_job import LocalJob

VERIFY = ("--verify-state", "1")
#: The duration of a step of one worker; slow steps use little CPU time while a test waits.
SLOWLY = ("--step-seconds", "0.8")


def test_a_moe_job_that_loses_and_gains_nodes_has_unchanged_losses(start_job: StartJob) -> None:
    # Three nodes have room for exactly two copies of each of six experts, so any loss requires new copies.
    options, experts = (*VERIFY, "--expert-slots", "4"), ("--experts", "6")
    job = start_job(*FOREVER, *experts, *SLOWLY, nodes=4, options=options, script=TINY_MOE)
    job.wait(StepCommitted, step=5)
    assert job.wait(GenerationStarted).fault_threshold == FaultThreshold(asked=2, given=2)
    shown = json.loads(job.call("status", "--json"))["experts"]
    assert shown["fault_threshold"] == {"asked": 2, "given": 2}
    assert [sorted(layer) for layer in shown["layers"]] == [sorted(job.nodes())] * 2
    for layer in shown["layers"]:
        assert [len(held) for held in layer.values()] == [4] * 4
        hosts = Counter(chain.from_iterable(map(set, layer.values())))
        assert hosts.keys() == set(range(6))
        assert min(hosts.values()) >= 2
    first, second = job.nodes()[:2]
    job.signal_node(first)
    shrunk = job.wait(Recovered, action="shrink")
    assert shrunk.experts_moved > 0
    assert shrunk.moved_bytes > 0
    since = len(job.events)
    job.add_nodes(2)
    job.wait(GenerationStarted, reason="join", world_size=5, since=since)
    job.wait(Recovered, action="grow", since=since)
    since = len(job.events)
    job.signal_node(second)
    job.wait(Recovered, action="shrink", since=since)
    goes_on_until_interrupted(job)
    assert not job.all(WorkersChanged), "a survivor's process was replaced"
    check_losses(job, *experts, script=TINY_MOE, least=8)
    assert not job.all(RolledBack)


@pytest.mark.soak
def test_a_moe_job_shrinks_to_one_node_and_grows_to_three(start_job: StartJob) -> None:
    options = (*VERIFY, "--expert-slots", "8")
    job = start_job(*FOREVER, *SLOWLY, nodes=3, options=options, script=TINY_MOE)
    job.wait(StepCommitted, step=5)
    for _ in range(2):
        since = len(job.events)
        job.signal_node(job.nodes()[-1])
        job.wait(Recovered, since=since)
        goes_on(job)
    since = len(job.events)
    assert job.wait(GenerationStarted, world_size=1).fault_threshold == FaultThreshold(asked=2, given=1)
    assert "each expert is on at least 1 nodes (asked: 2)" in job.call("status", "--wide")
    job.add_nodes(2)
    job.wait(GenerationStarted, reason="join", world_size=3, since=since)
    goes_on_until_interrupted(job)
    check_losses(job, script=TINY_MOE, least=14)
    assert not job.all(RolledBack)


# A test of a dense job kills at every boundary; these boundaries have unfinished expert gradients and rows.
def test_a_kill_at_a_phase_boundary_loses_no_expert(start_job: StartJob) -> None:
    """Four nodes have room for exactly two copies of each of eight experts, so one is added before the next kill."""
    options = (*VERIFY, "--expert-slots", "4")
    job = start_job(*FOREVER, *SLOWLY, nodes=4, options=options, script=TINY_MOE)
    job.wait(StepCommitted)
    for phase in ("reducing", "voted", "applying"):
        goes_on(job)
        since = len(job.events)
        victim = job.nodes()[1]
        job.inject("kill", victim, phase=phase)
        job.wait(FailureDetected, node=victim, since=since)
        job.wait(Recovered, action="shrink", since=since)
        job.add_nodes(1)
        job.wait(GenerationStarted, reason="join", world_size=4, since=since)
        job.wait(Recovered, action="grow", since=since)
    goes_on_until_interrupted(job)
    assert len(job.all(FailureDetected)) == 3
    assert not job.all(RolledBack)
    check_losses(job, script=TINY_MOE, least=13)


def test_a_node_that_dies_while_experts_move_loses_no_expert(start_job: StartJob) -> None:
    """The migration is aborted, and no dropped expert is missing, because each expert has three owners."""
    options = (*VERIFY, "--expert-slots", "6", "--fault-threshold", "3")
    job = start_job(*FOREVER, *SLOWLY, nodes=5, options=options, script=TINY_MOE)
    job.wait(StepCommitted, step=3)
    threshold = job.wait(GenerationStarted).fault_threshold
    assert threshold is not None
    assert threshold.asked == 3, "the option did not reach the coordinator"
    first, second = job.nodes()[1], job.nodes()[3]
    job.inject("kill", second, step=1, phase="moving")
    job.signal_node(first)
    job.wait(FailureDetected, node=second)
    goes_on_until_interrupted(job)
    assert len(job.nodes()) == 3
    check_losses(job, script=TINY_MOE, least=6)
    assert not job.all(RolledBack)


def test_an_expert_without_a_copy_fails_a_job_without_checkpoints(start_job: StartJob) -> None:
    """Every expert has one copy. Without the lost node there is not enough room, so the job waits for another node."""
    options = ("--expert-slots", "4", "--fault-threshold", "1")
    job = start_job(*FOREVER, *SLOWLY, nodes=2, options=options, script=TINY_MOE)
    job.wait(StepCommitted, step=5)
    job.signal_node(job.nodes()[0])
    job.add_nodes(1)
    assert job.wait_exit() == 1
    why = job.all(JobFailed)[0].why
    assert "no live copy" in why
    assert "of MoE layer 1" in why
    assert why in job.output()


def test_an_expert_without_a_copy_rolls_the_job_back_to_its_checkpoint(start_job: StartJob, tmp_path: Path) -> None:
    options = ("--expert-slots", "4", "--fault-threshold", "1", "--checkpoint-dir", str(tmp_path / "kept"))
    options = (*options, "--checkpoint-every", "5", *VERIFY)
    job = start_job(*FOREVER, *SLOWLY, nodes=2, options=options, script=TINY_MOE)
    job.wait(CheckpointSaved)
    since = len(job.events)
    job.signal_node(job.nodes()[0])
    job.add_nodes(1)
    rolled_back = job.wait(RolledBack, since=since)
    assert "expert" in rolled_back.why, rolled_back
    goes_on_until_interrupted(job)
    check_losses(job, script=TINY_MOE, least=8)


@pytest.mark.soak
def test_a_moe_job_resumes_from_a_checkpoint_with_fewer_nodes(start_job: StartJob, tmp_path: Path) -> None:
    options = ("--checkpoint-dir", str(tmp_path / "kept"), "--checkpoint-every", "10", "--expert-slots", "4")
    first = start_job("--steps", "20", nodes=3, options=options, script=TINY_MOE)
    assert first.wait_exit() == 0
    again = start_job("--steps", "30", nodes=2, options=options, script=TINY_MOE)
    assert again.wait_exit() == 0
    assert again.all(RolledBack)[0].to_step == 20
    assert [event.step for event in again.all(StepCommitted)] == list(range(21, 31))
    check_losses(again, script=TINY_MOE, least=10)


def test_a_moe_job_trains_with_fewer_micro_batches_than_workers(start_job: StartJob) -> None:
    """24 samples are six micro-batches of 4 for eight workers, so two workers only serve experts."""
    options = (*VERIFY, "--workers-per-node", "2", "--expert-slots", "4")
    job = start_job(*FOREVER, *SLOWLY, nodes=4, options=options, script=TINY_MOE)
    job.wait(StepCommitted, step=5)
    job.signal_node(job.nodes()[1])
    job.wait(Recovered, action="shrink")
    goes_on_until_interrupted(job)
    check_losses(job, script=TINY_MOE, least=8)
    assert {event.world_size for event in job.all(StepCommitted)} == {8, 6}


@pytest.mark.soak
def test_nodes_of_a_moe_job_can_have_different_numbers_of_workers(start_job: StartJob, tmp_path: Path) -> None:
    """One node has two workers, the other has one; each node hosts every expert once."""
    args = (*FOREVER, *SLOWLY, "--gate", str(tmp_path / "go"))
    job = start_job(*args, nodes=1, options=("--workers-per-node", "2", "--expert-slots", "8"), script=TINY_MOE)
    job.wait(StepCommitted, step=4)
    with second_agent(job, "--workers-per-node", "1", "--expert-slots", "8", str(TINY_MOE), *args):
        job.wait(NodesJoined, lambda e: "other" in e.names)
        (tmp_path / "go").touch()
        generation = job.wait(GenerationStarted, reason="join", world_size=3)
        assert generation.fault_threshold == FaultThreshold(asked=2, given=2)
        job.wait(StepCommitted, world_size=3)
        since = len(job.events)
        job.signal_node("other")
        job.wait(Recovered, action="shrink", since=since)
        goes_on_until_interrupted(job)
    check_losses(job, script=TINY_MOE, least=8)
    assert {event.world_size for event in job.all(StepCommitted)} == {2, 3}
    assert not job.all(RolledBack)


@contextmanager
def second_agent(job: LocalJob, *options: str) -> Iterator[None]:
    """Start a node by `holdfast agent`, as on another machine."""
    command = [sys.executable, "-m", "holdfast", "agent", "--address", job.url, "--node-name", "other", *options]
    with subprocess.Popen(command, env=job.environment) as agent:
        try:
            yield
        finally:
            agent.kill()


def test_too_few_expert_slots_are_bad_input(start_job: StartJob) -> None:
    job = start_job("--experts", "9", nodes=2, options=("--expert-slots", "4"), script=TINY_MOE)
    assert job.wait_exit() == 2
    assert "9 experts" in job.output()
    assert "slots" in job.output()
    assert "Traceback" not in job.output()
