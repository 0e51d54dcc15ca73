"""Tests of nodes that do not fit the job: they receive the reason and end, without a failure or departure."""

from __future__ import annotations

import msgspec
import pytest
from machinery import Job, attach, hello, w

from holdfast.protocol import events as ev
from holdfast.protocol.failures import FailureKind
from holdfast.protocol.layouts.layout import Layout
from holdfast.protocol.messages import any_side as msg

OTHERS = {
    "another model": {"config": {"model": "large"}},
    "another layout": {"layout": Layout(shard=2)},
}


def a_job_of_two() -> Job:
    """Return a job in which two nodes train, with room for a third."""
    job = Job(nodes=2)
    job.start()
    job.step(1)
    return job


def connect_unfit(job: Job, node: str, **fields: object) -> msg.EndNode:
    """Connect a node that does not fit; return the order that ends it."""
    job.connect(hello(node))
    job.deliver(msgspec.structs.replace(attach(w(node)), **fields))
    (end,) = job.sent(msg.EndNode)
    return end


def told_of(job: Job, node: str) -> list[str]:
    """Return the events that report a node as joined, failed or left."""
    told: list[str] = []
    for event in job.events:
        if isinstance(event, ev.FailureDetected | ev.NodeLeft | ev.NodeRepaired) and event.node == node:
            told.append(type(event).__name__)
        elif isinstance(event, ev.NodesJoined):
            told += ["NodesJoined" for one in event.nodes if one.node == node]
    return told


@pytest.mark.parametrize("fields", OTHERS.values(), ids=OTHERS)
@pytest.mark.parametrize("how", ["its connection ends", "it says no more"])
def test_an_unfit_node_is_not_reported_as_failed_or_left(fields: dict[str, object], how: str) -> None:
    job = a_job_of_two()
    end = connect_unfit(job, "n2", **fields)
    assert (end.exit_code, end.alone) == (2, True)
    assert "node n2 does not fit the job" in end.why or "takes 2 workers" in end.why
    (refused,) = job.emitted(ev.NodeRefused)
    assert (refused.node, refused.why) == ("n2", end.why)
    if how == "its connection ends":
        job.lose("n2")
    else:
        for _ in range(8):  # until its lease is over
            job.tick(1.0)
            job.deliver_from("n0", msg.Heartbeat())
            job.deliver_from("n1", msg.Heartbeat())
    assert told_of(job, "n2") == []
    assert "n2" not in job.machine.members.nodes


def test_a_job_waiting_at_the_start_names_the_unfit_node() -> None:
    job = Job(nodes=2).boot()
    job.connect(hello("n0"))
    job.deliver(attach(w("n0")))
    connect_unfit(job, "n1", config={"model": "large"})
    job.tick(0.5)
    (waits,) = job.emitted(ev.JobWaiting)
    assert (waits.nodes, waits.why) == (1, "node n1 does not fit the job: model is large, the job's is small")
    job.lose("n1")
    assert told_of(job, "n1") == []


def test_a_node_with_bad_script_input_is_not_reported_as_failed_or_left() -> None:
    job = a_job_of_two()
    job.connect(hello("n2"))
    why = "--data /d: there is no such folder"
    job.deliver_from("n2", msg.WorkerDown(worker=w("n2"), kind=FailureKind.PROCESS_EXIT, detail=why, exit_code=2))
    (end,) = job.sent(msg.EndNode)
    assert (end.exit_code, end.why, end.alone) == (2, why, True)
    job.lose("n2")
    assert told_of(job, "n2") == []


def test_a_refused_node_joins_once_it_returns_and_fits() -> None:
    job = a_job_of_two()
    connect_unfit(job, "n2", config={"model": "large"})
    job.connect(hello("n2", session="0000beef"))
    assert job.sent(msg.Welcome)
    job.deliver(attach(w("n2", "b")))
    assert told_of(job, "n2") == ["NodesJoined"]


def test_a_member_that_returns_with_another_model_has_failed() -> None:
    job = a_job_of_two()
    down = msg.WorkerDown(worker=w("n1"), kind=FailureKind.PROCESS_EXIT, detail="killed by SIGKILL", exit_code=1)
    job.deliver_from("n1", down)
    job.deliver(attach(w("n1", "b"), model="large"))
    assert job.sent(msg.EndNode)
    job.lose("n1")
    assert told_of(job, "n1") == ["NodesJoined", "FailureDetected", "FailureDetected", "NodeLeft"]
