"""Runs a job and shows how it goes: live in a terminal, line by line, or as JSON."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import sys
import tempfile
from collections.abc import Callable, Coroutine, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from holdfast.cli.job.live import LiveProgress
from holdfast.cli.job.progress import PlainProgress
from holdfast.cli.output import say, warn
from holdfast.control.launch.settings import LaunchSettings
from holdfast.errors import EXIT_BAD_INPUT, EXIT_DONE, EXIT_ENDED, EXIT_FAILED, EXIT_INTERRUPTED
from holdfast.observability.metric_rows import writer_for
from holdfast.protocol.events import OtherEvent, ReadEvent

_TAIL_LINES = 20

OnEvent = Callable[[ReadEvent], None]
#: runs a job with these settings, tells each event, and returns the exit code
RunJob = Callable[[LaunchSettings, OnEvent], Coroutine[Any, Any, int]]


@dataclass(frozen=True, slots=True)
class Shown:
    """How a job is shown. plain: line by line in a terminal too. as_json: its events on stdout, all else on stderr."""

    plain: bool
    as_json: bool


def run_shown(settings: LaunchSettings, job: RunJob, shown: Shown) -> int:
    """Run a job and show how it goes.

    Returns:
        The job's exit code.
    """
    if shown.as_json:
        code, failure = _run_for_json(settings, job)
    elif sys.stdout.isatty() and not shown.plain:
        code, failure = _run_live(settings, job)
    else:
        progress = PlainProgress(say)
        code, failure = asyncio.run(job(settings, progress)), progress.failure
    if code in (EXIT_FAILED, EXIT_BAD_INPUT) and failure:
        warn(f"holdfast: {failure}")
    return code


def _run_live(settings: LaunchSettings, job: RunJob) -> tuple[int, str]:
    """Run with the live view, which must have the terminal for itself: what the workers print goes to files.

    Returns:
        The exit code, and why the job failed ("" where it did not).
    """
    with _worker_logs(settings) as logged:
        with LiveProgress(Console()) as progress:
            code = asyncio.run(job(logged, progress))
        _show_tails(logged, code)
    return code, progress.failure


def _run_for_json(settings: LaunchSettings, job: RunJob) -> tuple[int, str]:
    """Run with nothing but events on stdout: what the workers print goes to files."""
    progress = PlainProgress(warn)

    def told(event: ReadEvent) -> None:
        say(event_json(event).decode())
        progress(event)

    with _worker_logs(settings) as logged:
        code = asyncio.run(job(logged, told))
        _show_tails(logged, code)
    return code, progress.failure


@contextlib.contextmanager
def writing_to(file: str, on_event: OnEvent) -> Generator[OnEvent]:
    """Have each step's values written to a file, "" for none, before its event is told."""
    if not file:
        yield on_event
        return
    writer = writer_for(Path(file))

    def told(event: ReadEvent) -> None:
        writer.take(event)
        on_event(event)

    with contextlib.closing(writer):
        yield told


def event_json(event: ReadEvent) -> bytes:
    """Return an event as its line of JSON."""
    return msgspec.json.encode(event.fields if isinstance(event, OtherEvent) else event)


@contextlib.contextmanager
def _worker_logs(settings: LaunchSettings) -> Generator[LaunchSettings]:
    """Give the workers' output files of its own, in the job's folder where there is one."""
    settings.check()
    with tempfile.TemporaryDirectory(prefix="holdfast-logs-") as folder:
        logs = Path(settings.spec.output.log_dir) if settings.spec.output.log_dir else settings.job_dir or Path(folder)
        logs.mkdir(parents=True, exist_ok=True)
        yield dataclasses.replace(settings, log_folder=logs)


def _show_tails(settings: LaunchSettings, code: int) -> None:
    """Show the ends of the workers' files where the job did not end well."""
    if code not in (EXIT_DONE, EXIT_ENDED, EXIT_INTERRUPTED) and settings.log_folder is not None:
        for log in sorted(settings.log_folder.glob("*.log")):
            _tail(log)


def _tail(log: Path) -> None:
    """Show the end of a worker's output."""
    lines = log.read_text(errors="replace").splitlines()[-_TAIL_LINES:]
    if lines:
        warn(f"--- {log.stem} ---")
        for line in lines:
            warn(line)
