"""Tests of machine states that nodes report: files that cannot be written, and GPUs."""

from __future__ import annotations

from machinery import Job

from holdfast.coordination.inputs import FileFailed
from holdfast.protocol import events as ev
from holdfast.protocol.messages.agent import GpusRead, OutputFailed
from holdfast.protocol.messages.gpus import GpuFacts


def test_a_failed_log_write_is_reported_once_per_node_and_file() -> None:
    job = Job(nodes=2).start()
    for node, file in (("n0", "a"), ("n0", "a"), ("n0", "b"), ("n1", "a")):
        job.deliver_from(node, OutputFailed(file=file, why="No space left on device"))
    lost = [event for event in job.events if isinstance(event, ev.OutputLost)]
    assert [(event.node, event.file) for event in lost] == [("n0", "a"), ("n0", "b"), ("n1", "a")]
    assert {event.why for event in lost} == {"No space left on device"}


def test_the_number_of_file_failures_reported_per_node_is_bounded() -> None:
    job = Job(nodes=2).start()
    for number in range(1000):
        job.deliver_from("n0", OutputFailed(file=f"{number}", why="full"))
    assert sum(isinstance(event, ev.OutputLost) for event in job.events) == 256


def test_the_gpu_facts_reported_by_a_node_are_kept() -> None:
    job, hot = Job(nodes=2).start(), GpuFacts(index=0, temperature_c=90)
    job.deliver_from("n1", GpusRead(gpus=(hot,)))
    assert {name: node.gpus for name, node in job.machine.members.nodes.items()} == {"n0": (), "n1": (hot,)}
    assert [event for event in job.events if isinstance(event, ev.NodeLeft)] == []


def test_a_failed_file_of_the_coordinator_is_reported_without_a_node() -> None:
    job = Job(nodes=2).start()
    job.feed(FileFailed("events.jsonl", "full"))
    (lost,) = job.emitted(ev.OutputLost)
    assert (lost.node, lost.file, lost.why) == ("", "events.jsonl", "full")
