"""Unreachable nodes are refused, and the job starts or continues without them."""

from __future__ import annotations

from pathlib import Path

import pytest
from job_cases import FOREVER, TINY

from holdfast.errors import EXIT_BAD_INPUT, EXIT_REFUSED
from holdfast.protocol.events import FailureDetected, GenerationStarted, JobWaiting, NodeRefused, StepCommitted
from tests.harness.namespaces import NamespacesRefusedError, NetworkJob, joined


def test_a_new_node_with_a_loopback_address_is_refused_and_the_job_continues(tmp_path: Path) -> None:
    """A loopback address is refused; without --advertise the agent finds a reachable address."""
    try:
        with (
            joined(3) as network,
            NetworkJob(network, TINY, (*FOREVER, "--step-seconds", "0.1"), nodes=1, folder=tmp_path) as job,
        ):
            job.wait(StepCommitted, step=3)
            agent = job.add("node-1", advertise="127.0.0.1")
            refused = job.wait(NodeRefused)
            assert (refused.node, refused.address) == ("node-1", "127.0.0.1")
            assert "--advertise ADDRESS" in refused.why
            assert agent.wait(60) == EXIT_BAD_INPUT, job.story()
            job.add("node-2", advertise="")
            job.wait(GenerationStarted, lambda e: set(e.members) == {"node-0", "node-2"})
            grown = len(job.events)
            job.wait(StepCommitted, world_size=2, since=grown)
            assert not job.all(FailureDetected), job.story()
    except NamespacesRefusedError as error:
        pytest.skip(str(error))


def test_a_new_node_that_does_not_answer_probes_is_refused_before_it_joins(tmp_path: Path) -> None:
    """The node reaches the coordinator but receives nothing from other nodes, so their probes hang."""
    try:
        with (
            joined(2) as network,
            NetworkJob(network, TINY, (*FOREVER, "--step-seconds", "0.1"), nodes=1, folder=tmp_path) as job,
        ):
            job.wait(StepCommitted, step=3)
            network.deafen("node-1")
            agent = job.add("node-1")
            refused = job.wait(NodeRefused)
            assert (refused.node, refused.address) == ("node-1", network.address("node-1"))
            assert agent.wait(60) == EXIT_REFUSED, job.story()
            after = len(job.events)
            job.wait(StepCommitted, since=after)
            assert not job.all(FailureDetected), job.story()
            assert [event.members for event in job.all(GenerationStarted)] == [("node-0",)]
    except NamespacesRefusedError as error:
        pytest.skip(str(error))


def test_a_node_unreachable_from_the_start_joins_no_generation(tmp_path: Path) -> None:
    """Two nodes cannot show which is wrong, so the job waits and names both; with a third node it starts."""
    try:
        with joined(3) as network:
            network.deafen("node-1")
            with NetworkJob(network, TINY, (*FOREVER, "--step-seconds", "0.1"), nodes=2, folder=tmp_path) as job:
                waiting = job.wait(JobWaiting)
                assert all(network.address(node) in waiting.why for node in ("node-0", "node-1"))
                job.add("node-2")
                refused = job.wait(NodeRefused)
                assert (refused.node, refused.address) == ("node-1", network.address("node-1"))
                job.wait(StepCommitted, world_size=2)
                assert not job.all(FailureDetected), job.story()
                assert [set(event.members) for event in job.all(GenerationStarted)] == [{"node-0", "node-2"}]
    except NamespacesRefusedError as error:
        pytest.skip(str(error))
