"""Training continues without the store: decisions wait until the store is available again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from job_cases import FOREVER, StartJob, goes_on, goes_on_until_interrupted

from etcd_server import EtcdServer
from holdfast.errors import RefusedError
from holdfast.protocol.events import (
    FailureDetected,
    GenerationStarted,
    JobStarted,
    Recovered,
    StepCommitted,
    StoreReturned,
)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EtcdServer]:
    server = EtcdServer(tmp_path / "etcd")
    yield server
    server.kill()


def test_a_node_lost_while_the_store_is_away_is_handled_when_the_store_returns(
    start_job: StartJob, server: EtcdServer
) -> None:
    job = start_job(*FOREVER, "--step-seconds", "0.2", options=("--store", server.url))
    job.wait(StepCommitted, step=5)
    server.kill()
    goes_on(job, 5)
    assert "nothing is decided" not in job.output(), "a decision was needed although no node was lost"
    victim = job.nodes()[1]
    job.signal_node(victim)
    job.wait_output("nothing is decided until the store answers, training goes on")
    job.wait(FailureDetected, node=victim)
    seen = len(job.events)
    with job.client() as client, pytest.raises(RefusedError, match=r"the store has been unavailable for \d+ s"):
        client.status()
    assert len(job.events) == seen, "an event was sent before it was written"

    server.start()
    job.wait(Recovered, action="shrink")
    assert len(job.all(GenerationStarted)) == 2
    assert "the store answers again" in job.output()
    (returned,) = job.all(StoreReturned)
    assert returned.away_s > 0
    assert len(job.all(JobStarted)) == 1, "the coordinator was replaced"
    goes_on_until_interrupted(job)


def test_a_store_that_hangs_delays_no_step(start_job: StartJob, server: EtcdServer) -> None:
    job = start_job(*FOREVER, "--step-seconds", "0.2", options=("--store", server.url))
    job.wait(StepCommitted, step=5)
    server.halt()
    try:
        goes_on(job, 10)
        job.signal_node(job.nodes()[1])
        job.wait_output("nothing is decided until the store answers")
    finally:
        server.go_on()
    job.wait(Recovered, action="shrink")
    goes_on_until_interrupted(job)
