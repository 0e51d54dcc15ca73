"""Copies of other nodes' parts of snapshots: fetched one after the other, at a bounded rate, in a thread of its own."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from holdfast.control.link.snapshots.files import DamagedPartError, PartReader, PartWriter, read_body
from holdfast.control.link.snapshots.reading import RemotePart
from holdfast.counted_log import CountedLog
from holdfast.protocol.messages.agent import WantedPart
from holdfast.protocol.state import SnapshotPart

logger = logging.getLogger("holdfast.agent")

#: Most bytes per second that a node fetches, for training continues meanwhile.
RATE = 256 << 20
#: how often one part is tried, and how long is waited in between
TRIES = 3
PAUSE_S = 0.5


class SnapshotFetcher:
    """Fetches wanted parts, newest snapshots first."""

    def __init__(
        self,
        folder: Path,
        job: str,
        key: Callable[[], bytes],
        on_part: Callable[[SnapshotPart], None],
        *,
        rate: float = RATE,
    ) -> None:
        """Begin without wanted parts.

        Args:
            key: secret of readers.
            on_part: called in the thread for each complete part in the folder.
            rate: most bytes per second.
        """
        self._folder, self._job, self._key, self._on_part, self._rate = folder, job, key, on_part, rate
        self._changed = threading.Condition()
        self._wanted: list[WantedPart] = []
        self._tried: dict[SnapshotPart, int] = {}
        self._closed = False
        self._reader: RemotePart | None = None
        self._thread: threading.Thread | None = None
        self._log = CountedLog(logger, time.monotonic)

    def set_wanted(self, wanted: Sequence[WantedPart]) -> None:
        """Replace the wanted parts; the newest are fetched first. Start the thread if necessary.

        A transfer in progress is not interrupted.
        """
        with self._changed:
            self._wanted = sorted(wanted, key=lambda one: one.snapshot.key, reverse=True)
            known = {one.snapshot for one in wanted}
            self._tried = {part: tries for part, tries in self._tried.items() if part in known}
            if self._thread is None and wanted:
                self._thread = threading.Thread(target=self._run, name="holdfast-fetch", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def close(self) -> None:
        """Abort the transfer in progress, and wait for the end of the thread. Wanted parts are no longer fetched."""
        with self._changed:
            self._closed = True
            if self._reader is not None:
                self._reader.abort()
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        self._log.flush(everything=True)

    def _run(self) -> None:
        """Fetch the wanted parts one after the other until `close`, and call `on_part` for each that was fetched.

        A part that cannot be fetched is tried again after a pause and after the others, at most `TRIES` times in all,
        with a warning each time.
        """
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._wanted or self._closed)
                if self._closed:
                    return
                one = self._wanted.pop(0)
                tries = self._tried[one.snapshot] = self._tried.get(one.snapshot, 0) + 1
            try:
                self._fetch(one)
            except (OSError, DamagedPartError) as error:
                self._log.warn(one.keeper.node, f"{one.snapshot.name} of node {one.keeper.node} is not kept: {error}")
                with self._changed:
                    self._changed.wait_for(lambda: self._closed, timeout=PAUSE_S)
                    if tries < TRIES and not any(other.snapshot == one.snapshot for other in self._wanted):
                        self._wanted.append(one)
            else:
                self._on_part(one.snapshot)
            self._log.flush()

    def _fetch(self, one: WantedPart) -> None:
        """Fetch a part from its node into the folder. If that fails, its memory is released.

        Raises:
            OSError, DamagedPartError: the node is unreachable or its part damaged, there is no memory, or `close`.
        """
        reader = RemotePart(one.keeper, self._key(), one.snapshot, self._job)
        with self._changed:
            self._reader = reader
        try:
            part = PartWriter(self._folder, reader.header.body_bytes)
            try:
                self._read_body(reader, part)
            except (OSError, DamagedPartError):
                part.abandon()
                raise
            part.finish(self._job, one.snapshot, reader.manifest)
        finally:
            with self._changed:
                self._reader = None
            reader.close()

    def _read_body(self, reader: PartReader, part: PartWriter) -> None:
        """Read a part's body into memory, at `rate` bytes per second at most.

        Raises:
            OSError: the node cannot be read, or `close` was called.
            DamagedPartError: a checksum differs.
        """
        begun = time.monotonic()

        def target(start: int, length: int) -> list[memoryview]:
            """Wait until the rate allows the next chunk, and return the memory for it."""
            ahead_s = start / self._rate - (time.monotonic() - begun)
            with self._changed:
                if self._changed.wait_for(lambda: self._closed, timeout=max(0.0, ahead_s)):
                    raise OSError("the agent ends")
            return [part.body[start : start + length]]

        read_body(reader, target)
