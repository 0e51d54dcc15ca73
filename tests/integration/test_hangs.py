"""Hangs without dead processes: after a timeout the job continues without the node at fault."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from job_cases import FOREVER, TINY, StartJob, goes_on

from holdfast.protocol.events import (
    FailureDetected,
    GenerationStarted,
    NodesJoined,
    RolledBack,
    StacksTaken,
    StepCommitted,
)
from holdfast.protocol.failures import FailureKind
from tests.harness.namespaces import NamespacesRefusedError, NetworkJob, joined

TIMEOUT_S = 4.0


def test_a_hung_worker_is_identified_with_its_stack_and_replaced(start_job: StartJob) -> None:
    """In the reproducer hang.py the same members failed again after each timeout, and the wrong node was blamed."""
    job = start_job(
        *FOREVER, "--step-seconds", "0.1", "--timeout", str(TIMEOUT_S), "--pause-at", "7", "--hang-at", "10"
    )
    paused = job.wait(StepCommitted, step=7)
    # A rank may start its pause of 1 s before the slowest rank has applied the previous step; then the pause fills this
    # whole step. The first failure is the hang.
    assert min(1.0, paused.step_s) <= paused.paused_s <= paused.step_s, job.story()
    failure = job.wait(FailureDetected)
    assert (failure.node, failure.kind) == ("node-1", FailureKind.HANG), job.story()
    assert (failure.detector, failure.step, failure.phase) == ("statistics", 10, "compute"), job.story()
    assert "of step 10" in failure.detail
    assert "while others wait for it" in failure.detail
    stacks = job.wait(StacksTaken)
    (named,) = stacks.suspects
    assert "node-1" in named
    (where,) = [stack for stack in stacks.stacks if named in stack.workers]
    assert any(TINY.name in line for line in where.lines), where
    assert any(worker.waits and worker.collectives for worker in stacks.workers), stacks
    again = job.wait(StepCommitted, step=10)
    failures = [event for event in job.all(FailureDetected) if event.time < again.time]
    assert failures == [failure], "recovery needed more than one timeout"
    goes_on(job, 10)
    assert not job.all(RolledBack)


@contextmanager
def job_on_a_network(nodes: int, folder: Path) -> Iterator[NetworkJob]:
    args = (*FOREVER, "--step-seconds", "0.1", "--timeout", str(TIMEOUT_S))
    with ExitStack() as stack:
        try:
            network = stack.enter_context(joined(nodes))
        except NamespacesRefusedError as error:
            pytest.skip(str(error))
        yield stack.enter_context(NetworkJob(network, TINY, args, nodes=nodes, folder=folder))


@pytest.mark.soak
def test_a_pause_longer_than_two_minutes_is_not_a_hang(start_job: StartJob) -> None:
    """A collective once timed out after 120 s, and the pausing worker was blamed for a hang."""
    job = start_job(*FOREVER, "--pause-at", "7", "--pause-seconds", "125")
    paused = job.wait(StepCommitted, step=7, timeout=180.0)
    assert paused.paused_s > 120.0
    assert not job.all(FailureDetected), job.story()


@pytest.mark.soak
def test_two_nodes_without_a_connection_never_share_a_generation_again(tmp_path: Path) -> None:
    """Both nodes reach all others and the coordinator, so the job continues without one of them."""
    with job_on_a_network(3, tmp_path) as job:
        job.wait(StepCommitted, step=5)
        job.network.cut("node-1", "node-2")
        cut = len(job.events)
        failure = job.wait(FailureDetected, since=cut)
        assert failure.node in ("node-1", "node-2"), job.story()
        assert "no connection between" in failure.detail
        before = [event for event in job.all(StepCommitted) if event.time < failure.time][-1]
        again = job.wait(StepCommitted, step=before.step + 1)
        assert again.world_size == 2
        blamed = {event.node for event in job.all(FailureDetected) if event.time < again.time}
        assert blamed == {failure.node}, "recovery needed more than one timeout"
        # The excluded node returns with new workers, but no group can be built with it.
        job.wait(NodesJoined, lambda e: failure.node in e.names, since=cut)
        job.wait(StepCommitted, step=again.step + 100)
        generations = [set(event.members) for event in job.events[cut:] if isinstance(event, GenerationStarted)]
        assert generations == [{"node-0", "node-1", "node-2"} - {failure.node}], job.story()
        # A node that reaches no other node is lost.
        (other,) = {"node-1", "node-2"} - {failure.node}
        down = len(job.events)
        job.network.link_down(other)
        lost = job.wait(FailureDetected, node=other, since=down)
        assert (lost.kind, lost.severity) == ("lease_expired", 1), job.story()
        without = job.wait(GenerationStarted, lambda e: other not in e.members, since=down)
        job.wait(StepCommitted, since=job.events.index(without))
