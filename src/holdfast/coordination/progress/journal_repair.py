"""Finds events that the record knows but the journal has lost, for example in a power failure."""

from __future__ import annotations

from holdfast.protocol.events import AnyEvent, JournalRepaired
from holdfast.protocol.position import Position
from holdfast.protocol.record import Record


def missing_events(record: Record, tail: Position) -> list[AnyEvent]:
    """Return the events to append to a journal that ends at `tail`, so that it continues from the record.

    The record contains all events of its last transition. A single `journal_repaired` replaces earlier missing ones.
    No step is lost: agents drop only steps that the record knows, so they report all later steps again.
    """
    out: list[AnyEvent] = []
    known = record.position
    if tail.seq < known.seq:
        out.append(
            JournalRepaired(
                time=record.outbox[0].time if record.outbox else known.step_time,
                job=record.job,
                term=record.term,
                generation=record.plan.generation if record.plan else 0,
                seq=known.seq,
                from_seq=tail.seq + 1,
                to_seq=known.seq,
                from_step=tail.step,
                to_step=known.step,
                samples=known.samples,
                step_samples=known.step_samples,
                loss=known.loss,
                step_time=known.step_time,
                skipped_in_a_row=known.skipped_in_a_row,
            )
        )
    return out + [event for event in record.outbox if event.seq > tail.seq]
