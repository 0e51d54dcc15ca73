"""Tests of grouped writes: for any grouping of inputs, no message is sent before its record is written."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import reduce
from itertools import pairwise
from random import Random

import msgspec
import pytest
from machinery import Job, attach, hello, w

from holdfast.coordination.inputs import Input
from holdfast.coordination.instructions import Emit, Instruction, Persist, at_once
from holdfast.coordination.pool.instructions import DisconnectNode, EmitPool, PersistPool, PoolInstruction
from holdfast.coordination.pool.instructions import merge_answers as pool_at_once
from holdfast.coordination.progress.journal_repair import missing_events
from holdfast.protocol.messages import any_side as msg
from holdfast.protocol.pool.events import PoolStoreReturned
from holdfast.protocol.pool.record import POOL_SCHEMA, PoolRecord
from holdfast.protocol.position import Position


@dataclass
class Recording(Job):
    """Records the answers of the state machine."""

    answers: list[list[Instruction]] = field(default_factory=list[list[Instruction]])

    def feed(self, event: Input, after: float = 0.0) -> list[Instruction]:
        answer = super().feed(event, after)
        self.answers.append(answer)
        return answer


def a_story() -> Recording:
    """Return a job in which nodes join and train, one is lost, and another joins."""
    job = Recording(nodes=3)
    job.start()
    job.step(1)
    job.step(2)
    job.lose("n2")
    job.report("n0", 2)
    job.report("n1", 2)
    for node in ("n0", "n1"):
        job.deliver(msg.Entered(worker=w(node), generation=2, applied=2))
    job.step(3, "n0", "n1", generation=2)
    job.connect(hello("n3"))
    job.deliver(attach(w("n3")))
    for node in ("n0", "n1", "n3"):
        job.deliver(msg.Prepared(worker=w(node), generation=3))
    job.tick(0.5)
    return job


def without_writes(instructions: list[Instruction]) -> list[Instruction]:
    return [one for one in instructions if not isinstance(one, Persist)]


@pytest.mark.parametrize("seed", range(20))
def test_grouped_writes_send_the_same_messages_none_before_its_record(seed: int) -> None:
    story, rng = a_story(), Random(seed)
    answers = story.answers
    assert sum(isinstance(answer[0], Persist) for answer in answers if answer) > 5, "the story contains enough writes"
    cuts = sorted({0, len(answers), *rng.choices(range(len(answers)), k=rng.randint(1, 20))})
    journal = story.events[:1]  # the event of its start
    for begin, end in pairwise(cuts):
        group = answers[begin:end]
        together = at_once(group)
        alone = [one for answer in group for one in answer]
        assert without_writes(together) == without_writes(alone)
        records = [one for one in alone if isinstance(one, Persist)]
        tail = reduce(Position.after, journal, Position())
        if records:
            (write,) = [place for place, one in enumerate(together) if isinstance(one, Persist)]
            assert together[:write] == without_writes(together[:write])
            assert alone.index(records[0]) == write, "messages that depend on no record are sent as before"
            persist = together[write]
            assert isinstance(persist, Persist)
            last = records[-1].record
            assert msgspec.structs.replace(persist.record, position=last.position, outbox=last.outbox) == last
            # If the coordinator dies with that write, the next one finds all events that led to the record.
            before = [one.event for one in together[:write] if isinstance(one, Emit)]
            told = missing_events(persist.record, reduce(Position.after, before, tail))
            all_events = [one.event for one in together if isinstance(one, Emit)]
            assert [*before, *told] == all_events[: len(before) + len(told)]
            assert told[-1:] == list(last.outbox[-1:]) or not last.outbox
        journal += [one.event for one in together if isinstance(one, Emit)]
    assert [event.seq for event in journal] == list(range(1, len(journal) + 1))


def test_a_group_of_one_answer_is_unchanged() -> None:
    for answer in a_story().answers:
        assert at_once([answer]) == answer


def test_a_grouped_pool_record_contains_the_events_of_all_records() -> None:
    record = PoolRecord(schema=POOL_SCHEMA, pool="p")
    events = [PoolStoreReturned(time=1.0, pool="p", term=1, seq=number, away_s=1.0) for number in range(4)]
    tell = [DisconnectNode(number) for number in range(4)]
    answers: list[list[PoolInstruction]] = [
        [EmitPool(events[0]), tell[0]],
        [PersistPool(msgspec.structs.replace(record, version=1, outbox=(events[1],))), EmitPool(events[1]), tell[1]],
        [EmitPool(events[2]), tell[2]],
        [PersistPool(msgspec.structs.replace(record, version=2)), tell[3]],
        [EmitPool(events[3])],
    ]
    together = pool_at_once(answers)
    assert together == [
        *answers[0],
        PersistPool(msgspec.structs.replace(record, version=2, outbox=(events[1], events[2]))),
        *(EmitPool(events[1]), tell[1], EmitPool(events[2]), tell[2], tell[3], EmitPool(events[3])),
    ]
