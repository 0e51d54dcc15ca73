"""Nodes are killed, paused and added while a job trains: it loses nothing, and the losses stay the same."""

from __future__ import annotations

import signal

from job_cases import (
    FOREVER,
    TINY,
    StartJob,
    alive,
    check_losses,
    goes_on,
    goes_on_until_interrupted,
    loader_workers,
    wait_until,
)

from holdfast.planning.levels import FLAT_UP_TO
from holdfast.protocol.events import (
    FailureDetected,
    GenerationStarted,
    NodesJoined,
    Recovered,
    RolledBack,
    StepCommitted,
    WorkersChanged,
)


def test_a_job_that_loses_and_gains_nodes_has_unchanged_losses(start_job: StartJob) -> None:
    job = start_job(*FOREVER, "--step-seconds", "0.5", "--loader-workers", "1", options=("--verify-state", "1"))
    job.wait(StepCommitted, step=8)
    first, second = job.nodes()[:2]
    orphans = set[int]()
    for node in job.nodes():
        wait_until(lambda node=node: bool(loader_workers(job, node)))
        ((pid, links),) = loader_workers(job, node)
        assert len(links) == 1, f"a loader worker must have one socket besides its streams and memory: {links}"
        orphans |= {pid} if node == first else set()
    job.signal_node(first)
    wait_until(lambda: not any(map(alive, orphans)))
    job.wait(GenerationStarted, reason="failure")
    job.wait(Recovered, action="shrink")
    job.add_nodes(2)
    job.wait(GenerationStarted, reason="join", world_size=4)
    since = len(job.events)
    job.signal_node(second)
    job.wait(Recovered, action="shrink", since=since)
    wait_until(lambda: all(loader_workers(job, node) for node in job.nodes()))
    left = [pid for node in job.nodes() for pid, _ in loader_workers(job, node)]
    goes_on_until_interrupted(job)
    wait_until(lambda: not any(map(alive, left)))
    assert not job.all(WorkersChanged), "a survivor's process was replaced"
    check_losses(job, script=TINY, least=11)  # The reference run has no loader workers.
    assert {event.world_size for event in job.all(StepCommitted)} >= {2, 3}
    assert not job.all(RolledBack)
    assert {e.node for e in job.all(FailureDetected)} == {first, second}


def test_a_kill_at_any_phase_boundary_loses_no_step(start_job: StartJob) -> None:
    job = start_job(
        *FOREVER,
        "--step-seconds",
        "1.5",
        nodes=10,
        options=(
            "--verify-state",
            "1",
        ),
    )
    job.wait(StepCommitted)
    # The first two kills happen with hierarchical collectives, the others with flat ones.
    assert len(job.nodes()) == FLAT_UP_TO + 2
    for phase in ("reducing", "voted", "compute", "ready", "passed", "applying"):
        goes_on(job)
        since = len(job.events)
        victim = job.nodes()[1]
        job.inject("kill", victim, phase=phase)
        failure = job.wait(FailureDetected, node=victim, since=since)
        assert failure.kind == "connection_lost"
        job.wait(Recovered, action="shrink", since=since)
    goes_on_until_interrupted(job)
    assert len(job.nodes()) == 4
    assert len(job.all(FailureDetected)) == 6
    check_losses(job, script=TINY, least=22)


def test_a_job_survives_two_losses_at_once_and_a_third_during_recovery(start_job: StartJob) -> None:
    job = start_job(*FOREVER, "--step-seconds", "0.5", nodes=5, cold=True)
    job.wait(StepCommitted, step=5)
    nodes = job.nodes()
    job.signal_node(nodes[0])
    job.signal_node(nodes[3])
    job.wait(FailureDetected)
    job.signal_node(nodes[1])
    job.wait(GenerationStarted, world_size=2)
    goes_on_until_interrupted(job)
    assert not job.all(RolledBack)


def test_a_dead_worker_process_is_replaced(start_job: StartJob) -> None:
    job = start_job(*FOREVER, "--step-seconds", "0.5")
    job.wait(StepCommitted, step=3)
    node = job.nodes()[0]
    _, before = job.pids(node)
    for number, (how, kind) in enumerate([("exit", "process_exit"), ("raise", "exception")]):
        since = len(job.events)
        job.inject(how, node, worker=0)
        assert job.wait(FailureDetected, node=node, since=since).kind == kind
        job.wait(WorkersChanged, node=node, since=since)
        job.wait(GenerationStarted, reason="join", since=since)
        assert len(job.all(WorkersChanged)) == number + 1
    assert job.pids(node)[1] != before
    goes_on_until_interrupted(job)


def test_a_stopped_node_is_expelled_and_joins_with_new_workers_when_it_wakes(start_job: StartJob) -> None:
    job = start_job(
        *FOREVER,
        "--step-seconds",
        "0.5",
        options=(
            "--verify-state",
            "1",
        ),
    )
    job.wait(StepCommitted, step=5)
    victim = job.nodes()[2]
    since = len(job.events)
    old = job.pids(victim)[1]
    job.signal_node(victim, signal.SIGSTOP)
    failure = job.wait(FailureDetected, node=victim, since=since)
    assert failure.kind == "lease_expired"
    job.wait(Recovered, since=since)
    woken = len(job.events)
    job.signal_node(victim, signal.SIGCONT)
    job.wait(NodesJoined, lambda e: victim in e.names, since=woken)
    assert job.pids(victim)[1] != old
    job.wait(GenerationStarted, reason="join", world_size=3, since=woken)
    goes_on_until_interrupted(job)
    check_losses(job, script=TINY, least=8)


def test_nodes_that_arrive_within_the_join_window_join_in_one_generation(start_job: StartJob) -> None:
    job = start_job(*FOREVER, "--step-seconds", "0.3", nodes=1, options=("--join-window", "5"))
    job.wait(StepCommitted, step=2)
    # Both arrive at almost the same time. Tests with virtual clocks check the length of the window.
    job.add_nodes(2)
    job.wait(GenerationStarted, world_size=3)
    _, first, second = [event.time for event in job.all(NodesJoined) for _ in event.names]
    if second - first < 4.0:  # On a busy machine the difference may be larger.
        assert [event.world_size for event in job.all(GenerationStarted)] == [1, 3]
