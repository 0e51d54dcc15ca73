"""Tests of layouts: the first worker sets the layout, and nodes with another one are refused."""

from __future__ import annotations

import msgspec
import pytest
from machinery import Job, attach, hello

from holdfast.protocol.layouts.layout import WHOLE, Layout
from holdfast.protocol.messages import any_side as msg

SHARD_2, TENSOR_2 = Layout(shard=2), Layout(tensor=2)


def a_node(job: Job, name: str, layout: Layout, workers: int = 2, **fields: object) -> msg.EndNode | None:
    """Connect a node and attach its first worker; return the order that ends the node if it does not fit."""
    job.connect(msgspec.structs.replace(hello(name), workers=workers))
    fields = {"layout": layout, **fields}
    job.deliver(msgspec.structs.replace(attach(msg.worker_id(name, 0, "a")), **fields))
    ended = job.sent(msg.EndNode)
    return ended[0] if ended else None


def test_the_first_worker_sets_the_layout() -> None:
    job = Job(nodes=2).boot()
    assert a_node(job, "n0", SHARD_2) is None
    assert job.machine.record.layout == SHARD_2
    assert a_node(job, "n1", SHARD_2) is None


@pytest.mark.parametrize(
    ("theirs", "said"),
    [
        (TENSOR_2, "layout is tensor 2, the job's is shard 2"),
        (WHOLE, "layout is a whole replica per worker, the job's is shard 2"),
    ],
)
def test_a_node_with_another_layout_is_refused_with_the_difference(theirs: Layout, said: str) -> None:
    job = Job(nodes=2).boot()
    a_node(job, "n0", SHARD_2)
    ended = a_node(job, "n1", theirs)
    assert ended is not None
    assert ended.alone
    assert said in ended.why
    assert "n1" not in job.machine.members.nodes


def test_a_node_with_an_incomplete_replica_group_is_refused() -> None:
    job = Job(nodes=1).boot()
    ended = a_node(job, "n0", Layout(shard=2, tensor=2), workers=6)
    assert ended is not None
    assert "takes 4 workers of a node" in ended.why
    assert "node n0 has 6 workers: give --workers-per-node a multiple of 4" in ended.why
    assert job.machine.record.config == {}


def test_a_micro_batch_that_cannot_be_split_is_refused() -> None:
    job = Job(nodes=1).boot()
    ended = a_node(job, "n0", Layout(shard=8), workers=8)
    assert ended is not None
    assert ended.why.startswith("a micro-batch of 4 samples cannot be split evenly over shard 8")
    assert a_node(job, "n1", Layout(shard=4), workers=8) is None


def test_a_pipeline_layout_is_refused() -> None:
    ended = a_node(Job(nodes=1).boot(), "n0", Layout(stages=2))
    assert ended is not None
    assert "no pipelines yet" in ended.why
