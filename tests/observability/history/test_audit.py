"""The audit of a journal: any event that is removed, duplicated or edited is reported with its line."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.coordination.progress.journal_repair import missing_events
from holdfast.observability.history.audit import AuditResult, FindingSubject, audit_events, audit_lines
from holdfast.protocol import events as ev
from holdfast.protocol.events import EVENTS as KINDS
from holdfast.protocol.position import Position
from holdfast.protocol.record import SCHEMA, Record
from holdfast.step_samples import StepSamples
from made_events import made
from tests.simulation.cluster import SimCluster
from tests.simulation.faults.plans import Fault, FaultKind, FaultPlan

SAMPLES = StepSamples(seed=4, micro_batches=3, micro_batch=2)
#: Edits of fields, and the events in which the edited field proves something (by default all).
EDITS: dict[str, Callable[[Any], Any]] = {
    "seq": lambda old: old + 1,
    "term": lambda old: old + 1,
    "generation": lambda old: old + 7,
    "job": lambda old: old + "x",
    "step": lambda old: old + 1,
    "samples": lambda old: old + 1,
    "sample_hashes": lambda old: old ^ 1,
    "micro_batches": lambda old: old + 1,
    "seed": lambda old: old + 1,
    "global_batch": lambda old: old + 1,
    "to_step": lambda old: old + 1,
    "steps": lambda old: old - 1,
    "event": lambda old: "stepcommitted",
}
PROVING = {
    "step": {"step_committed"},
    "samples": {"step_committed", "job_finished"},
    "event": {"job_started", "step_committed"},
}


@cache
def journal() -> tuple[bytes, ...]:
    """The journal of a simulated job: a refusal, failures, a second coordinator, a join, a rollback, an end."""
    faults = (
        Fault(kind=FaultKind.CORRUPT_SUM, boundary="reducing", step=2, target=1),
        Fault(kind=FaultKind.KILL_NODE, boundary="reducing", step=4, target=2),
        Fault(kind=FaultKind.CRASH_COORDINATOR, boundary="applied", step=5, target=0, duration=0.2),
        Fault(kind=FaultKind.JOIN, boundary="applied", step=7, target=0),
        *(Fault(kind=FaultKind.KILL_NODE, time=1.6 + 0.001 * number) for number in range(3)),
    )
    plan = FaultPlan(seed=3, nodes=3, start_nodes=3, steps=40, checkpoint_every=5, start_spread=0.0, faults=faults)
    cluster = SimCluster(plan)
    cluster.run()
    lines = tuple(msgspec.json.encode(event) + b"\n" for event in cluster.world.journal.events)
    kinds = {json.loads(line)["event"] for line in lines}
    assert {"corruption_found", "recovered", "coordinator_restarted", "rolled_back", "job_finished"} <= kinds
    return lines


def named(result: AuditResult) -> dict[int, FindingSubject]:
    """Return the subjects of the findings, by line."""
    return {finding.line: finding.about for finding in reversed(result.findings)}


def test_every_step_of_a_job_with_failures_is_proven() -> None:
    result = audit_lines(journal())
    assert result.sound, result.findings
    assert (result.outcome, result.steps, result.proven, result.unproven) == ("finished", 40, 40, 0)
    assert (result.samples, result.lost_events) == (40 * 24, 0)
    assert result.undone > 0
    assert result.events == len(journal())


@given(data=st.data(), kind=st.sampled_from(["removed", "doubled", "swapped", "cut"]))
def test_removed_duplicated_swapped_and_cut_lines_are_reported(data: st.DataObject, kind: str) -> None:
    lines = list(journal())
    at = data.draw(st.integers(0, len(lines) - 2))
    if kind == "removed":
        del lines[at]
    elif kind == "doubled":
        lines.insert(at, lines[at])
        at += 1
    elif kind == "swapped":
        lines[at], lines[at + 1] = lines[at + 1], lines[at]
    else:
        lines[at] = lines[at][: data.draw(st.integers(1, len(lines[at]) - 2))] + b"\n"
    assert min(named(audit_lines(lines))) == at + 1


@pytest.mark.parametrize("field", sorted(EDITS))
def test_every_edited_field_is_reported_with_its_line(field: str) -> None:
    lines, edited = list(journal()), 0
    events = [json.loads(line) for line in lines]
    for at, event in enumerate(events):
        if field not in event or event["event"] not in PROVING.get(field, KINDS) or (field == "event" and undone(at)):
            continue
        line = json.dumps({**event, field: EDITS[field](event[field])}).encode() + b"\n"
        found = named(audit_lines([*lines[:at], line, *lines[at + 1 :]]))
        assert found, f"line {at + 1}: {event}"
        # An error in a reference value (the first line, or a generation's start) is found at the next event compared
        # with it.
        later = at == 0 or field in ("event", "term", "generation", "seed", "micro_batches", "global_batch")
        assert min(found) == at + 1 or (later and min(found) <= at + 8)
        edited += 1
    assert edited > 0


def undone(at: int) -> bool:
    """Return whether a rollback precedes the next step, because the lineage is then the same without this step."""
    kinds = (json.loads(line)["event"] for line in journal()[at + 1 :])
    return next((kind for kind in kinds if kind in ("step_committed", "rolled_back")), "") == "rolled_back"


def test_a_file_that_ends_within_a_line_is_reported_as_truncated() -> None:
    lines = list(journal())
    lines[-1] = lines[-1][:-1]
    (finding,) = audit_lines(lines).findings
    assert (finding.line, finding.about, finding.what) == (len(lines), FindingSubject.LINE, "it ends in the middle")


def test_a_journal_without_its_last_lines_is_sound_and_running() -> None:
    end = next(at for at, line in enumerate(journal()) if b"job_finished" in line)
    result = audit_lines(journal()[: end - 1])
    assert result.sound
    assert result.outcome == "running"


# ---- constructed journals ----


def numbered(*events: ev.AnyEvent) -> list[ev.AnyEvent]:
    """Return the events with numbers from 1, and one job, term and generation unless an event has its own."""
    out: list[ev.AnyEvent] = []
    for number, event in enumerate(events, 1):
        own = event.seq or (out[-1].seq if out else 0) + 1
        out.append(msgspec.structs.replace(event, job="j", term=event.term or 1, seq=own or number))
    return out


def step(number: int, **fields: Any) -> ev.AnyEvent:
    right = {"samples": 6, "generation": 1, "sample_hashes": SAMPLES.expected(number), "step": number}
    return made("step_committed", float(number), **{**right, **fields})


STARTED = made("job_started")
FIRST = made(
    "generation_started",
    generation=1,
    members=("a",),
    world_size=1,
    reason="start",
    seed=4,
    micro_batches=3,
    global_batch=6,
)


@pytest.mark.parametrize(
    ("events", "about"),
    [
        ([STARTED, FIRST, step(2)], FindingSubject.STEP),
        ([STARTED, FIRST, step(1), step(1)], FindingSubject.STEP),
        ([STARTED, FIRST, step(1, sample_hashes=SAMPLES.expected(2))], FindingSubject.SAMPLES),
        ([STARTED, FIRST, step(1, sample_hashes=SAMPLES.expected(1) + SAMPLES.hash_of(1, 0))], FindingSubject.SAMPLES),
        ([STARTED, FIRST, step(1), step(2, samples=7)], FindingSubject.SAMPLES),
        ([STARTED, FIRST, step(1, samples=0)], FindingSubject.SAMPLES),
        ([STARTED, FIRST, step(1, samples=2)], FindingSubject.SAMPLES),
        ([STARTED, FIRST, step(1, samples=9)], FindingSubject.SAMPLES),
        ([STARTED, FIRST, msgspec.structs.replace(FIRST, generation=2, global_batch=9)], FindingSubject.SAMPLES),
        ([STARTED, FIRST, step(1), msgspec.structs.replace(step(2), time=0.5)], FindingSubject.TIME),
        ([STARTED, FIRST, step(1, generation=0)], FindingSubject.GENERATION),
        ([STARTED, FIRST, step(1, generation=2)], FindingSubject.GENERATION),
        ([STARTED, FIRST, FIRST], FindingSubject.GENERATION),
        ([STARTED, FIRST, made("node_left", generation=3), step(1)], FindingSubject.GENERATION),
        ([STARTED, msgspec.structs.replace(FIRST, world_size=0)], FindingSubject.GENERATION),
        ([STARTED, FIRST, made("coordinator_restarted", generation=1)], FindingSubject.TERM),
        ([STARTED, FIRST, step(1, term=2)], FindingSubject.TERM),
        ([STARTED, FIRST, step(1), made("rolled_back", generation=1, to_step=3)], FindingSubject.ROLL_BACK),
        ([STARTED, FIRST, step(1), step(2), made("rolled_back", generation=1, to_step=1)], FindingSubject.ROLL_BACK),
        ([STARTED, FIRST, step(1), made("job_finished", generation=1, steps=2, samples=12)], FindingSubject.TOTALS),
        ([STARTED, FIRST, step(1), made("job_finished", generation=1, steps=1, samples=12)], FindingSubject.TOTALS),
        ([STARTED, FIRST, made("job_failed", generation=1), step(1)], FindingSubject.SEQUENCE),
        ([FIRST], FindingSubject.SEQUENCE),
        ([STARTED, STARTED], FindingSubject.SEQUENCE),
    ],
)
def test_impossible_events_are_reported_with_their_subject(events: list[ev.AnyEvent], about: FindingSubject) -> None:
    result = audit_events(numbered(*events))
    assert about in {finding.about for finding in result.findings}
    assert result.findings[0].line in (len(events), len(events) - 1)


def test_a_step_without_sample_hashes_is_unproven_but_sound() -> None:
    result = audit_events(numbered(STARTED, FIRST, step(1), step(2, sample_hashes=None, loss=None), step(3)))
    assert result.sound
    assert (result.steps, result.proven, result.unproven) == (3, 2, 1)


def test_an_old_journal_without_sample_hashes_is_unproven_but_sound() -> None:
    before = msgspec.structs.replace(FIRST, seed=None, micro_batches=None)
    result = audit_events(numbered(STARTED, before, step(1, sample_hashes=None), step(2, sample_hashes=None)))
    assert (result.sound, result.proven, result.unproven) == (True, 0, 2)


def test_a_journal_that_begins_with_a_resumed_checkpoint_is_sound() -> None:
    rolled = made("rolled_back", to_step=10)
    result = audit_events(
        numbered(STARTED, rolled, FIRST, step(11), step(12), made("rolled_back", generation=1, to_step=10))
    )
    assert result.sound, result.findings
    assert (result.steps, result.undone, result.proven) == (10, 2, 0)


def test_a_journal_of_a_failed_and_resumed_job_is_sound() -> None:
    second = msgspec.structs.replace(FIRST, generation=2, term=2)
    again = made("coordinator_restarted", term=2)
    events = numbered(
        STARTED, FIRST, step(1), made("job_failed", generation=1), again, second, step(2, generation=2, term=2)
    )
    assert audit_events(events).sound


def repaired(cut: int, **lies: Any) -> AuditResult:
    """Audit a journal that lost its events after `cut` and was repaired from the record."""
    events = numbered(STARTED, FIRST, *(step(number) for number in range(1, 7)))
    whole = Position()
    for event in events:
        whole = whole.after(event)
    tail = Position()
    for event in events[:cut]:
        tail = tail.after(event)
    record = Record(schema=SCHEMA, job="j", term=1, position=whole)
    (mended,) = missing_events(record, tail)
    mended = msgspec.structs.replace(mended, **lies)
    seventh = made("step_committed", 7.0, samples=6, generation=1, sample_hashes=SAMPLES.expected(7), step=7)
    last = msgspec.structs.replace(seventh, job="j", term=1, seq=mended.seq + 1)
    return audit_events([*events[:cut], mended, last])


@pytest.mark.parametrize("cut", [2, 3, 6])
def test_lost_events_are_counted_and_their_steps_are_unproven(cut: int) -> None:
    result = repaired(cut)
    assert result.sound, result.findings
    assert (result.steps, result.lost_events, result.unproven) == (7, 8 - cut, 8 - cut)
    assert result.proven == 7 - result.unproven


@pytest.mark.parametrize(
    ("lies", "about"),
    [
        ({"from_step": 2}, FindingSubject.STEP),
        ({"to_step": 40, "samples": 240}, FindingSubject.STEP),
        ({"samples": 30}, FindingSubject.TOTALS),
        ({"step_samples": 5, "samples": 30}, FindingSubject.SAMPLES),
        ({"from_seq": 7}, FindingSubject.SEQUENCE),
        ({"to_seq": 20}, FindingSubject.SEQUENCE),
    ],
)
def test_an_inconsistent_repair_event_is_reported(lies: dict[str, Any], about: FindingSubject) -> None:
    found = repaired(5, **lies)
    assert named(found)[6] in (about, *(finding.about for finding in found.findings if finding.line == 6))
    assert about in {finding.about for finding in found.findings if finding.line == 6}


def test_a_new_coordinator_may_resume_from_an_unannounced_checkpoint() -> None:
    """`kill -9` of the whole command came after step 3 was saved, and the next run starts there."""
    saved = made("checkpoint_saved", generation=1, step=1)
    again = made("coordinator_restarted", term=2)

    def is_doubted(to_step: int, *between: Any) -> bool:
        back = made("rolled_back", term=2, to_step=to_step)
        found = audit_events(
            numbered(STARTED, FIRST, step(1), saved, step(2), step(3), step(4), *between, back)
        ).findings
        return FindingSubject.ROLL_BACK in {finding.about for finding in found}

    assert not is_doubted(3, again)
    assert is_doubted(5, again), "step 5 was not committed"
    assert is_doubted(3), "the same coordinator would have announced the checkpoint"
