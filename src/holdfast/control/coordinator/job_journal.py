"""Opens the journal of a job, and checks it against the record in the store."""

from __future__ import annotations

from holdfast.control.coordinator.settings import ServerSettings
from holdfast.control.coordinator.shell import RecordKeeper
from holdfast.control.serving.stored_record import outdated_store
from holdfast.errors import BadInputError, HoldfastError, OutdatedStoreError
from holdfast.observability.journal import Journal
from holdfast.observability.journal_file import FileJournal
from holdfast.observability.metrics import Metrics
from holdfast.protocol.events import name_of
from holdfast.protocol.record import Record


def open_journal(settings: ServerSettings, keeper: RecordKeeper) -> tuple[Journal, Metrics]:
    """Open the events file of a job and check it against the record in the store.

    Without a file, the journal is in memory.

    Returns:
        The journal, and the metrics that continue from its events.

    Raises:
        BadInputError: the file cannot be used, or as `check_journal`.
        OutdatedStoreError: as `check_journal`.
    """
    path, metrics = settings.journal_path, Metrics(settings.job)
    if path is None:
        return Journal(), metrics
    journal = FileJournal(path, on_existing=metrics.observe)
    try:
        check_journal(journal, keeper.record, settings)
    except HoldfastError:
        journal.close()
        raise
    return journal, metrics


def check_journal(journal: FileJournal, record: Record | None, settings: ServerSettings) -> None:
    """Check that the events are from the job in the store, and that the store is not older.

    The journal may be ahead of the record by steps, and by other events that the record does not contain. It is never
    ahead by an event that the record must contain, because the record is written first. A store without them is
    accepted only if the job has ended, or no process of an earlier run lives.

    Raises:
        BadInputError: the events belong to another job, or to a job that the store does not know.
        OutdatedStoreError: the store is older than the job.
    """
    path, newest = settings.journal_path, journal.recorded
    if journal.last_seq and journal.job != settings.job:
        why = f"holds events of job {journal.job!r}, not of {settings.job!r}"
        raise BadInputError(f"the events file {path} {why}: give another file, or remove it")
    if not lags_behind(record, journal) or journal.ended or settings.alone:
        return
    if record is None or newest is None:
        why = (
            f"holds {journal.last_seq} events of a job that has not ended, and the store {settings.store} knows "
            "nothing of it"
        )
        raise BadInputError(
            f"the events file {path} {why}: give that job's store; if the job is gone, give another file, or remove it"
        )
    newer = (
        f"it ends with event {record.newest_event} (coordinator {record.term}, generation {record.generation}), "
        f"and {path} has event {newest.seq}, {name_of(newest)} (coordinator {newest.term}, generation "
        f"{newest.generation})"
    )
    raise OutdatedStoreError(outdated_store("job", settings.store, newer))


def lags_behind(record: Record | None, journal: Journal) -> bool:
    """Return whether the journal has an event that the record must contain, and does not: the record is then too old.

    If `record` is None, return whether the journal has any event.
    """
    newest = journal.recorded
    if record is None:
        return journal.last_seq > 0
    if newest is None:
        return False
    known = record.newest_event, record.term, record.generation
    return any(
        in_journal > in_record
        for in_journal, in_record in zip((newest.seq, newest.term, newest.generation), known, strict=True)
    )
