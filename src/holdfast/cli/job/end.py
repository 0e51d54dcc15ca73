"""`holdfast stop`: a job is saved, and ends."""

from __future__ import annotations

from typing import Annotated

import typer

from holdfast.cli.connection import Server
from holdfast.cli.job.progress import describe
from holdfast.cli.options import grouped
from holdfast.cli.output import AsJson, print_json, say
from holdfast.control.client import CoordinatorClient
from holdfast.errors import EXIT_ENDED, JobFailedError
from holdfast.protocol.events import CheckpointSaved, CoordinatorRestarted, JobFailed, JobFinished

_WHY = "holdfast stop"

NoWait = Annotated[bool, typer.Option("--no-wait", help="Return at once: do not wait until it is done.")]


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    app.command("stop", rich_help_panel="Act")(grouped(stop))


def stop(
    now: Annotated[bool, typer.Option("--now", help="At once, without saving.")] = False,
    no_wait: NoWait = False,
    as_json: AsJson = False,
    *,
    server: Server,
) -> None:
    """Save the job, and end it, with exit code 75. The same command takes it up again where it was.

    It is saved in the folder that it keeps checkpoints in; without one it simply ends.
    """
    with server.client() as client:
        after = client.status()["events"]
        client.shutdown(EXIT_ENDED, _WHY, save=not now)
        end, saved = (None, None) if no_wait else _end_of(client, after, save=not now)
    if as_json:
        steps = {"step": end.steps, "why": end.why} if end is not None else {}
        print_json({"asked": True, **steps, "saved_step": saved})
    elif end is None:
        say("the job is asked to end")
    else:
        say(f"{describe(end)}{'' if saved is None else f'; step {saved} is saved'}")


def _end_of(client: CoordinatorClient, after: int, *, save: bool) -> tuple[JobFinished, int | None]:
    """Wait until the job is over; return how it ended, and the step that was saved last meanwhile.

    Raises:
        JobFailedError: it has failed meanwhile, or its end is not known.
    """
    saved: int | None = None
    for event in client.events(after, follow=True):
        match event:
            case CheckpointSaved(step=step):
                saved = step
            case CoordinatorRestarted():
                client.shutdown(EXIT_ENDED, _WHY, save=save)  # the one that was asked may have told nobody
            case JobFinished():
                return event, saved
            case JobFailed(why=why):
                raise JobFailedError(f"the job failed before it was stopped: {why}")
            case _:
                pass
    raise JobFailedError("the job's events end without saying how it ended: see `holdfast jobs`")
