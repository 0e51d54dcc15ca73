"""The spool: a folder in which a worker hands its parts of checkpoints to its agent, with a message about each.

A worker writes its files under a temporary name, and renames them once they are complete. The agent renames them again
when it gets the message, and removes them when the part is in the checkpoint storage. So a worker sees from the folder
alone whether its last part is still being stored, and it may die meanwhile. A complete part without a message belongs
to no one, and the worker's successor removes it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from holdfast.control.link.checkpoints.store import PartToWrite, do_nothing
from holdfast.control.link.framing import PartHanded
from holdfast.protocol.checkpoints.names import parse_name
from holdfast.protocol.messages.worker import CheckpointUnwritten
from holdfast.protocol.names import index_of

logger = logging.getLogger(__name__)

_CHUNK_BYTES = 4 << 20
_WRITING = "writing-"
_CLAIMED = "taken-"


class PartSpool:
    """Hands one worker's parts of checkpoints over to its agent, as files in a folder in memory.

    The training thread only waits for `write`; a thread of its own writes the files and sends the messages.
    """

    def __init__(
        self,
        folder: Path,
        worker: str,
        tell: Callable[[PartHanded | CheckpointUnwritten], None],
        at_disk: Callable[[], None] = do_nothing,
    ) -> None:
        """Remove the unfinished and unreported parts of the worker's predecessor.

        Args:
            tell: sends a message to the agent; thread-safe.
            at_disk: called before a part is written; its OSError counts as one of the disk.
        """
        self._at_disk = at_disk
        self._folder, self._index, self._tell = folder, index_of(worker), tell
        self._lock = threading.Lock()
        #: number of parts that are not handed over yet
        self._waiting = 0
        #: whether the folder may still contain a part of this worker; listing it takes time
        self._may_contain_part = True
        self._work: queue.SimpleQueue[PartToWrite | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        for pattern in (f"{_WRITING}{self._index}-*", f"{self._index}-*"):
            for path in folder.glob(pattern):
                shutil.rmtree(path, ignore_errors=True)

    @property
    def is_free(self) -> bool:
        """True if no part of this worker waits, here or at its agent.

        The agent removes a part's files once it has written them to the checkpoint storage, or that has failed.
        """
        with self._lock:
            if self._waiting:
                return False
            if self._may_contain_part:
                found = (path for head in ("", _CLAIMED) for path in self._folder.glob(f"{head}{self._index}-*"))
                self._may_contain_part = any(found)
            return not self._may_contain_part

    def write(self, part: PartToWrite) -> None:
        """Enqueue a part. A background thread writes its files for the agent, and reports the result."""
        with self._lock:
            self._waiting += 1
            self._may_contain_part = True
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="holdfast-parts", daemon=True)
            self._thread.start()
        self._work.put(part)

    def close(self) -> None:
        """Wait until the remaining parts are handed over, and end the thread."""
        if self._thread is not None:
            self._work.put(None)
            self._thread.join()

    def _run(self) -> None:
        """Write parts until `close`, and report each: `PartHanded`, or `CheckpointUnwritten` after an OSError."""
        while (part := self._work.get()) is not None:
            try:
                self._tell(self._write_files(part))
            except OSError as error:
                logger.error("the checkpoint of step %d failed: %s", part.name.step, error.strerror or error)
                self._tell(_make_unwritten(part, error.strerror or str(error)))
            finally:
                with self._lock:
                    self._waiting -= 1

    def _write_files(self, part: PartToWrite) -> PartHanded:
        """Write a part's files into a folder, and return the message for the agent.

        The folder has a temporary name until it is complete.

        Raises:
            OSError: a file cannot be written. The unfinished folder is removed before.
        """
        name = f"{self._index}-{part.name.folder}"
        partial, final = self._folder / f"{_WRITING}{name}", self._folder / name
        try:
            self._at_disk()
            partial.mkdir(parents=True)
            for file, content in part.files.items():
                with (partial / file).open("wb") as stream:
                    for chunk in content():
                        stream.write(chunk)
            partial.rename(final)
        except OSError:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        return PartHanded(
            worker=part.worker,
            name=part.name.folder,
            files=tuple(part.files),
            part=part.part,
            parts=part.parts,
            stall_s=part.stall_s,
        )


def claim_part(handed: PartHanded, folder: Path) -> PartToWrite:
    """Claim a part that a worker has handed over, by renaming its folder, and return it for its agent to write.

    The `done` of the returned part removes the files.

    Raises:
        ValueError: its name is not the name of a checkpoint.
        OSError: the folder does not contain it.
    """
    name = parse_name(handed.name)
    entry = f"{index_of(handed.worker)}-{name.folder}"
    claimed = folder / f"{_CLAIMED}{entry}"
    (folder / entry).rename(claimed)
    return PartToWrite(
        name=name,
        worker=handed.worker,
        files={file: lambda path=claimed / file: _chunks(path) for file in handed.files},
        part=handed.part,
        parts=handed.parts,
        stall_s=handed.stall_s,
        done=lambda: shutil.rmtree(claimed, ignore_errors=True),
    )


def _chunks(path: Path) -> Iterator[bytes]:
    """Yield the content of a file in chunks, and drop each chunk from the page cache once it is used."""
    with path.open("rb") as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            yield chunk
            with contextlib.suppress(OSError):  # chunks that are read need no page cache now
                os.posix_fadvise(stream.fileno(), 0, stream.tell(), os.POSIX_FADV_DONTNEED)


def _make_unwritten(part: PartToWrite, why: str) -> CheckpointUnwritten:
    """Return the message that a part was not written, with the first 1,000 characters of the reason."""
    name = part.name
    return CheckpointUnwritten(
        worker=part.worker,
        term=name.term,
        generation=name.generation,
        step=name.step,
        name=name.folder,
        why=why[:1000],
    )
