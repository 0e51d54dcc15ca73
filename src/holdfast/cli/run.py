"""`holdfast run`: a whole job on this machine."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from holdfast.cli.live import LiveProgress
from holdfast.cli.progress import PlainProgress
from holdfast.control.launcher import LaunchSettings, launch
from holdfast.control.registry import registry_directory
from holdfast.control.zygote import PRELOAD
from holdfast.errors import EXIT_BAD_INPUT, EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED

_TAIL_LINES = 20

Slots = Annotated[int, typer.Option(help="A node's room for expert replicas in each MoE layer.")]
FaultThreshold = Annotated[
    int, typer.Option(help="On how many distinct nodes each expert is to live, where there is room.")
]
JoinWindow = Annotated[
    float, typer.Option(help="Seconds without another arrival before newcomers are taken in, together.")
]


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    # What follows SCRIPT belongs to the script, options included.
    app.command("run", context_settings={"allow_interspersed_args": False})(run)


def run(
    script: Annotated[Path, typer.Argument(help="The training script.", metavar="SCRIPT")],
    args: Annotated[list[str] | None, typer.Argument(help="Its arguments, passed on as they are.")] = None,
    nodes: Annotated[int, typer.Option(help="Nodes to start; each is an agent with its workers.")] = 4,
    workers_per_node: Annotated[int, typer.Option(help="Worker processes on each node.")] = 1,
    events: Annotated[
        Path | None, typer.Option(help="Write the job's events to this file, a JSON object a line.")
    ] = None,
    store: Annotated[
        str,
        typer.Option(
            help="Where the coordinator keeps its state: sqlite:PATH or memory:.", show_default="in the job's folder"
        ),
    ] = "",
    checkpoint: Annotated[
        Path | None, typer.Option(help="Keep checkpoints in this folder, and resume from them.")
    ] = None,
    checkpoint_every: Annotated[int, typer.Option(help="Steps between checkpoints.")] = 100,
    slots: Slots = 6,
    fault_threshold: FaultThreshold = 2,
    join_window: JoinWindow = 0.0,
    allow_faults: Annotated[bool, typer.Option("--allow-faults", help="Allow `holdfast fail` in this job.")] = False,
    port: Annotated[int, typer.Option(help="The coordinator's port; 0: a free one.")] = 0,
    job: Annotated[str, typer.Option(help="The job's name.", show_default="the script's")] = "",
    job_dir: Annotated[
        Path | None, typer.Option(help="Keep the job's files here.", show_default="a temporary folder")
    ] = None,
    preload: Annotated[
        str,
        typer.Option(
            help="Modules to import once, before workers are forked: NAME,NAME,...", show_default="torch and more"
        ),
    ] = ",".join(PRELOAD),
    plain: Annotated[bool, typer.Option("--plain", help="Plain lines, also in a terminal.")] = False,
    verify_state: Annotated[
        bool, typer.Option("--verify-state", help="Compare the hashes of all replicas after every step (slow).")
    ] = False,
) -> None:
    """Run a job on this machine: a coordinator, agents, and their workers.

    Ends with 0 when the job is done, 1 when it failed, 2 for bad input, 130 after Ctrl-C.
    """
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
    settings = LaunchSettings(
        script=script,
        args=tuple(args or ()),
        nodes=nodes,
        workers_per_node=workers_per_node,
        job=job,
        events=events,
        store=store,
        port=port,
        checkpoint_dir=checkpoint,
        checkpoint_every=checkpoint_every,
        allow_faults=allow_faults,
        verify_state=verify_state,
        slots=slots,
        fault_threshold=fault_threshold,
        join_window=join_window,
        job_dir=job_dir,
        registry=registry_directory(os.environ),
        environment=worker_environment(dict(os.environ)),
        preload=tuple(name for name in preload.split(",") if name),
    )
    if sys.stdout.isatty() and not plain:
        code, failure = _run_live(settings)
    else:
        progress = PlainProgress(say)
        code, failure = asyncio.run(launch(settings, progress, warn)), progress.failure
    if code in (EXIT_FAILED, EXIT_BAD_INPUT) and failure:
        warn(f"holdfast: {failure}")
    raise typer.Exit(code)


def _run_live(settings: LaunchSettings) -> tuple[int, str]:
    """Run with the live view, which must have the terminal for itself: what the workers print goes to files.

    Returns:
        The exit code, and why the job failed ("" where it did not).
    """
    settings.check()
    with tempfile.TemporaryDirectory(prefix="holdfast-logs-") as folder:
        logs = settings.job_dir or Path(folder)
        logs.mkdir(parents=True, exist_ok=True)
        with LiveProgress(Console()) as progress:
            code = asyncio.run(launch(dataclasses.replace(settings, log_folder=logs), progress, warn))
        if code not in (EXIT_DONE, EXIT_INTERRUPTED):
            for log in sorted(logs.glob("*.log")):
                _tail(log)
    return code, progress.failure


def _tail(log: Path) -> None:
    """Show the end of a worker's output."""
    lines = log.read_text(errors="replace").splitlines()[-_TAIL_LINES:]
    if lines:
        warn(f"--- {log.stem} ---")
        for line in lines:
            warn(line)


def worker_environment(environment: dict[str, str]) -> dict[str, str]:
    """Return the environment for workers: one thread each, unless the user says otherwise (as torchrun does)."""
    environment.setdefault("OMP_NUM_THREADS", "1")
    return environment


def say(line: str) -> None:
    """Print one line now."""
    print(line, flush=True)


def warn(line: str) -> None:
    """Print one line now, where errors go."""
    print(line, file=sys.stderr, flush=True)
