"""The last journals of this user's jobs, kept after the jobs have ended, so that `holdfast explain` can read them.

They lie in `$XDG_STATE_HOME/holdfast/journals` (by default below `~/.local/state`), one file a job, the newest `KEPT`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Generator, Mapping
from pathlib import Path

from holdfast.cli.following.show import event_json
from holdfast.protocol.events import ReadEvent, StepCommitted

#: the newest journals are kept, this many
KEPT = 20
#: bytes of one journal; once half of them are used, its `step_committed` events are left out
MOST_BYTES = 16 << 20

_log = logging.getLogger("holdfast.run")


def journal_folder(environment: Mapping[str, str]) -> Path:
    """Return the folder in which this user's journals are kept."""
    state = environment.get("XDG_STATE_HOME", "")
    return Path(state or os.path.join(environment.get("HOME", "/"), ".local", "state"), "holdfast", "journals")


def newest_journal(folder: Path, job: str | None = None) -> Path | None:
    """Return the newest journal of a job, or of any job, or None if no journal is kept."""
    return max(_journals(folder, job), default=(0.0, None))[1]


def new_journal(folder: Path, job: str) -> Path:
    """Return the path of the journal of a job that starts now in this process."""
    return folder / f"{job}.{time.time_ns()}-{os.getpid()}.jsonl"


@contextlib.contextmanager
def kept_journal(path: Path, on_event: Callable[[ReadEvent], None]) -> Generator[Callable[[ReadEvent], None]]:
    """Yield a function that writes each event to a new journal and passes it on to `on_event`.

    Remove all but `KEPT` journals.

    A journal is limited to `MOST_BYTES`, and steps to half of that. If it cannot be written, that is logged, and the
    job goes on without one.

    Args:
        path: As `new_journal` returns it.
    """
    folder = path.parent
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    except OSError as error:
        _log.info("the events of the job are not kept: %s", error)
        yield on_event
        return
    for _, old in sorted(_journals(folder))[:-KEPT]:
        with contextlib.suppress(OSError):
            old.unlink()
    written = 0

    def keep(event: ReadEvent) -> None:
        """Write an event to the journal while there is room, and pass it on to `on_event`."""
        nonlocal written
        room = MOST_BYTES // 2 if isinstance(event, StepCommitted) else MOST_BYTES
        line = event_json(event) + b"\n"
        if written + len(line) <= room:
            try:
                written += os.write(descriptor, line)
            except OSError as error:
                _log.info("the events of the job are not kept any further: %s", error)
                written = MOST_BYTES
        on_event(event)

    try:
        yield keep
    finally:
        os.close(descriptor)


def _journals(folder: Path, job: str | None = None) -> list[tuple[float, Path]]:
    """Return the journals in a folder, of one job or of all, each with the time of its last write (unix seconds).

    [] if the folder does not exist.
    """
    found: list[tuple[float, Path]] = []
    with contextlib.suppress(OSError):
        for path in folder.glob("*.jsonl"):
            # A job's name may contain dots. The rest of the file's name has none.
            if job is None or path.name.removesuffix(".jsonl").rpartition(".")[0] == job:
                with contextlib.suppress(OSError):  # Another job may have removed it.
                    found.append((path.stat().st_mtime, path))
    return found
