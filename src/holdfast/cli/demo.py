"""`holdfast demo`: four nodes of this machine train a model; one of them is killed, and another one joins."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from holdfast.cli.examples import example_file
from holdfast.cli.output import print_line
from holdfast.errors import BadInputError
from holdfast.observability.event_lines import NoEventError, decode_event, read_events
from holdfast.protocol.events import GenerationStarted, JobStarted, StepCommitted

#: with this model a step of four workers takes about 0.2 s on two cores
MODEL = ("--layers", "4", "--dim", "64", "--hidden", "128", "--context", "32")
_HOLDFAST = (sys.executable, "-m", "holdfast")
_POLL_S = 0.5


def register(app: typer.Typer) -> None:
    """Add this module's command."""
    app.command("demo")(demo)


def demo(
    steps: Annotated[int, typer.Option("--steps", min=16, metavar="N", help="Training steps.")] = 240,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder for events and picture.")] = Path(
        "holdfast-demo"
    ),
) -> None:
    """Train with four nodes on this machine for a minute. One is killed half-way, and a new one joins.

    The events and a picture of them are written into DIR, in place of those of an earlier demo. It ends with the job's
    exit code.
    """
    events, picture = out / "demo.jsonl", out / "demo.png"
    try:
        out.mkdir(parents=True, exist_ok=True)
        _remove_earlier_demo(events, picture)
    except OSError as error:
        raise BadInputError(f"--out {out}: {error.filename}: {error.strerror}; give another folder") from None
    command = (*_HOLDFAST, "run", "--nodes", "4", "--allow-faults", "--events", str(events))
    # Several workers share the machine's cores, so each one computes with one thread.
    environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    script = str(example_file("moe_gpt"))
    job = subprocess.Popen((*command, script, *MODEL, "--steps", str(steps)), env=environment)
    threading.Thread(target=_kill_and_add_a_node, args=(events, steps, lambda: job.poll() is None), daemon=True).start()
    try:
        code = job.wait()
    except KeyboardInterrupt:  # the job has received the same signal, and ends in good order
        code = job.wait()
    if code == 0:
        code = subprocess.run((*_HOLDFAST, "report", str(events), "--plot", str(picture)), check=False).returncode
    if code == 0:
        print_line(f"\nThe picture: {picture}. The events: {events}.")
    raise typer.Exit(code)


def _remove_earlier_demo(events: Path, picture: Path) -> None:
    """Remove the events and the picture of an earlier demo.

    Raises:
        BadInputError: a file with such a name is not from an earlier demo.
    """
    for file, is_from_demo in ((events, _begins_with_event(events)), (picture, events.exists())):
        if (file.exists() or file.is_symlink()) and not (is_from_demo and file.is_file()):
            raise BadInputError(f"{file} is not from an earlier demo: move it, or give another folder with --out DIR")
    picture.unlink(missing_ok=True)
    events.unlink(missing_ok=True)


def _begins_with_event(file: Path) -> bool:
    """Return whether a file is empty, or its first line is an event. False if there is no such file."""
    if not file.is_file():
        return False
    with file.open("rb") as stream:
        line = stream.readline()
    try:
        decode_event(line)
    except NoEventError:
        return not line
    return True


def _kill_and_add_a_node(events: Path, steps: int, is_running: Callable[[], bool]) -> None:
    """Kill a node half-way through the job, and add another one a little later, by commands that print their errors.

    Do nothing if the job does not start; do not add a node if it ends before.
    """
    started = await_event(events, lambda event: isinstance(event, JobStarted), is_running)
    trains = await_event(events, lambda event: isinstance(event, GenerationStarted), is_running)
    if not isinstance(started, JobStarted) or trains is None:
        return  # the job's own output says why
    address = ("--address", started.url)
    kill_at, join_at = steps // 2, steps // 2 + steps // 8
    subprocess.run((*_HOLDFAST, "inject", "kill", "node-1", "--step", str(kill_at), *address), check=False)
    if await_event(events, lambda event: isinstance(event, StepCommitted) and event.step >= join_at, is_running):
        subprocess.run((*_HOLDFAST, "scale", "+1", *address), check=False)


def await_event(events: Path, is_wanted: Callable[[object], bool], is_running: Callable[[], bool]) -> object | None:
    """Poll an event file, and return the first wanted event of a job; None if the job ends without one."""
    while True:
        running = is_running()
        found = next(filter(is_wanted, _events_so_far(events)), None)
        if found is not None or not running:
            return found
        time.sleep(_POLL_S)


def _events_so_far(file: Path) -> Sequence[object]:
    """Return the events of a file, or () if it does not exist yet or has none."""
    try:
        return read_events(file)
    except BadInputError:  # The file does not exist yet, or has no event.
        return ()
