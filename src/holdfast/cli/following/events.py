"""`holdfast events`: print the events of a job."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from holdfast.cli.connection import Server
from holdfast.cli.following.progress import describe_with_time
from holdfast.cli.following.show import event_json
from holdfast.cli.options import with_option_groups
from holdfast.cli.output import AsJson, print_line, warn
from holdfast.errors import EXIT_INTERRUPTED, BadInputError
from holdfast.observability.event_lines import read_events
from holdfast.protocol.events import ReadEvent

EventsFile = Annotated[
    Path | None,
    typer.Argument(
        metavar="[EVENTS]",
        help="A file that --events wrote; the job may still run.",
        show_default="the events of the job that runs",
    ),
]


def register(app: typer.Typer) -> None:
    """Add this module's command."""
    app.command("events")(with_option_groups(events))


def events(
    file: EventsFile = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Print new events until the job ends.")] = False,
    after: Annotated[int, typer.Option(metavar="SEQ", help="Only events with a higher `seq` than this.")] = 0,
    as_json: AsJson = False,
    *,
    server: Server,
) -> None:
    """Print the events of a job."""
    if file is not None and follow:
        raise BadInputError(f"--follow is for a job that runs, not for a file: leave out {file}")
    try:
        for event in read_job_events(file, server, after, follow=follow):
            print_line(event_json(event).decode() if as_json else describe_with_time(event))
    except KeyboardInterrupt:
        raise typer.Exit(EXIT_INTERRUPTED) from None


def read_job_events(file: Path | None, server: Server, after: int = 0, *, follow: bool = False) -> Iterator[ReadEvent]:
    """Yield the events with numbers above `after`: those of the file if there is one, else of the running job.

    With `follow`, wait for further events until the job ends. An incomplete last line of a file is left out with a
    warning.

    Raises:
        BadInputError: the file is not an events file, or it is not clear which job is meant.
        UnreachableError: no job matches, or its coordinator does not answer.
    """
    if file is not None:
        yield from (event for event in read_events(file, lambda said: warn(f"holdfast: {said}")) if event.seq > after)
        return
    with server.client() as client:
        yield from client.events(after, follow=follow)
