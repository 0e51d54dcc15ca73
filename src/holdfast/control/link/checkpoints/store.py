"""Writes parts of checkpoints, seals them and removes them, one thing after the other, in a thread of its own."""

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

Tell = Callable[[CheckpointNews], None]
#: what is written has not moved for so long: nobody waits for it any more
STALLED_S = 60.0
_LOOK_S = 0.5


def nothing() -> None:
    """Do nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PartToWrite:
    """What one worker saves of a checkpoint.

    files: by name, what gives their content. part: which of `parts`. stall_s: for how long its worker did not train.
    done: called once nothing more is read of it.
    """

    name: CheckpointName
    worker: str
    files: Mapping[str, Callable[[], Iterable[Chunk]]]
    part: int = 0
    parts: int = 1
    stall_s: float = 0.0
    begun: float = field(default_factory=time.monotonic)
    done: Callable[[], None] = nothing


class _OvertakenError(OSError):
    """A newer checkpoint counts, so a part of an older one is no longer of use.

    An OSError, because a remote storage turns what is raised within it into one.
    """


class CheckpointStore:
    """The parts of checkpoints that one process writes. Whatever stops one: training is worth more than a checkpoint.

    What hangs (a disk, a store far away) holds up this thread alone, and is told once it has hung for a minute.
    """

    def __init__(
        self,
        storage: Storage,
        tell: Tell,
        *,
        worker: str,
        at_disk: Callable[[], None] = nothing,
        rate: float = 0.0,
        stalled_s: float = STALLED_S,
    ) -> None:
        """Write nothing yet.

        Args:
            tell: sends a message to the coordinator; thread-safe.
            worker: who says that a checkpoint is kept.
            at_disk: called while something is written; an OSError of it is the disk's.
            rate: bytes per second that are written at the most, 0 for as many as can be.
        """
        self.storage = storage
        self._tell = tell
        self._worker = worker
        self._at_disk = at_disk
        self._rate = rate
        self._stalled_s = stalled_s
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._pending = 0  # things to do, what is being done included
        self._moved_at = time.monotonic()
        self._hangs = False  # what is being done has not moved for too long, and that was said
        #: what is to be written or sealed that nobody has given up, in turn; the message for the case that it hangs
        self._due: list[CheckpointUnwritten] = []
        #: the checkpoints whose parts are to be written, or are being written, in turn
        self._writing: list[CheckpointName] = []
        #: parts of older checkpoints are no longer written
        self._newest: CheckpointName | None = None
        self._thread: threading.Thread | None = None
        self._closed = False

    @property
    def free(self) -> bool:
        """True where no part is being written."""
        with self._changed:
            return not self._writing

    @property
    def writing(self) -> frozenset[str]:
        """The names of the checkpoints whose parts are being written, or wait for that."""
        with self._changed:
            return frozenset(name.folder for name in self._writing)

    def give_up_before(self, newest: CheckpointName) -> None:
        """Stop writing parts of checkpoints that are older than one that counts: nobody waits for them."""
        with self._changed:
            self._newest = max(self._newest or newest, newest)

    def write(self, part: PartToWrite) -> None:
        """Write a part, and tell."""
        due = self._unanswered(part.name, part.worker)
        with self._changed:
            self._writing.append(part.name)
        self._later(lambda: self._write(part, due), due)

    def obey(self, order: AcceptCheckpoint | PruneCheckpoints) -> None:
        """Seal a checkpoint, or remove what will not be used any more."""
        if isinstance(order, AcceptCheckpoint):
            if order.files:
                self._accept(order)
        elif order.remove:
            self._later(lambda: self._remove(order.names))

    def later(self, do: Callable[[], None]) -> None:
        """Have the store's thread do something, after what it has to do already."""
        self._later(do)

    def close(self) -> None:
        """Wait for what is under way, unless it hangs."""
        self._work.put(None)
        with self._changed:
            while self._pending and time.monotonic() - self._moved_at < self._stalled_s:
                self._changed.wait(_LOOK_S)
            self._closed = True
            self._changed.notify_all()

    def _accept(self, order: AcceptCheckpoint) -> None:
        try:
            name = parse_name(order.name)
        except ValueError as error:
            self._later(partial(logger.error, "a checkpoint is not kept: %s", error))
            return
        due = self._unanswered(name, self._worker)
        self._later(lambda: self._seal(name, order, due), due)

    def _later(self, do: Callable[[], None], due: CheckpointUnwritten | None = None) -> None:
        with self._changed:
            self._moved_at = self._moved_at if self._pending else time.monotonic()
            self._pending += 1
            if due is not None:
                self._due.append(due)
            self._changed.notify_all()
            if self._thread is None:
                # (not a pool's: nobody waits for such a thread at the end of the process)
                self._thread = threading.Thread(target=self._run, name="holdfast-checkpoint", daemon=True)
                self._thread.start()
                threading.Thread(target=self._watch, name="holdfast-checkpoint-watch", daemon=True).start()
        self._work.put(do)

    def _watch(self) -> None:
        """Tell of what hangs, and of what waits behind it: nobody is to wait for that."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._due or (self._pending and not self._hangs) or self._closed)
                if self._closed:
                    return
                left_s = self._moved_at + self._stalled_s - time.monotonic()
                if left_s > 0:
                    self._changed.wait(max(left_s, 0.01))
                    continue
                hung, self._due = self._due, []
                unsaid, self._hangs = not (hung or self._hangs), True
                self._changed.notify_all()
            if unsaid:
                where, limit_s = self.storage.where, self._stalled_s
                logger.error(
                    "%s has not answered for %g s, asked to list or remove what no longer counts", where, limit_s
                )
            for one in hung:
                logger.error("the checkpoint of step %d: %s", one.step, one.why)
                self._tell(one)

    # ---- in the store's thread ----

    def _run(self) -> None:
        while (do := self._work.get()) is not None:
            try:
                do()
            finally:
                with self._changed:
                    self._pending -= 1
                    self._moved()
                    self._changed.notify_all()

    def _moved(self) -> None:
        with self._changed:  # (whose lock may be taken again)
            self._moved_at, self._hangs = time.monotonic(), False

    def _unanswered(self, name: CheckpointName, worker: str) -> CheckpointUnwritten:
        return _unwritten(name, worker, f"{self.storage.where} has not answered for {self._stalled_s:g} s")

    def _awaited(self, due: CheckpointUnwritten) -> bool:
        """Tell whether what is at hand was not given up, because something hung."""
        with self._changed:
            return any(one is due for one in self._due)

    def _end(self, due: CheckpointUnwritten, told: CheckpointNews) -> None:
        """What was at hand is done: tell what came of it, if somebody waits for that."""
        with self._changed:
            awaited = self._awaited(due)
            self._due = [one for one in self._due if one is not due]
        if awaited:
            self._tell(told)

    def _write(self, part: PartToWrite, due: CheckpointUnwritten) -> None:
        told = self._written(part) if self._awaited(due) else None
        part.done()
        with self._changed:
            self._writing.remove(part.name)
            self._due = self._due if told is not None else [one for one in self._due if one is not due]
            self._changed.notify_all()
        if told is not None:
            self._end(due, told)

    def _written(self, part: PartToWrite) -> CheckpointNews | None:
        """Write a part, and return the message about it; None and no parts if a newer one counts."""
        name = part.name
        try:
            self._at_disk()
            files = tuple(
                directory.write_file(self.storage, name.folder, file, self._paced(name, content()))
                for file, content in part.files.items()
            )
        except OSError as error:
            if self._is_overtaken(name):
                self._remove([name.folder])
                return None
            logger.error("the checkpoint of step %d failed: %s", name.step, error_text(error))
            return _unwritten(name, part.worker, error_text(error))
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
        with self._changed:
            return self._newest is not None and name < self._newest

    def _paced(self, name: CheckpointName, chunks: Iterable[Chunk]) -> Iterator[Chunk]:
        """Yield what is to be written, no faster than it may be.

        Raises:
            _OvertakenError: a newer checkpoint counts.
        """
        begun, sent = time.monotonic(), 0
        for chunk in chunks:
            self._moved()
            if self._is_overtaken(name):
                raise _OvertakenError
            yield chunk
            sent += len(chunk)
            while self._rate and (ahead_s := begun + sent / self._rate - time.monotonic()) > 0:
                time.sleep(min(ahead_s, _LOOK_S))
                self._moved()  # (it is we who wait)
                if self._is_overtaken(name):
                    raise _OvertakenError

    def _seal(self, name: CheckpointName, order: AcceptCheckpoint, due: CheckpointUnwritten) -> None:
        if not self._awaited(due):
            return
        try:
            self._at_disk()
            directory.seal(self.storage, name, order.files, self._moved)
        except (OSError, DamagedCheckpointError) as error:
            why = error_text(error) if isinstance(error, OSError) else str(error)
            if not self._is_overtaken(name):  # otherwise its folder may be removed by now
                logger.error("the checkpoint %s could not be kept: %s", name.folder, why)
            told: CheckpointNews = _unwritten(name, self._worker, why)
        else:
            told = CheckpointKept(
                worker=self._worker,
                term=name.term,
                generation=name.generation,
                step=name.step,
                name=name.folder,
                bytes=sum(file.bytes for file in order.files),
                seconds=order.seconds,
                stall_s=order.stall_s,
            )
        self._end(due, told)
        if isinstance(told, CheckpointKept):
            self._tidy(name)

    def _tidy(self, name: CheckpointName) -> None:
        try:
            directory.remove_unfinished(self.storage, name)
        except OSError as error:
            logger.warning("what was left of older checkpoints is not removed: %s", error_text(error))

    def _remove(self, names: Sequence[str]) -> None:
        try:
            directory.remove(self.storage, names)
        except (OSError, ValueError) as error:
            logger.error("checkpoints are not removed: %s", error_text(error) if isinstance(error, OSError) else error)


def _unwritten(name: CheckpointName, worker: str, why: str) -> CheckpointUnwritten:
    return CheckpointUnwritten(
        worker=worker,
        term=name.term,
        generation=name.generation,
        step=name.step,
        name=name.folder,
        why=why[:1000],
    )
