"""`holdfast run`: a whole job on this machine."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import sys
import tempfile
from collections.abc import Callable, Coroutine, Generator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from holdfast.cli.job.launch_options import JoinWindow, LaunchOptions, Script, ScriptArgs, with_launch_options
from holdfast.cli.job.live import LiveProgress
from holdfast.cli.job.progress import PlainProgress
from holdfast.control.launch.launcher import launch
from holdfast.control.launch.settings import LaunchSettings
from holdfast.errors import EXIT_BAD_INPUT, EXIT_DONE, EXIT_ENDED, EXIT_FAILED, EXIT_INTERRUPTED
from holdfast.protocol.events import ReadEvent

_TAIL_LINES = 20

OnEvent = Callable[[ReadEvent], None]
#: runs a job with these settings, tells each event, and returns the exit code
RunJob = Callable[[LaunchSettings, OnEvent], Coroutine[Any, Any, int]]


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    # What follows SCRIPT belongs to the script, options included.
    app.command("run", context_settings={"allow_interspersed_args": False})(with_launch_options(run))


def run(
    script: Script,
    args: ScriptArgs = None,
    nodes: Annotated[int, typer.Option(help="Nodes to start; each is an agent with its workers.")] = 4,
    join_window: JoinWindow = 0.0,
    *,
    options: LaunchOptions,
) -> None:
    """Run a job on this machine: a coordinator, agents, and their workers.

    Ends with 0 when the job is done, 1 when it failed, 2 for bad input, 130 after Ctrl-C.
    """
    settings = dataclasses.replace(options.settings(script, args), nodes=nodes, join_window=join_window)

    async def job(settings: LaunchSettings, on_event: OnEvent) -> int:
        return await launch(settings, on_event, warn)

    raise typer.Exit(run_shown(settings, job, plain=options.plain))


def run_shown(settings: LaunchSettings, job: RunJob, *, plain: bool) -> int:
    """Run a job and show how it goes: live in a terminal, else (or where `plain`) line by line.

    Returns:
        The job's exit code.
    """
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
    if sys.stdout.isatty() and not plain:
        code, failure = _run_live(settings, job)
    else:
        progress = PlainProgress(say)
        code, failure = asyncio.run(job(settings, progress)), progress.failure
    tell_failure(code, failure)
    return code


def tell_failure(code: int, failure: str) -> None:
    """Say in one line why a job failed."""
    if code in (EXIT_FAILED, EXIT_BAD_INPUT) and failure:
        warn(f"holdfast: {failure}")


def _run_live(settings: LaunchSettings, job: RunJob) -> tuple[int, str]:
    """Run with the live view, which must have the terminal for itself: what the workers print goes to files.

    Returns:
        The exit code, and why the job failed ("" where it did not).
    """
    settings.check()
    with worker_logs(settings) as logged:
        with LiveProgress(Console()) as progress:
            code = asyncio.run(job(logged, progress))
        show_tails(logged, code)
    return code, progress.failure


@contextlib.contextmanager
def worker_logs(settings: LaunchSettings) -> Generator[LaunchSettings]:
    """Give the workers' output files of its own, in the job's folder where there is one."""
    with tempfile.TemporaryDirectory(prefix="holdfast-logs-") as folder:
        logs = settings.job_dir or Path(folder)
        logs.mkdir(parents=True, exist_ok=True)
        yield dataclasses.replace(settings, log_folder=logs)


def show_tails(settings: LaunchSettings, code: int) -> None:
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


def say(line: str) -> None:
    """Print one line now."""
    print(line, flush=True)


def warn(line: str) -> None:
    """Print one line now, where errors go."""
    print(line, file=sys.stderr, flush=True)
