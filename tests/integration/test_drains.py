"""Nodes drain from a job, one or all in turn, and the losses stay the same."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor

from job_cases import (
    FOREVER,
    TINY,
    TINY_MOE,
    StartJob,
    alive,
    check_losses,
    goes_on,
    goes_on_until_interrupted,
    wait_until,
)

from holdfast.protocol.events import (
    FailureDetected,
    GenerationStarted,
    NodeLeft,
    NodeMoved,
    NodesJoined,
    RolledBack,
    StandbyReady,
    StepCommitted,
)


def test_a_rolling_drain_drains_and_restarts_every_node(start_job: StartJob) -> None:
    job = start_job(*FOREVER, "--step-seconds", "0.1", options=("--verify-state", "1"))
    job.wait(StepCommitted, step=3)
    pids = {node: job.pids(node)[1][0] for node in job.nodes()}
    output = job.call("drain", "--rolling")
    assert output.splitlines()[-1].endswith("is back (3 of 3)")
    assert sorted(event.node for event in job.all(NodeLeft)) == sorted(pids)
    assert {event.reason for event in job.all(NodeLeft)} == {"drained"}
    wait_until(lambda: not any(alive(pid) for pid in pids.values()))
    goes_on_until_interrupted(job)
    assert not job.all(FailureDetected)
    assert not job.all(RolledBack)
    check_losses(job, script=TINY, least=6)


def test_a_rolling_drain_skips_a_killed_node(start_job: StartJob) -> None:
    job = start_job(*FOREVER, "--step-seconds", "0.1")
    job.wait(StepCommitted, step=3)
    with ThreadPoolExecutor() as pool:
        rolling = pool.submit(job.call, "drain", "--rolling")
        first = job.wait(NodeLeft).node
        killed = [name for name in job.nodes() if name != first][-1]
        job.signal_node(killed)
        lines = rolling.result().splitlines()
    assert [line for line in lines if line.startswith(killed)][-1].startswith(f"{killed} is gone, and is skipped")
    assert sum(" is back " in line for line in lines) == 2
    goes_on_until_interrupted(job)
    assert {event.node for event in job.all(FailureDetected)} == {killed}
    check_losses(job, script=TINY, least=6)


def test_a_drained_node_joins_again_only_after_undrain(start_job: StartJob) -> None:
    options = ("--expert-slots", "8", "--verify-state", "1")
    job = start_job(*FOREVER, "--step-seconds", "0.2", script=TINY_MOE, options=options)
    job.wait(StepCommitted, step=3)
    assert job.call("drain", "node-1").startswith("node-1 has left; `holdfast undrain node-1`")
    assert "drained: node-1" in job.call("status")
    goes_on(job)
    assert set(job.all(GenerationStarted)[-1].members) == {"node-0", "node-2"}
    assert job.call("undrain", "node-1") == "node-1 may come back: it is being started\n"
    job.wait(NodesJoined, lambda event: event.names == ("node-1",), since=1)
    job.wait(GenerationStarted, reason="join", world_size=3)
    goes_on_until_interrupted(job)
    assert not job.all(FailureDetected)
    check_losses(job, script=TINY_MOE, least=6)


def test_sigterm_to_an_agent_drains_its_node_without_a_failure(start_job: StartJob) -> None:
    job = start_job(*FOREVER, "--step-seconds", "0.2", options=("--grace", "60s", "--verify-state", "1"))
    job.wait(StepCommitted, step=3)
    agent, workers = job.pids("node-1")
    os.kill(agent, signal.SIGTERM)
    job.wait(NodeLeft, node="node-1", reason="drained")
    assert job.wait(GenerationStarted, world_size=2).reason == "drain", job.story()
    wait_until(lambda: not any(alive(pid) for pid in (agent, *workers)))
    goes_on_until_interrupted(job)
    assert not job.all(FailureDetected)
    check_losses(job, script=TINY, least=6)


def test_a_second_sigterm_ends_a_draining_agent_at_once(start_job: StartJob) -> None:
    job = start_job(*FOREVER, "--step-seconds", "2", options=("--grace", "60s"))
    job.wait(StepCommitted, step=1)
    agent, _ = job.pids("node-1")
    os.kill(agent, signal.SIGTERM)
    with job.client() as client:
        wait_until(lambda: [one["node"] for one in client.status()["leaving"]] == ["node-1"])
    os.kill(agent, signal.SIGTERM)
    job.wait(GenerationStarted, world_size=2)
    wait_until(lambda: not alive(agent))
    goes_on_until_interrupted(job, steps=1)


def test_a_standby_replaces_a_node_after_sigterm_to_its_agent(start_job: StartJob) -> None:
    options = ("--grace", "60s", "--standbys", "1", "--verify-state", "1")
    job = start_job(*FOREVER, "--step-seconds", "0.2", options=options)
    job.wait(StandbyReady)
    job.wait(StepCommitted, step=3)
    agent, _ = job.pids("node-1")
    os.kill(agent, signal.SIGTERM)
    job.wait(NodeMoved, from_node="node-1", to_node="standby-0")
    left = job.wait(NodeLeft, node="node-1", reason="drained")
    assert left.detail.startswith("told to end with a grace of ")
    wait_until(lambda: not alive(agent))
    goes_on_until_interrupted(job)
    assert {event.world_size for event in job.all(StepCommitted)} <= {3, 4}, (
        "the world may have 4 workers only while the standby joins"
    )
    assert not job.all(FailureDetected)
    check_losses(job, script=TINY, least=6)
