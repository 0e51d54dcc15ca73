"""Runs a job and shows how it goes: live in a terminal, line by line, or as JSON."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import tempfile
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from holdfast.cli.following.live import LiveProgress, can_animate, terminal_apart
from holdfast.cli.following.progress import PlainProgress
from holdfast.cli.output import lasting_output, warn
from holdfast.control.launch.settings import LaunchSettings
from holdfast.errors import EXIT_BAD_INPUT, EXIT_DONE, EXIT_ENDED, EXIT_FAILED, EXIT_INTERRUPTED
from holdfast.observability.event_lines import last_number
from holdfast.observability.metric_rows import MetricWriter, writer_for
from holdfast.protocol.events import Evaluated, OtherEvent, ReadEvent, RolledBack, StepCommitted

_TAIL_LINES = 20
#: Events that wait for the metrics file.
_WAITING = 1 << 16

OnEvent = Callable[[ReadEvent], None]
#: runs a job with these settings, tells each event, and returns the exit code
RunJob = Callable[[LaunchSettings, OnEvent], Coroutine[Any, Any, int]]


@dataclass(frozen=True, slots=True)
class Shown:
    """How `holdfast run` shows a job."""

    #: line by line, also in a terminal
    plain: bool
    #: its events on stdout as JSON, everything else on stderr
    as_json: bool
    #: also details of how holdfast works
    verbose: bool = False


def run_shown(settings: LaunchSettings, job: RunJob, shown: Shown) -> int:
    """Run a job and show its progress: as JSON events, as a live panel if the terminal allows it, or as plain lines.

    If the job failed, the reason is printed on stderr last.

    Returns:
        The job's exit code.
    """
    with lasting_output() as print_line:
        if shown.as_json:
            code, failure = _run_for_json(settings, job, print_line, verbose=shown.verbose)
        elif not shown.plain and can_animate():
            code, failure = _run_live(settings, job, verbose=shown.verbose)
        else:
            progress = PlainProgress(print_line, verbose=shown.verbose)
            code, failure = asyncio.run(job(settings, progress)), progress.failure
        if code in (EXIT_FAILED, EXIT_BAD_INPUT) and failure:
            warn(f"holdfast: {failure}")
    return code


def _run_live(settings: LaunchSettings, job: RunJob, *, verbose: bool) -> tuple[int, str]:
    """Run with the live view: everything that is printed appears above its panel.

    Returns:
        The exit code, and why the job failed ("" if it did not).
    """
    on_ctrl_c = "ends the job; nothing is saved, because it has no --checkpoint-dir"
    if settings.spec.checkpoint.dir:
        on_ctrl_c = "saves the job and ends it; the same command continues it"
    with terminal_apart() as (console, begin), LiveProgress(console, on_ctrl_c=on_ctrl_c, verbose=verbose) as progress:
        begin(progress.print_line)
        code = asyncio.run(job(settings, progress))
    return code, progress.failure


def _run_for_json(
    settings: LaunchSettings, job: RunJob, print_line: Callable[[str], None], *, verbose: bool
) -> tuple[int, str]:
    """Run with only events on stdout, one JSON line each, and their progress lines on stderr.

    The output of the workers goes to files, and their ends are printed on stderr if the job fails.

    Returns:
        The exit code, and why the job failed ("" if it did not).
    """
    progress = PlainProgress(warn, verbose=verbose)

    def pass_on(event: ReadEvent) -> None:
        """Print an event as JSON on stdout, and its progress line on stderr."""
        print_line(event_json(event).decode())
        progress(event)

    with _worker_logs(settings) as logged:
        code = asyncio.run(job(logged, pass_on))
        _show_tails(logged, code)
    return code, progress.failure


@contextlib.contextmanager
def write_metrics_to(file: str, on_event: OnEvent) -> Generator[OnEvent]:
    """Yield a function that writes the values of each step to a file, and then passes the event on. "": no file.

    A file that cannot be written does not stop the job: it is reported, and tried again with later events.

    Raises:
        BadInputError: the file's suffix is unknown, or it cannot be opened at the start.
    """
    if not file:
        yield on_event
        return
    writer = _RetryingWriter(writer_for(Path(file)), file)

    def pass_on(event: ReadEvent) -> None:
        writer.on_event(event)
        on_event(event)

    with contextlib.closing(writer):
        yield pass_on


def filter_this_run(events: str, on_event: OnEvent) -> OnEvent:
    """Return a function that passes only the events of this run to `on_event`.

    Args:
        events: The job's events file, which may have the events of earlier runs; "" for none.
    """
    before = last_number(Path(events)) if events else 0

    def pass_on(event: ReadEvent) -> None:
        if event.seq > before:
            on_event(event)

    return pass_on


class _RetryingWriter:
    """Writes a job's metrics; if the file cannot be written, events wait in memory, `_WAITING` at most."""

    def __init__(self, writer: MetricWriter, file: str) -> None:
        self._writer, self._file = writer, file
        self._waiting: deque[ReadEvent] = deque()
        self._lost = 0
        self._why = ""

    def on_event(self, event: ReadEvent) -> None:
        """Write the metrics of an event, after the events that wait. Events without metrics are ignored.

        After an error, which is reported once, the event waits; beyond `_WAITING` events the oldest is dropped.
        """
        if not isinstance(event, StepCommitted | Evaluated | RolledBack):
            return
        self._waiting.append(event)
        if len(self._waiting) > _WAITING:
            self._waiting.popleft()
            self._lost += 1
        try:
            while self._waiting:
                self._writer.on_event(self._waiting[0])
                self._waiting.popleft()
        except OSError as error:
            if not self._why:
                self._why = error.strerror or str(error)
                warn(f"holdfast: the metrics file {self._file} cannot be written: {self._why}; training goes on")

    def close(self) -> None:
        """Close the file, and report how many events it lacks: those that still wait, and those that were dropped."""
        try:
            self._writer.close()
        except OSError as error:
            self._why = self._why or error.strerror or str(error)
        if self._waiting or self._lost:
            missing = len(self._waiting) + self._lost
            warn(
                f"holdfast: the metrics file {self._file} lacks {missing} events ({self._why}); "
                "`holdfast export` writes it again from the events file"
            )


def event_json(event: ReadEvent) -> bytes:
    """Return an event as its line of JSON."""
    return msgspec.json.encode(event.fields if isinstance(event, OtherEvent) else event)


@contextlib.contextmanager
def _worker_logs(settings: LaunchSettings) -> Generator[LaunchSettings]:
    """Check the settings, and yield them with a folder for the workers' output.

    It is --log-dir, else the job's own folder, else a temporary one, which is removed at the end.

    Raises:
        BadInputError: a setting is wrong.
    """
    settings.check()
    with tempfile.TemporaryDirectory(prefix="holdfast-logs-") as folder:
        logs = Path(settings.spec.output.log_dir) if settings.spec.output.log_dir else settings.job_dir or Path(folder)
        logs.mkdir(parents=True, exist_ok=True)
        yield dataclasses.replace(settings, log_folder=logs)


def _show_tails(settings: LaunchSettings, code: int) -> None:
    """Print the ends of the workers' files on stderr, unless the job ended well, was stopped or was interrupted.

    Without a folder for these files, nothing is printed.

    Args:
        code: the job's exit code.
    """
    if code not in (EXIT_DONE, EXIT_ENDED, EXIT_INTERRUPTED) and settings.log_folder is not None:
        for log in sorted(settings.log_folder.glob("*.log")):
            _tail(log)


def _tail(log: Path) -> None:
    """Print the last `_TAIL_LINES` lines of a worker's output on stderr, below its name."""
    lines = log.read_text(errors="replace").splitlines()[-_TAIL_LINES:]
    if lines:
        warn(f"--- {log.stem} ---")
        for line in lines:
            warn(line)
