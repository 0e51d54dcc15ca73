"""Tests that nodes with different data are refused: at the start by majority, later by the members."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from machinery import Job, attach, hello, w

from holdfast.coordination.generations.same_data import TOLERANCE, difference, split_by_data
from holdfast.coordination.instructions import EndJob
from holdfast.errors import EXIT_BAD_INPUT
from holdfast.protocol import events as ev
from holdfast.protocol.batch_summary import BatchSummary, PartSummary
from holdfast.protocol.messages import any_side as msg

LABELS = PartSummary(name="[1]", form="int64 4", digest="aa")


def data(*sums: float, norm: float = 10.0, labels: PartSummary = LABELS) -> BatchSummary:
    return (PartSummary(name="[0]", form="float32 4x8", sums=sums, norm=norm), labels)


ONE, OTHER = data(1.0, -3.0), data(5.0, 2.0)


def connect_with_data(job: Job, node: str, summary: BatchSummary) -> list[msg.EndNode]:
    """Connect a node with these data; return the orders that end it."""
    job.connect(hello(node))
    job.deliver(msgspec.structs.replace(attach(w(node)), data=summary))
    return job.sent(msg.EndNode)


def started(job: Job) -> list[tuple[str, ...]]:
    return [event.members for event in job.events if isinstance(event, ev.GenerationStarted)]


def test_float_noise_is_not_a_difference() -> None:
    noise = data(1.0 + 0.9 * TOLERANCE * 10, -3.0)
    assert difference(noise, ONE) == ""
    assert "part [0] of micro-batch 0 of step 1 (float32 4x8) has other values" in difference(OTHER, ONE)
    assert difference(data(1.0 + 1.1 * TOLERANCE * 10, -3.0), ONE)


@pytest.mark.parametrize(
    "other",
    [
        data(float("nan"), -3.0),
        data(1.0),
        data(1.0, -3.0, labels=msgspec.structs.replace(LABELS, digest="bb")),
        data(1.0, -3.0, labels=msgspec.structs.replace(LABELS, form="int64 5")),
        data(1.0, -3.0, labels=msgspec.structs.replace(LABELS, name="[2]")),
        data(1.0, -3.0)[:1],
    ],
    ids=["not a number", "fewer sums", "labels", "form", "name", "fewer parts"],
)
def test_summaries_with_different_parts_differ(other: BatchSummary) -> None:
    assert difference(other, ONE)
    assert difference(ONE, other)


def test_the_difference_message_names_both_parts_and_their_source() -> None:
    """For parts with different names, the message once said "int64 4, the job's is int64 4"."""
    renamed = (ONE[0], msgspec.structs.replace(LABELS, name="['labels']"))
    part = "part ['labels'] of micro-batch 0 of step 1"
    assert difference(renamed, ONE) == f"{part} is int64 4, the job's is part [1], int64 4"
    assert difference(ONE[:1], ONE, "that of n0") == "micro-batch 0 of step 1 has 1 parts, that of n0 has 2"


def test_data_without_a_summary_equals_any_data() -> None:
    assert difference((), ONE) == difference(ONE, ()) == difference((), ()) == ""


@given(st.lists(st.sampled_from("abc-"), max_size=9))
def test_nodes_are_grouped_by_equal_data_largest_group_first(nodes: list[str]) -> None:
    known = {"a": ONE, "b": OTHER, "c": data(1.0, 4.0), "-": ()}
    groups = split_by_data([((number, one), known[one]) for number, one in enumerate(nodes)])
    assert [len(group) for group in groups] == sorted((nodes.count(one) for one in "abc" if one in nodes), reverse=True)
    assert all(len({one for _, one in group}) == 1 for group in groups)


def test_at_the_start_a_node_with_minority_data_is_refused() -> None:
    job = Job(nodes=3).boot()
    connect_with_data(job, "n0", OTHER)
    connect_with_data(job, "n1", ONE)
    (end,) = connect_with_data(job, "n2", ONE)
    assert (end.exit_code, end.alone) == (EXIT_BAD_INPUT, True)
    assert end.why.startswith("node n0 does not fit the job: part [0] of micro-batch 0 of step 1 (float32 4x8)")
    assert "torch.manual_seed" in end.why
    (refused,) = job.emitted(ev.NodeRefused)
    assert (refused.node, refused.why) == ("n0", end.why)
    assert started(job) == []
    job.lose("n0")
    assert connect_with_data(job, "n3", ONE) == []
    assert started(job) == [("n1", "n2", "n3")]


def test_two_nodes_with_different_data_end_the_job_with_a_remedy() -> None:
    job = Job(nodes=2).boot()
    connect_with_data(job, "n0", ONE)
    connect_with_data(job, "n1", OTHER)
    (end,) = [i for i in job.last if isinstance(i, EndJob)]
    assert end.exit_code == EXIT_BAD_INPUT
    assert "worker 0 of n0" in end.why
    assert "worker 0 of n1" in end.why
    assert "torch.manual_seed" in end.why
    assert started(job) == []


def test_a_joining_node_with_different_data_is_refused_and_the_job_continues() -> None:
    job = Job(nodes=2).boot()
    connect_with_data(job, "n0", ONE)
    assert connect_with_data(job, "n1", ONE) == []
    assert started(job) == [("n0", "n1")]
    (end,) = connect_with_data(job, "n2", OTHER)
    assert (end.exit_code, end.alone) == (EXIT_BAD_INPUT, True)
    assert "node n2 does not fit the job" in end.why
    assert connect_with_data(job, "n3", ONE) == []
    assert job.machine.over is None


def test_the_data_summary_is_recorded_for_a_new_coordinator() -> None:
    job = Job(nodes=1).boot()
    connect_with_data(job, "n0", ONE)
    assert job.records[-1].data == ONE
