"""`holdfast stop` and `checkpoint`: a job is saved, and ends or goes on."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer

from holdfast.cli.connection import Server
from holdfast.cli.following.progress import describe
from holdfast.cli.options import grouped
from holdfast.cli.output import AsJson, print_json, say
from holdfast.cli.patience import LOOK_AGAIN_S, patiently
from holdfast.control.client import CoordinatorClient
from holdfast.control.pool_client import PoolClient
from holdfast.errors import EXIT_ENDED, JobFailedError
from holdfast.protocol.events import CheckpointSaved, CoordinatorRestarted, JobFailed, JobFinished
from holdfast.protocol.pool.record import OVER

_WHY = "holdfast stop"

NoWait = Annotated[bool, typer.Option("--no-wait", help="Return at once: do not wait until it is done.")]


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    app.command("stop")(grouped(stop))
    app.command("checkpoint")(grouped(checkpoint))


def stop(
    now: Annotated[bool, typer.Option("--now", help="At once, without saving.")] = False,
    no_wait: NoWait = False,
    as_json: AsJson = False,
    *,
    server: Server,
) -> None:
    """Save the job, and end it. Its exit code is 75. The same command continues the job.

    The job is saved in its --checkpoint-dir. Without this option it ends, and nothing is saved.
    """
    pool = server.of_pool()
    if pool is not None:
        assert server.job is not None
        _stop_pooled(pool, server.job, now=now, no_wait=no_wait, as_json=as_json)
        return
    with server.client() as client:
        before = client.status()
        client.shutdown(EXIT_ENDED, _WHY, save=not now)
        end, saved = (None, None) if no_wait else end_of(client, before, save=not now)
    if as_json:
        steps = {"step": end.steps, "why": end.why} if end is not None else {}
        print_json({"asked": True, **steps, "saved_step": saved})
    elif end is None:
        say("the job is asked to end")
    else:
        say(f"{describe(end)}; {said_of(before, saved)}")


def said_of(before: dict[str, Any], step: int | None) -> str:
    """Say what is saved of a job that has ended; `before`: its status when it was asked to."""
    if step is not None:
        return f"step {step} is saved"
    return f"nothing is saved{'' if before['saving'] else ': the job keeps no checkpoints (--checkpoint-dir)'}"


def _stop_pooled(pool: PoolClient, name: str, *, now: bool, no_wait: bool, as_json: bool) -> None:
    """Have a pool end a job, queued or not."""
    with pool as client:
        client.stop(name, now=now)
        job = patiently(lambda: client.job(name))
        while job["state"] not in OVER and not no_wait:
            time.sleep(LOOK_AGAIN_S)
            job = patiently(lambda: client.job(name))
    if as_json:
        print_json({"asked": True, "state": job["state"], "why": job["why"]})
    elif job["state"] in OVER:
        say(f"job {name} is {job['state']}{': ' if job['why'] else ''}{job['why']}")
    else:
        say(f"job {name} is asked to end")


def checkpoint(
    no_wait: NoWait = False,
    as_json: AsJson = False,
    *,
    server: Server,
) -> None:
    """Save the job after this step; it continues."""
    with server.client() as client:
        status = client.status()
        client.checkpoint()
        saved = None if no_wait else _saved_beyond(client, status["events"], status["step"])
    if as_json:
        print_json({"asked": True, "saved_step": saved})
    else:
        say("a checkpoint is asked for" if saved is None else f"step {saved} is saved")


def _saved_beyond(client: CoordinatorClient, after: int, step: int) -> int:
    """Wait until a step beyond this one is saved, and return it.

    Raises:
        JobFailedError: the job is over before that.
    """
    for event in client.events(after, follow=True):
        if isinstance(event, CheckpointSaved) and event.step > step:
            return event.step
        if isinstance(event, CoordinatorRestarted):
            client.checkpoint()  # (nobody knows any more that it was asked for)
        if isinstance(event, JobFinished | JobFailed):
            break
    raise JobFailedError(f"the job was over before a step beyond {step} was saved")


def end_of(client: CoordinatorClient, before: dict[str, Any], *, save: bool) -> tuple[JobFinished, int | None]:
    """Wait until the job is over; return how it ended, and the step that was saved last, None where none is.

    Where all that the job has led to was saved before it was asked to end, nothing is saved anew.

    Args:
        before: its status from before it was asked to.

    Raises:
        JobFailedError: it has failed meanwhile, or its end is not known.
    """
    kept = before["checkpoints"]
    saved: int | None = kept[-1]["step"] if kept else None
    for event in client.events(before["events"], follow=True):
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
