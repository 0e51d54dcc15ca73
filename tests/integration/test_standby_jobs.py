"""A standby replaces a killed node, and the losses stay the same."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from job_cases import FOREVER, TINY, TINY_MOE, StartJob, check_losses, goes_on, goes_on_until_interrupted, wait_until

from holdfast.coordination.nodes.standbys import MAX_TRIES
from holdfast.protocol.events import (
    CoordinatorRestarted,
    FailureDetected,
    GenerationStarted,
    JobStarted,
    NodeMoved,
    Recovered,
    RolledBack,
    StandbyFailed,
    StandbyReady,
    StepCommitted,
    StragglerFound,
)
from tests.harness.local_job import LocalJob


def status(job: LocalJob) -> dict[str, Any]:
    return json.loads(job.call("status", "--json"))


def test_a_standby_replaces_a_killed_node(start_job: StartJob) -> None:
    job = start_job(*FOREVER, "--step-seconds", "0.3", options=("--standbys", "1", "--verify-state", "1"))
    ready = job.wait(StandbyReady)
    assert (ready.node, ready.roles) == ("standby-0", 1)
    assert re.search(r"^standby-0 +standby .* warm", job.call("status"), re.MULTILINE)
    goes_on(job)
    before = job.all(GenerationStarted)[-1].members
    job.signal_node("node-1")
    begun = job.wait(GenerationStarted, reason="replace")
    assert begun.members == tuple("standby-0" if name == "node-1" else name for name in before)
    assert job.wait(Recovered, action="replace").why.startswith("a standby that takes over at once costs ")
    moved = job.wait(NodeMoved)
    assert (moved.from_node, moved.to_node, moved.moved_bytes > 0) == ("node-1", "standby-0", True)
    job.wait(StandbyReady, node="standby-1")  # Another standby was started.
    job.signal_node("node-2")
    job.wait(NodeMoved, from_node="node-2", to_node="standby-1")
    goes_on_until_interrupted(job)
    assert {event.world_size for event in job.all(StepCommitted)} == {3}
    assert not job.all(RolledBack)
    check_losses(job, script=TINY, least=8)


def test_a_standby_takes_over_the_experts_of_a_killed_node(start_job: StartJob) -> None:
    options = ("--standbys", "1", "--verify-state", "1")
    job = start_job(*FOREVER, "--step-seconds", "0.3", script=TINY_MOE, options=options)
    job.wait(StandbyReady)
    goes_on(job)
    placed = status(job)["experts"]["layers"]
    job.signal_node("node-1")
    job.wait(GenerationStarted, reason="replace")
    job.wait(NodeMoved)
    goes_on(job)
    after = status(job)["experts"]["layers"]
    assert after == [{"standby-0" if name == "node-1" else name: held for name, held in row.items()} for row in placed]
    goes_on_until_interrupted(job)
    check_losses(job, script=TINY_MOE, least=8)


def test_the_death_of_a_standby_does_not_disturb_training(start_job: StartJob) -> None:
    job = start_job(*FOREVER, "--step-seconds", "0.3", options=("--standbys", "1"))
    job.wait(StandbyReady)
    (agent,) = [node["agent_pid"] for node in status(job)["nodes"] if node["standby"]]
    os.kill(agent, signal.SIGKILL)
    job.wait(StandbyFailed)
    job.wait(StandbyReady, node="standby-1")  # Another standby was started.
    goes_on_until_interrupted(job)
    assert not job.all(FailureDetected)
    assert len(job.all(GenerationStarted)) == 1
    check_losses(job, script=TINY, least=4)


def test_a_standby_replaces_a_drained_node(start_job: StartJob) -> None:
    job = start_job(*FOREVER, "--step-seconds", "0.3", options=("--standbys", "1", "--verify-state", "1"))
    job.wait(StandbyReady)
    goes_on(job)
    before = job.all(GenerationStarted)[-1].members
    assert job.call("drain", "node-1").startswith("node-1 has left")
    begun = job.wait(GenerationStarted, reason="drain")
    assert begun.members == tuple("standby-0" if name == "node-1" else name for name in before)
    assert job.wait(NodeMoved).reason == "drain"
    goes_on_until_interrupted(job)
    assert {event.world_size for event in job.all(StepCommitted)} <= {3, 4}, (
        "the world may have 4 workers only while the standby joins"
    )
    assert not job.all(FailureDetected)
    check_losses(job, script=TINY, least=8)


def test_a_moved_node_waits_in_the_same_process_and_takes_its_rank_back(start_job: StartJob) -> None:
    job = start_job(*FOREVER, "--step-seconds", "0.3", options=("--standbys", "1", "--verify-state", "1"))
    job.wait(StandbyReady)
    goes_on(job)
    before, pids = job.all(GenerationStarted)[-1].members, job.pids("node-1")
    job.call("move", "node-1")
    begun = job.wait(GenerationStarted, reason="move")
    assert begun.members == tuple("standby-0" if name == "node-1" else name for name in before)
    assert job.wait(NodeMoved, from_node="node-1", to_node="standby-0").reason == "move"
    assert job.wait(StandbyReady, node="node-1").warm_s == 0.0
    job.call("move", "standby-0", "--to", "node-1")
    job.wait(NodeMoved, from_node="standby-0", to_node="node-1")
    job.wait(StandbyReady, node="standby-0", since=job.wait(StandbyReady, node="node-1").seq)
    job.signal_node("node-2")
    assert job.wait(GenerationStarted, reason="replace").members == tuple(
        "standby-0" if name == "node-2" else name for name in before
    )
    assert job.pids("node-1") == pids, "the node's process was replaced"
    goes_on_until_interrupted(job)
    assert {event.world_size for event in job.all(StepCommitted)} <= {3, 4}, (
        "the world may have 4 workers only while the standby joins"
    )
    assert {event.node for event in job.all(FailureDetected)} == {"node-2"}
    check_losses(job, script=TINY, least=8)


def test_a_moved_node_sends_its_only_copies_of_experts_before_it_leaves(start_job: StartJob) -> None:
    """The other nodes have no room for them, so the standby joins next to the node and receives them first."""
    options = ("--expert-slots", "3", "--standbys", "1", "--verify-state", "1")
    job = start_job(*FOREVER, "--step-seconds", "0.2", script=TINY_MOE, options=options)
    job.wait(StandbyReady)
    goes_on(job)
    before = job.all(GenerationStarted)[-1].members
    assert job.call("move", "node-1")
    moved = job.wait(NodeMoved, from_node="node-1", to_node="standby-0")
    assert moved.moved_bytes > 0
    job.wait(StandbyReady, node="node-1")
    assert job.wait(GenerationStarted, reason="join").members[:3] == before
    assert job.all(GenerationStarted)[-1].members == tuple("standby-0" if name == "node-1" else name for name in before)
    goes_on_until_interrupted(job)
    assert not job.all(FailureDetected)
    assert not job.all(RolledBack)
    check_losses(job, script=TINY_MOE, least=8)


def test_a_standby_replaces_a_straggler(start_job: StartJob) -> None:
    options = (
        "--standbys",
        "1",
        "--allow-faults",
        "--set",
        "recovery.stragglers=move",
        "--emulate-compute",
        "0.1/micro-batch",
    )
    job = start_job(*FOREVER, options=options)
    job.wait(StandbyReady)
    goes_on(job)
    job.call("inject", "slow", "node-1", "--times", "3")
    found = job.wait(StragglerFound, node="node-1")
    assert found.action == "move"
    assert found.factor > 1.5
    assert job.wait(NodeMoved, from_node="node-1").to_node == "standby-0"
    job.wait(StandbyReady, node="node-1")
    goes_on_until_interrupted(job)
    assert not job.all(FailureDetected)
    check_losses(job, script=TINY, least=8)


@pytest.mark.soak
def test_a_straggler_computes_fewer_micro_batches_without_a_warm_standby(start_job: StartJob) -> None:
    # About 20 reports are needed to detect that the node is fast again, so it reports every 0.5 s instead of every 5 s.
    words = ("--set", "experiments.own_times_every=0.5")
    options = ("--stragglers", "move", "--emulate-compute", "0.1/micro-batch", "--verify-state", "1", *words)
    job = start_job(*FOREVER, options=options)
    job.wait(StepCommitted, step=3)
    job.inject("slow", "node-1", times=3.0)
    # On a noisy machine many reports are needed.
    found = job.wait(StragglerFound, node="node-1", timeout=300.0)
    assert found.action == "fewer"
    assert "no standby is warm" in found.why
    fewer = job.wait(GenerationStarted, reason="rebalance")
    assert fewer.world_size == 3
    # At first it has two of 6 micro-batches, which take 0.6 s, then one; each other node has at most three.
    job.wait(StepCommitted, lambda e: 0.25 < e.step_s < 0.5, since=job.events.index(fewer))
    job.inject("slow", "node-1", times=1.0)
    again = job.wait(GenerationStarted, reason="rebalance", since=job.events.index(fewer) + 1, timeout=300.0)
    job.wait(StepCommitted, lambda e: e.step_s < 0.28, since=job.events.index(again))
    goes_on_until_interrupted(job)
    assert not job.all(FailureDetected)
    check_losses(job, script=TINY, least=8)


def test_a_standby_stays_cold_if_its_script_raises_in_a_shadow_step(start_job: StartJob) -> None:
    job = start_job(*FOREVER, "--step-seconds", "0.3", "--cold", options=("--standbys", "1"))
    last = job.wait(StandbyFailed, again=False)
    failures = job.all(StandbyFailed)
    assert [event.tries for event in failures] == list(range(1, MAX_TRIES + 1))
    assert "no step for me" in last.why
    goes_on(job)
    job.signal_node("node-1")
    job.wait(GenerationStarted, reason="failure", world_size=2)
    goes_on_until_interrupted(job)
    assert {event.node for event in job.all(FailureDetected)} == {"node-1"}
    check_losses(job, script=TINY, least=4)


def test_a_restarted_coordinator_knows_the_warm_standby(start_job: StartJob) -> None:
    job = start_job(*FOREVER, "--step-seconds", "0.3", options=("--standbys", "1", "--verify-state", "1"))
    job.wait(StandbyReady)
    os.kill(job.wait(JobStarted).coordinator_pid, signal.SIGKILL)
    job.wait(CoordinatorRestarted)
    wait_until(
        lambda: any(node["standby"] == "warm" for node in status(job)["nodes"])
    )  # The standby may be the last node to return.
    goes_on(job)
    job.signal_node("node-2")
    assert job.wait(GenerationStarted, reason="replace").world_size == 3
    job.wait(NodeMoved, from_node="node-2", to_node="standby-0")
    assert [event.node for event in job.all(StandbyReady)].count("standby-0") == 1, (
        "the new coordinator did not know that the standby is warm"
    )
    goes_on_until_interrupted(job)
    check_losses(job, script=TINY, least=8)


def test_a_standby_does_not_run_the_code_after_the_training_loop(start_job: StartJob, tmp_path: Path) -> None:
    """A standby has the initial model and no rank; as a second rank 0 it would overwrite the trained model."""
    written = tmp_path / "final"
    script = TINY.with_name("saves_at_end.py")
    job = start_job(str(written), "60", nodes=2, options=("--standbys", "1"), script=script)
    job.wait(StandbyReady)
    assert job.wait_exit(120) == 0, job.story()
    assert written.read_text() == "step 60 world 2\n"
