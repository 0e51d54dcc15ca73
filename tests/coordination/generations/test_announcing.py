"""Tests of many nodes that arrive together: one generation, few events and few writes."""

from __future__ import annotations

import msgspec
import pytest
from machinery import Job, attach, hello, w

from holdfast.coordination.generations.announcing import FEW, GATHER_S, LONGEST_GATHER_S, QUIET_S, TOGETHER_S
from holdfast.coordination.instructions import Persist
from holdfast.protocol import events as ev
from holdfast.protocol.job_spec import JobSpec, RecoverySpec
from holdfast.protocol.messages import any_side as msg

MANY = 100


def connect(job: Job, nodes: list[str]) -> None:
    for node in nodes:
        job.connect(msgspec.structs.replace(hello(node), session=f"{int(node[1:]):08x}"))


def connect_and_attach(job: Job, nodes: list[str]) -> None:
    """Connect all nodes at once; their workers attach one after the other."""
    connect(job, nodes)
    for place, node in enumerate(nodes):
        job.deliver(attach(w(node)), after=0.001)
        if place % 50 == 49:
            job.tick(0.0)


def pass_time(job: Job, seconds: float) -> None:
    """Advance the time while all nodes send heartbeats."""
    for _ in range(round(seconds / 0.1)):
        job.tick(0.1)
        for node in job.connections:
            job.deliver_from(node, msg.Heartbeat())


def joined(job: Job) -> list[int]:
    return [len(event.nodes) for event in job.events if isinstance(event, ev.NodesJoined)]


def generations(job: Job) -> list[tuple[str, int]]:
    found = [event for event in job.events if isinstance(event, ev.GenerationStarted)]
    return [(event.reason, event.world_size) for event in found]


def test_nodes_that_start_together_cause_one_generation_and_few_writes() -> None:
    job = Job(nodes=MANY).boot()
    connect_and_attach(job, [f"n{number}" for number in range(MANY)])
    assert generations(job) == [("start", MANY)]
    assert sum(joined(job)) == MANY
    assert len(joined(job)) <= 2 + 0.001 * MANY / TOGETHER_S
    # The term, the script and the configuration of the first node, and the generation.
    assert len(job.records) == 4


def test_nodes_that_return_together_after_a_full_loss_form_one_generation() -> None:
    job = Job(nodes=3).start()
    for node in ("n0", "n1", "n2"):
        job.lose(node)
    connect_and_attach(job, [f"n{number}" for number in range(10, 10 + MANY)])
    pass_time(job, QUIET_S + 0.1)
    assert generations(job) == [("start", 3), ("start", MANY)]


def test_nodes_that_join_together_are_admitted_in_one_generation() -> None:
    job = Job(nodes=3).start()
    connect_and_attach(job, [f"n{number}" for number in range(10, 10 + MANY)])
    pass_time(job, QUIET_S + 0.1)
    pending = job.machine.record.pending
    assert pending is not None
    assert (pending.generation, len(pending.members)) == (2, 3 + MANY)
    assert sum(joined(job)) == 3 + MANY


def taken_in(job: Job) -> int:
    pending = job.machine.record.pending
    return len(pending.members) - 1 if pending else 0


CROWD = [f"n{number}" for number in range(10, 12 + FEW)]


def test_many_joining_nodes_wait_a_limited_time_for_one_without_workers() -> None:
    job = Job(nodes=1).start()
    connect(job, CROWD)
    for node in CROWD[1:]:
        job.deliver(attach(w(node)))
    pass_time(job, GATHER_S - 0.1)
    assert taken_in(job) == 0
    pass_time(job, 0.2)
    assert taken_in(job) == len(CROWD) - 1


def test_many_joining_nodes_wait_briefly_for_further_connections() -> None:
    job = Job(nodes=1).start()
    connect_and_attach(job, CROWD[:-1])
    pass_time(job, QUIET_S - 0.1)
    connect(job, CROWD[-1:])
    job.deliver(attach(w(CROWD[-1])))
    assert taken_in(job) == 0
    pass_time(job, QUIET_S + 0.1)
    assert taken_in(job) == len(CROWD)


def test_an_endless_stream_of_joining_nodes_is_admitted_after_a_limit() -> None:
    job = Job(nodes=1).start()
    connect(job, CROWD)
    came = 0
    while not taken_in(job):
        came += 1
        connect(job, [f"n{100 + came}"])
        job.deliver(attach(w(f"n{100 + came}")), after=0.1)
        job.tick(0.0)
        for node in job.connections:
            job.deliver_from(node, msg.Heartbeat())
    assert came * 0.1 == pytest.approx(LONGEST_GATHER_S, abs=0.2)


@pytest.mark.parametrize("many", [1, 2, FEW])
def test_a_few_joining_nodes_do_not_wait_for_each_other(many: int) -> None:
    """A job this small starts and grows as soon as possible."""
    job = Job(nodes=1).start()
    connect(job, CROWD[:many])
    job.deliver(attach(w(CROWD[0])))
    assert taken_in(job) == 1
    job = Job(nodes=many, spec=JobSpec(min_nodes=1)).boot()
    connect(job, CROWD[:many])
    job.deliver(attach(w(CROWD[0])))
    assert generations(job) == [("start", 1)]


def test_the_job_starts_at_once_when_all_its_nodes_have_joined() -> None:
    job = Job(nodes=MANY, spec=JobSpec(min_nodes=MANY // 2)).boot()
    names = [f"n{number}" for number in range(MANY)]
    connect(job, names)
    for node in names:
        assert not generations(job)
        job.deliver(attach(w(node)))
    assert generations(job) == [("start", MANY)]


def test_the_join_window_delays_nodes_that_join_together() -> None:
    job = Job(nodes=1, spec=JobSpec(recovery=RecoverySpec(join_window=5.0))).start()
    for node in ("n1", "n2"):
        job.connect(hello(node))
        job.deliver(attach(w(node)), after=1.0)
    for _ in range(50):
        assert job.machine.record.pending is None
        job.tick(0.1)
        for node in ("n0", "n1", "n2"):
            job.deliver_from(node, msg.Heartbeat())
    job.tick(0.1)
    assert job.machine.record.pending is not None


def test_a_node_lost_before_its_announcement_is_not_announced_as_joined() -> None:
    job = Job(nodes=5).boot()
    for node in ("n0", "n1"):
        job.connect(hello(node))
        job.deliver(attach(w(node)))
    job.lose("n1")
    job.tick(0.2)
    assert [event.names for event in job.events if isinstance(event, ev.NodesJoined)] == [("n0",)]


def test_reconnections_to_a_new_coordinator_cause_no_writes() -> None:
    """Each node describes its workers, which does not change the record."""
    first = Job(nodes=MANY).boot()
    connect_and_attach(first, [f"n{number}" for number in range(MANY)])
    job = Job(nodes=MANY, records=first.records, events=first.events, now=first.now + 1.0).boot(takeover=True)
    before = len(job.records)
    for number in range(MANY):
        node = f"n{number}"
        kept = (attach(w(node)), msg.Begun(worker=w(node), generation=1))
        entered = msg.Entered(worker=w(node), generation=1, applied=0)
        job.connect(msgspec.structs.replace(hello(node, (*kept, entered), term=1), session=f"{number:08x}"))
        assert not any(isinstance(instruction, Persist) for instruction in job.last)
    assert len(job.records) == before
    assert generations(job) == [("start", MANY)]
    assert job.machine.state == "running"


def test_a_new_node_enters_a_generation_only_with_all_its_workers() -> None:
    job = Job(nodes=2).boot()
    for node in ("n0", "n1"):
        job.connect(msgspec.structs.replace(hello(node), workers=2))
    job.deliver(attach("n0/0/a"))
    job.deliver(attach("n1/0/a"))
    job.deliver(attach("n1/1/a"))
    job.deliver(attach("n0/1/a"))
    for worker in job.machine.record.plan.workers:
        job.deliver(msg.Entered(worker=worker, generation=1, applied=0))
    job.lose("n0")
    job.lose("n1")
    job.connect(msgspec.structs.replace(hello("n0", session="5" * 8), workers=2))
    job.deliver(attach("n0/0/b"))
    assert job.machine.record.plan is None, "no node is complete"
    job.connect(msgspec.structs.replace(hello("n1", session="6" * 8), workers=2))
    job.deliver(attach("n1/0/b"))
    job.deliver(attach("n1/1/b"))
    assert job.machine.record.plan.workers == ("n1/0/b", "n1/1/b")
    for worker in job.machine.record.plan.workers:
        job.deliver(msg.Entered(worker=worker, generation=2, applied=0))
    assert job.machine.record.pending is None
    job.deliver(attach("n0/1/b"))
    assert job.machine.record.pending.workers == ("n1/0/b", "n1/1/b", "n0/0/b", "n0/1/b")
    told = [event for event in job.events if isinstance(event, ev.NodesJoined | ev.GenerationStarted)]
    names = [event.names if isinstance(event, ev.NodesJoined) else event.members for event in told]
    assert names[-3:] == [("n1",), ("n1",), ("n0",)], told
