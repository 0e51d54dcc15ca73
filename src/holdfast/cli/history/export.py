"""`holdfast export`: write the results of each step of a job to a file, for other tools."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from holdfast.cli.connection import Server
from holdfast.cli.following.events import EventsFile, read_job_events
from holdfast.cli.options import with_option_groups
from holdfast.cli.output import AsJson, print_json, print_line
from holdfast.errors import BadInputError
from holdfast.observability.metric_rows import FORMATS, MetricWriter
from holdfast.protocol.events import StepCommitted


def register(app: typer.Typer) -> None:
    """Add this module's command."""
    app.command("export")(with_option_groups(export))


def export(
    events: EventsFile = None,
    format: Annotated[
        Literal["jsonl", "csv", "tensorboard"],
        typer.Option("--format", help="Format of the output."),
    ] = "jsonl",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="PATH", help="A file; for TensorBoard a folder.")
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Write new values until the job ends.")] = False,
    as_json: AsJson = False,
    *,
    server: Server,
) -> None:
    """Write loss and logged values to a file.

    Steps that a rollback undid are removed. An existing file is continued, so that it has all runs of a job.
    """
    if output is None:
        raise BadInputError("--output is missing: give a file, or for TensorBoard a folder")
    if follow and events is not None:
        raise BadInputError(f"--follow is for a job that runs: {events} is a file")
    writer, steps = MetricWriter(FORMATS[format](output)), 0
    try:
        if follow:
            with server.client() as client:
                for event in client.events(follow=True):
                    writer.on_event(event)
                    steps += isinstance(event, StepCommitted)
        else:
            for event in read_job_events(events, server):
                writer.on_event(event)
                steps += isinstance(event, StepCommitted)
    finally:
        writer.close()
    if as_json:
        print_json({"format": format, "output": str(output), "steps_read": steps})
    else:
        print_line(f"{output}: {steps} steps were read")
