"""Writes, seals and removes parts of checkpoints, one after another, in a thread of its own."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from holdfast.protocol.checkpoints import directory
from holdfast.protocol.checkpoints.directory import DamagedCheckpointError
from holdfast.protocol.checkpoints.names import CheckpointName, parse_name
from holdfast.protocol.messages.orders import AcceptCheckpoint, PruneCheckpoints
from holdfast.protocol.messages.worker import CheckpointKept, CheckpointNews, CheckpointUnwritten, CheckpointWritten
from holdfast.storage import Chunk, Storage, error_text

logger = logging.getLogger(__name__)

SendNews = Callable[[CheckpointNews], None]
#: seconds without progress after which a write counts as failed
STALLED_S = 60.0
_POLL_S = 0.5


def do_nothing() -> None:
    """Do nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PartToWrite:
    """One worker's part of a checkpoint."""

    name: CheckpointName
    worker: str
    #: file name -> function that yields the content
    files: Mapping[str, Callable[[], Iterable[Chunk]]]
    #: number of this part, of `parts`
    part: int = 0
    parts: int = 1
    #: seconds for which the worker did not train while it saved
    stall_s: float = 0.0
    #: monotonic time at which the save began
    begun: float = field(default_factory=time.monotonic)
    #: called when the contents are not needed from now on
    done: Callable[[], None] = do_nothing


class _OvertakenError(OSError):
    """A newer checkpoint counts, so a part of an older one is useless.

    It is an OSError, because a remote storage converts exceptions raised within it to one.
    """


class CheckpointStore:
    """Writes the parts of checkpoints of one process.

    No failure stops it, because training matters more than a checkpoint.

    If the storage hangs (a disk, a remote store), only this thread waits. After `stalled_s` it reports the failure.
    """

    def __init__(
        self,
        storage: Storage,
        tell: SendNews,
        *,
        worker: str,
        at_disk: Callable[[], None] = do_nothing,
        rate: float = 0.0,
        stalled_s: float = STALLED_S,
    ) -> None:
        """Start no thread yet.

        Args:
            storage: where the checkpoints are.
            tell: sends a message to the coordinator; thread-safe.
            worker: the worker named in the report that a checkpoint is sealed.
            at_disk: called before a write; its OSError counts as one of the disk.
            rate: the most bytes per second to write, or 0 without a limit.
            stalled_s: seconds without progress after which a write counts as failed.
        """
        self.storage = storage
        self._tell = tell
        self._worker = worker
        self._at_disk = at_disk
        self._rate = rate
        self._stalled_s = stalled_s
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        #: number of tasks, including the running one
        self._pending = 0
        self._progress_at = time.monotonic()
        #: whether the running task has stalled, and that was reported
        self._is_stalled = False
        #: for each write and seal that is not given up, in order: the message in case it stalls
        self._due: list[CheckpointUnwritten] = []
        #: the checkpoints with parts that are being written or wait, in order
        self._writing: list[CheckpointName] = []
        #: parts of checkpoints older than this one are not written
        self._newest: CheckpointName | None = None
        self._thread: threading.Thread | None = None
        self._closed = False

    @property
    def is_free(self) -> bool:
        """True if no part is being written or waits."""
        with self._changed:
            return not self._writing

    @property
    def writing(self) -> frozenset[str]:
        """The names of the checkpoints with parts that are being written or wait."""
        with self._changed:
            return frozenset(name.folder for name in self._writing)

    def give_up_before(self, newest: CheckpointName) -> None:
        """Stop writing parts of checkpoints older than `newest`, which counts."""
        with self._changed:
            self._newest = max(self._newest or newest, newest)

    def write(self, part: PartToWrite) -> None:
        """Enqueue a part. The store's thread writes it and reports the result; a stall is reported as a failure.

        Nothing is reported if the write stops because a newer checkpoint counts.
        """
        due = self._make_stall_message(part.name, part.worker)
        with self._changed:
            self._writing.append(part.name)
        self._enqueue(lambda: self._write(part, due), due)

    def execute(self, order: AcceptCheckpoint | PruneCheckpoints) -> None:
        """Enqueue the sealing of a checkpoint, or the removal of checkpoints that will not be used again.

        Ignored are an `AcceptCheckpoint` without files and `PruneCheckpoints` without `remove`.
        """
        if isinstance(order, AcceptCheckpoint):
            if order.files:
                self._accept(order)
        elif order.remove:
            self._enqueue(lambda: self._remove(order.names))

    def run_later(self, do: Callable[[], None]) -> None:
        """Run a function in the store's thread, after its earlier tasks."""
        self._enqueue(do)

    def close(self) -> None:
        """Wait for the remaining tasks, unless they stall."""
        self._work.put(None)
        with self._changed:
            while self._pending and time.monotonic() - self._progress_at < self._stalled_s:
                self._changed.wait(_POLL_S)
            self._closed = True
            self._changed.notify_all()

    def _accept(self, order: AcceptCheckpoint) -> None:
        """Enqueue the sealing of a checkpoint. A name that is not a checkpoint's is only logged."""
        try:
            name = parse_name(order.name)
        except ValueError as error:
            self._enqueue(partial(logger.error, "a checkpoint is not sealed: %s", error))
            return
        due = self._make_stall_message(name, self._worker)
        self._enqueue(lambda: self._seal(name, order, due), due)

    def _enqueue(self, do: Callable[[], None], due: CheckpointUnwritten | None = None) -> None:
        """Append a task for the store's thread. Start that thread, and the one that watches for stalls, if they do not
        run.

        Args:
            do: the task.
            due: the message to send if the task stalls; None for tasks whose failure is only logged.
        """
        with self._changed:
            self._progress_at = self._progress_at if self._pending else time.monotonic()
            self._pending += 1
            if due is not None:
                self._due.append(due)
            self._changed.notify_all()
            if self._thread is None:
                # not from a thread pool: the interpreter joins its threads at exit
                self._thread = threading.Thread(target=self._run, name="holdfast-checkpoint", daemon=True)
                self._thread.start()
                threading.Thread(target=self._watch_for_stalls, name="holdfast-checkpoint-watch", daemon=True).start()
        self._work.put(do)

    def _watch_for_stalls(self) -> None:
        """Until `close`, report the task that stalls, and all tasks that wait behind it, as failed.

        If only tasks without a message stall, this is logged.
        """
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._due or (self._pending and not self._is_stalled) or self._closed)
                if self._closed:
                    return
                left_s = self._progress_at + self._stalled_s - time.monotonic()
                if left_s > 0:
                    self._changed.wait(max(left_s, 0.01))
                    continue
                hung, self._due = self._due, []
                unreported, self._is_stalled = not (hung or self._is_stalled), True
                self._changed.notify_all()
            if unreported:
                where, limit_s = self.storage.where, self._stalled_s
                logger.error(
                    "%s has not answered for %g s to a request to list or remove old checkpoints", where, limit_s
                )
            for message in hung:
                logger.error("the checkpoint of step %d: %s", message.step, message.why)
                self._tell(message)

    # in the thread of the store

    def _run(self) -> None:
        """Execute the tasks in order until `close`. An exception of a task ends the thread."""
        while (do := self._work.get()) is not None:
            try:
                do()
            finally:
                with self._changed:
                    self._pending -= 1
                    self._note_progress()
                    self._changed.notify_all()

    def _note_progress(self) -> None:
        """Restart the time after which the running task counts as stalled."""
        with self._changed:  # the lock is reentrant
            self._progress_at, self._is_stalled = time.monotonic(), False

    def _make_stall_message(self, name: CheckpointName, worker: str) -> CheckpointUnwritten:
        return _make_unwritten(name, worker, f"{self.storage.where} has not answered for {self._stalled_s:g} s")

    def _is_awaited(self, due: CheckpointUnwritten) -> bool:
        """Return whether a task is still awaited, and was not given up because of a stall."""
        with self._changed:
            return any(one is due for one in self._due)

    def _report_result(self, due: CheckpointUnwritten, result: CheckpointNews) -> None:
        """End a task, and send its result unless it was reported as stalled before."""
        with self._changed:
            awaited = self._is_awaited(due)
            self._due = [one for one in self._due if one is not due]
        if awaited:
            self._tell(result)

    def _write(self, part: PartToWrite, due: CheckpointUnwritten) -> None:
        """Write a part and send the result; do neither if the part was reported as stalled before.

        In any case, call the part's `done`, and no longer count it in `writing`. Nothing is sent if the write stopped
        because a newer checkpoint counts.
        """
        result = self._write_files(part) if self._is_awaited(due) else None
        part.done()
        with self._changed:
            self._writing.remove(part.name)
            self._due = self._due if result is not None else [one for one in self._due if one is not due]
            self._changed.notify_all()
        if result is not None:
            self._report_result(due, result)

    def _write_files(self, part: PartToWrite) -> CheckpointNews | None:
        """Write a part, and return `CheckpointWritten`, or `CheckpointUnwritten` after an OSError.

        If it stopped because a newer checkpoint counts, remove the part and return None.
        """
        name = part.name
        try:
            self._at_disk()
            files = tuple(
                directory.write_file(self.storage, name.folder, file, self._limit_rate(name, content()))
                for file, content in part.files.items()
            )
        except OSError as error:
            if self._is_overtaken(name):
                self._remove([name.folder])
                return None
            logger.error("the checkpoint of step %d failed: %s", name.step, error_text(error))
            return _make_unwritten(name, part.worker, error_text(error))
        return CheckpointWritten(
            worker=part.worker,
            term=name.term,
            generation=name.generation,
            step=name.step,
            name=name.folder,
            part=part.part,
            parts=part.parts,
            files=files,
            seconds=time.monotonic() - part.begun,
            stall_s=part.stall_s,
        )

    def _is_overtaken(self, name: CheckpointName) -> bool:
        """Return whether a newer checkpoint counts (`give_up_before`), so that this one is useless."""
        with self._changed:
            return self._newest is not None and name < self._newest

    def _limit_rate(self, name: CheckpointName, chunks: Iterable[Chunk]) -> Iterator[Chunk]:
        """Yield the chunks, no faster than the rate allows (0: no limit). The waits do not count as a stall.

        Raises:
            _OvertakenError: a newer checkpoint counts.
        """
        begun, sent = time.monotonic(), 0
        for chunk in chunks:
            self._note_progress()
            if self._is_overtaken(name):
                raise _OvertakenError
            yield chunk
            sent += len(chunk)
            while self._rate and (ahead_s := begun + sent / self._rate - time.monotonic()) > 0:
                time.sleep(min(ahead_s, _POLL_S))
                self._note_progress()  # this wait is intended, so it is not a stall
                if self._is_overtaken(name):
                    raise _OvertakenError

    def _seal(self, name: CheckpointName, order: AcceptCheckpoint, due: CheckpointUnwritten) -> None:
        """Write the manifest of an accepted checkpoint, and send `CheckpointKept` or `CheckpointUnwritten`.

        After success, remove older checkpoints that were not finished. If it was reported as stalled before, do
        nothing.
        """
        if not self._is_awaited(due):
            return
        try:
            self._at_disk()
            directory.seal(self.storage, name, order.files, self._note_progress)
        except (OSError, DamagedCheckpointError) as error:
            why = error_text(error) if isinstance(error, OSError) else str(error)
            if not self._is_overtaken(name):  # otherwise its folder may be removed by now
                logger.error("the checkpoint %s could not be sealed: %s", name.folder, why)
            result: CheckpointNews = _make_unwritten(name, self._worker, why)
        else:
            result = CheckpointKept(
                worker=self._worker,
                term=name.term,
                generation=name.generation,
                step=name.step,
                name=name.folder,
                bytes=sum(file.bytes for file in order.files),
                seconds=order.seconds,
                stall_s=order.stall_s,
            )
        self._report_result(due, result)
        if isinstance(result, CheckpointKept):
            self._remove_unfinished(name)

    def _remove_unfinished(self, name: CheckpointName) -> None:
        """Remove checkpoints without a manifest that are older than this one. Failures are only logged."""
        try:
            directory.remove_unfinished(self.storage, name)
        except OSError as error:
            logger.warning("unfinished older checkpoints could not be removed: %s", error_text(error))

    def _remove(self, names: Sequence[str]) -> None:
        """Remove checkpoints by name. Failures are only logged."""
        try:
            directory.remove(self.storage, names)
        except (OSError, ValueError) as error:
            logger.error(
                "checkpoints could not be removed: %s", error_text(error) if isinstance(error, OSError) else error
            )


def _make_unwritten(name: CheckpointName, worker: str, why: str) -> CheckpointUnwritten:
    """Return the message that a checkpoint was not written, with the first 1,000 characters of the reason."""
    return CheckpointUnwritten(
        worker=worker,
        term=name.term,
        generation=name.generation,
        step=name.step,
        name=name.folder,
        why=why[:1000],
    )
