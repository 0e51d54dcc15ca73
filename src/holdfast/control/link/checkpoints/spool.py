"""A worker hands its part of a checkpoint to its agent: as files in a folder that both see, and a word about them.

The files are written under other names and renamed once they are whole; the agent renames them once it has heard of
them, and removes them when the part is where it stays. So a worker sees by its files alone whether the part before is
still on its way, and may die meanwhile; what it has not told its agent of is nobody's then.
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

from holdfast.control.link.checkpoints.store import PartToWrite, nothing
from holdfast.control.link.framing import PartHanded
from holdfast.protocol.checkpoints.names import parse_name
from holdfast.protocol.messages.worker import CheckpointUnwritten
from holdfast.protocol.names import index_of

logger = logging.getLogger(__name__)

_CHUNK_BYTES = 4 << 20
_WRITING, _TAKEN = "writing-", "taken-"


class PartSpool:
    """A worker's end of the folder."""

    def __init__(
        self,
        folder: Path,
        worker: str,
        tell: Callable[[PartHanded | CheckpointUnwritten], None],
        at_disk: Callable[[], None] = nothing,
    ) -> None:
        """Remove what the worker before this one has left half written, or untold.

        Args:
            tell: sends a message to the agent; thread-safe.
            at_disk: called while something is written; an OSError of it is the disk's.
        """
        self._at_disk = at_disk
        self._folder, self._index, self._tell = folder, index_of(worker), tell
        self._lock = threading.Lock()
        #: how many parts wait here until they are handed over
        self._waiting = 0
        #: whether a part may still lie in the folder; looking there takes time
        self._may_lie_there = True
        self._work: queue.SimpleQueue[PartToWrite | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        for left in (f"{_WRITING}{self._index}-*", f"{self._index}-*"):
            for path in folder.glob(left):
                shutil.rmtree(path, ignore_errors=True)

    @property
    def free(self) -> bool:
        """True where the part before is where it stays."""
        with self._lock:
            if self._waiting:
                return False
            if self._may_lie_there:
                found = (path for head in ("", _TAKEN) for path in self._folder.glob(f"{head}{self._index}-*"))
                self._may_lie_there = any(found)
            return not self._may_lie_there

    def write(self, part: PartToWrite) -> None:
        """Hand a part over, in the background."""
        with self._lock:
            self._waiting += 1
            self._may_lie_there = True
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="holdfast-parts", daemon=True)
            self._thread.start()
        self._work.put(part)

    def close(self) -> None:
        """Hand over what is still here."""
        if self._thread is not None:
            self._work.put(None)
            self._thread.join()

    def _run(self) -> None:
        while (part := self._work.get()) is not None:
            try:
                self._tell(self._hand(part))
            except OSError as error:
                logger.error("the checkpoint of step %d failed: %s", part.name.step, error.strerror or error)
                self._tell(_left_out(part, error.strerror or str(error)))
            finally:
                with self._lock:
                    self._waiting -= 1

    def _hand(self, part: PartToWrite) -> PartHanded:
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


def part_of(handed: PartHanded, folder: Path) -> PartToWrite:
    """Return a part that a worker has handed over, for its agent to write; its files go once that is done.

    Raises:
        ValueError: its name is none.
        OSError: it is not there any more.
    """
    name = parse_name(handed.name)
    called = f"{index_of(handed.worker)}-{name.folder}"
    place = folder / f"{_TAKEN}{called}"
    (folder / called).rename(place)
    return PartToWrite(
        name=name,
        worker=handed.worker,
        files={file: lambda path=place / file: _chunks(path) for file in handed.files},
        part=handed.part,
        parts=handed.parts,
        stall_s=handed.stall_s,
        done=lambda: shutil.rmtree(place, ignore_errors=True),
    )


def _chunks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            yield chunk
            with contextlib.suppress(OSError):  # (what is read needs no memory any more)
                os.posix_fadvise(stream.fileno(), 0, stream.tell(), os.POSIX_FADV_DONTNEED)


def _left_out(part: PartToWrite, why: str) -> CheckpointUnwritten:
    name = part.name
    return CheckpointUnwritten(
        worker=part.worker,
        term=name.term,
        generation=name.generation,
        step=name.step,
        name=name.folder,
        why=why[:1000],
    )
