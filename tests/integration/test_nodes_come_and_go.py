"""Nodes are killed, stopped and added while a job trains: it loses nothing, and computes the same."""

from __future__ import annotations

import signal

import pytest
from job_cases import StartJob, calm_losses


def test_a_job_that_loses_and_gains_nodes_computes_the_same(start_job: StartJob) -> None:
    args = ("--steps", "60", "--step-seconds", "0.15")
    job = start_job(*args, options=("--verify-state",))
    job.wait("step_committed", step=8)
    first, second = job.nodes()[:2]
    job.signal_node(first)
    job.wait("epoch_started", reason="failure")
    job.wait("recovered", action="shrink")
    job.call("add-node", "--count", "2")
    job.wait("epoch_started", reason="join", world=4)
    job.signal_node(second)
    assert job.wait_exit() == 0
    assert "workers_changed" not in {event["event"] for event in job.events}, "survivors go on in the same processes"
    losses = [event["loss"] for event in job.all("step_committed")]
    assert losses == pytest.approx(calm_losses("--steps", "60"), rel=1e-9)
    assert {event["world"] for event in job.all("step_committed")} >= {2, 3}
    assert not job.all("rolled_back")
    assert {e["node"] for e in job.all("failure_detected")} == {first, second}


@pytest.mark.parametrize("phase", ["compute", "reducing", "ready", "voted", "passed", "applying"])
def test_a_kill_at_a_phase_boundary_loses_nothing(start_job: StartJob, phase: str) -> None:
    job = start_job("--steps", "24", "--step-seconds", "0.1", options=("--verify-state",))
    job.wait("step_committed", step=2)
    victim = job.nodes()[1]
    job.fail(victim, "kill", step=10, phase=phase)
    failure = job.wait("failure_detected", node=victim)
    assert failure["kind"] == "connection_lost"
    assert job.wait_exit() == 0
    losses = [event["loss"] for event in job.all("step_committed")]
    assert losses == pytest.approx(calm_losses("--steps", "24"), rel=1e-9)


def test_two_nodes_at_once_and_one_while_recovering(start_job: StartJob) -> None:
    job = start_job("--steps", "50", "--step-seconds", "0.1", nodes=5)
    job.wait("step_committed", step=5)
    nodes = job.nodes()
    job.signal_node(nodes[0])
    job.signal_node(nodes[3])
    job.wait("failure_detected")
    job.signal_node(nodes[1])
    job.wait("epoch_started", world=2)
    assert job.wait_exit() == 0
    assert len(job.all("step_committed")) == 50


def test_a_worker_that_dies_is_replaced(start_job: StartJob) -> None:
    job = start_job("--steps", "100", "--step-seconds", "0.15")
    job.wait("step_committed", step=3)
    node = job.nodes()[0]
    _, before = job.pids(node)
    for number, (how, kind) in enumerate([("exit", "process_exit"), ("raise", "exception")]):
        since = len(job.events)
        job.fail(node, how, worker=0)
        assert job.wait("failure_detected", node=node, since=since)["kind"] == kind
        job.wait("workers_changed", node=node, since=since)
        job.wait("epoch_started", reason="join", since=since)
        assert len(job.all("workers_changed")) == number + 1
    assert job.pids(node)[1] != before
    assert job.wait_exit() == 0


def test_a_stopped_node_is_expelled_and_harms_nobody_when_it_wakes(start_job: StartJob) -> None:
    job = start_job("--steps", "90", "--step-seconds", "0.15", options=("--verify-state",))
    job.wait("step_committed", step=5)
    victim = job.nodes()[2]
    since = len(job.events)
    old = job.pids(victim)[1]
    job.signal_node(victim, signal.SIGSTOP)
    failure = job.wait("failure_detected", node=victim, since=since)
    assert failure["kind"] == "lease_expired"
    job.wait("recovered", since=since)
    woken = len(job.events)
    job.signal_node(victim, signal.SIGCONT)
    job.wait("node_joined", node=victim, since=woken)
    assert job.pids(victim)[1] != old
    assert job.wait_exit() == 0
    losses = [event["loss"] for event in job.all("step_committed")]
    assert losses == pytest.approx(calm_losses("--steps", "90"), rel=1e-9)


def test_arrivals_within_the_join_window_are_taken_in_together(start_job: StartJob) -> None:
    job = start_job("--steps", "1000000", "--step-seconds", "0.05", nodes=1, options=("--join-window", "5"))
    job.wait("step_committed", step=2)
    for node in ("node-1", "node-2"):
        job.call("add-node")
        job.wait("node_joined", node=node)  # the second comes well after the first, and within the window
    job.wait("epoch_started", reason="join")
    assert [event["world"] for event in job.all("epoch_started")] == [1, 3]
