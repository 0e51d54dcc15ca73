"""Tests of a record older than the job: agents' reports reveal it, and no worker is stopped because of it."""

from __future__ import annotations

from machinery import Job, attach, hello, w
from msgspec.structs import replace

from holdfast.coordination.instructions import Broadcast, Close, Emit, Persist, Send, StopOutdated
from holdfast.protocol import events as ev
from holdfast.protocol.messages import any_side as msg
from holdfast.protocol.messages.agent import HeardGeneration
from holdfast.protocol.record import SCHEMA, Record

IDENTITY = "0123456789abcdef"


def from_backup(*, generation: int = 1) -> Job:
    """Start a coordinator from a backup of the record of a job in which n0 and n1 trained in a generation."""
    before = Job(nodes=2).start()
    record = replace(before.records[-1], identity=IDENTITY, generation=generation)
    return Job(nodes=2, records=[record], events=before.events, now=before.now + 1.0).boot()


def reconnect(
    job: Job, node: str, generation: int, *, term: int = 1, identity: str = IDENTITY, heard_term: int = 1
) -> None:
    heard = HeardGeneration(identity=identity, term=heard_term, generation=generation)
    kept = (attach(w(node)), msg.Entered(worker=w(node), generation=generation, applied=0))
    job.connect(replace(hello(node, kept, term=term), heard=heard))


def stopped(job: Job) -> str:
    """Return the reason with which the last answer ended the coordinator, or ""."""
    return next((one.newer for one in job.last if isinstance(one, StopOutdated)), "")


def test_an_agent_in_a_newer_generation_stops_the_outdated_coordinator() -> None:
    job = from_backup()
    reconnect(job, "n0", 2)
    assert stopped(job) == "node n0 is in generation 2, and the store ends with generation 1"
    assert isinstance(job.last[0], Persist), "the write finds out whether another coordinator leads"
    assert not [one for one in job.last if isinstance(one, Send | Broadcast | Close | Emit)]


def test_an_agent_with_an_equal_generation_number_can_still_be_newer() -> None:
    """The outdated coordinator started generations of its own; an agent in the first one of that number is newer."""
    job = from_backup()
    job.machine.transaction.change(generation=5)
    reconnect(job, "n1", 5, heard_term=1)
    assert stopped(job)


def test_agents_in_the_same_generation_do_not_stop_the_coordinator() -> None:
    job = from_backup()
    for node in ("n0", "n1"):
        reconnect(job, node, 1)
        assert not stopped(job)
    assert job.machine.state == "running"


def test_no_agent_stops_a_coordinator_with_a_confirmed_record() -> None:
    job = from_backup()
    for node in ("n0", "n1"):
        reconnect(job, node, 1)
    reconnect(job, "n7", 40)
    assert not stopped(job)


def test_a_training_agent_stops_a_coordinator_that_lost_its_store() -> None:
    job = Job(nodes=2)
    job.records.append(Record(schema=SCHEMA, job="job", term=1, identity="fedcba9876543210"))
    job.boot()
    reconnect(job, "n0", 3)
    assert stopped(job) == "node n0 is in generation 3, and the store ends with generation 0"


def test_an_agent_of_another_job_does_not_stop_a_started_job() -> None:
    job = from_backup()
    reconnect(job, "n7", 40, identity="fedcba9876543210")
    assert not stopped(job)


def test_a_newer_term_alone_does_not_stop_the_coordinator() -> None:
    """A coordinator with an older store was seen; this coordinator leads, and continues with a higher term."""
    job = from_backup()
    reconnect(job, "n0", 1, term=9)
    assert not stopped(job)
    assert job.machine.record.term == 10
    assert isinstance(job.last[0], Persist)
    assert [event.term for event in job.emitted(ev.CoordinatorRestarted)][-1] == 10
    welcome = next(one.message for one in job.last if isinstance(one, Send) and isinstance(one.message, msg.Welcome))
    assert welcome.term == 10
    assert welcome.identity == IDENTITY


def test_a_newer_term_of_another_job_is_ignored() -> None:
    job = from_backup()
    reconnect(job, "n0", 1, term=9, identity="fedcba9876543210")
    assert [type(one) for one in job.last] == [Close]


def test_a_coordinator_without_a_plan_first_waits_for_newer_agents() -> None:
    job = Job(nodes=1)
    job.records.append(Record(schema=SCHEMA, job="job", term=1, identity=IDENTITY))
    job.boot()
    job.connect(hello("n0"))
    job.deliver(attach(w("n0")))
    assert job.orders(msg.Begin) == {}
    job.tick(2.9)
    assert job.machine.record.plan is None
    job.deliver_from("n0", msg.Heartbeat(generation=0, applied=()))
    job.tick(0.2)
    assert job.machine.record.plan is not None
