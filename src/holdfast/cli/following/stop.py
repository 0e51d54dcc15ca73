"""`holdfast stop` and `checkpoint`: save a job, and end it or continue."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer

from holdfast.cli.connection import Server
from holdfast.cli.following.progress import describe
from holdfast.cli.options import with_option_groups
from holdfast.cli.output import AsJson, print_json, print_line
from holdfast.cli.retrying import POLL_S, retry_query
from holdfast.control.client import CoordinatorClient
from holdfast.control.pool_client import PoolClient
from holdfast.errors import EXIT_ENDED, JobFailedError
from holdfast.protocol.events import CheckpointSaved, CoordinatorRestarted, JobFailed, JobFinished
from holdfast.protocol.pool.record import OVER

_WHY = "holdfast stop"

NoWait = Annotated[bool, typer.Option("--no-wait", help="Return at once: do not wait until it is done.")]


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    app.command("stop")(with_option_groups(stop))
    app.command("checkpoint")(with_option_groups(checkpoint))


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
    pool = server.find_pool_of_job()
    if pool is not None:
        assert server.job is not None
        _stop_pooled(pool, server.job, now=now, no_wait=no_wait, as_json=as_json)
        return
    with server.client() as client:
        before = client.status()
        client.shutdown(EXIT_ENDED, _WHY, save=not now)
        end, saved = (None, None) if no_wait else await_end(client, before, save=not now)
    if as_json:
        steps = {"step": end.steps, "why": end.why} if end is not None else {}
        print_json({"asked": True, **steps, "saved_step": saved})
    elif end is None:
        print_line("the job is asked to end")
    else:
        print_line(f"{describe(end)}; {describe_saved(before, saved)}")


def describe_saved(before: dict[str, Any], step: int | None) -> str:
    """Return which step of an ended job is saved, in words.

    Args:
        before: its status before the request to end.
        step: the saved step, or None.
    """
    if step is not None:
        return f"step {step} is saved"
    return f"nothing is saved{'' if before['saving'] else ': the job keeps no checkpoints (--checkpoint-dir)'}"


def _stop_pooled(pool: PoolClient, name: str, *, now: bool, no_wait: bool, as_json: bool) -> None:
    """End a job of a pool, which may still be in the queue. Wait for its end, unless `no_wait`, and print its state."""
    with pool as client:
        client.stop(name, now=now)
        job = retry_query(lambda: client.job(name))
        while job["state"] not in OVER and not no_wait:
            time.sleep(POLL_S)
            job = retry_query(lambda: client.job(name))
    if as_json:
        print_json({"asked": True, "state": job["state"], "why": job["why"]})
    elif job["state"] in OVER:
        print_line(f"job {name} is {job['state']}{': ' if job['why'] else ''}{job['why']}")
    else:
        print_line(f"job {name} is asked to end")


def checkpoint(
    no_wait: NoWait = False,
    as_json: AsJson = False,
    *,
    server: Server,
) -> None:
    """Save the job after this step; it continues.

    Without --no-wait it waits until a later step than the present one is saved. If the job ends first, the exit code is
    1.
    """
    with server.client() as client:
        status = client.status()
        client.checkpoint()
        saved = None if no_wait else _await_saved_after(client, status["events"], status["step"])
    if as_json:
        print_json({"asked": True, "saved_step": saved})
    else:
        print_line("a checkpoint is asked for" if saved is None else f"step {saved} is saved")


def _await_saved_after(client: CoordinatorClient, after: int, step: int) -> int:
    """Wait until a step after `step` is saved, and return it. A new coordinator is asked again.

    Args:
        after: number of the newest event before the request.

    Raises:
        JobFailedError: the job ended first.
    """
    for event in client.events(after, follow=True):
        if isinstance(event, CheckpointSaved) and event.step > step:
            return event.step
        if isinstance(event, CoordinatorRestarted):
            client.checkpoint()  # The new coordinator does not know of the request.
        if isinstance(event, JobFinished | JobFailed):
            break
    raise JobFailedError(f"the job was over before a step beyond {step} was saved")


def await_end(client: CoordinatorClient, before: dict[str, Any], *, save: bool) -> tuple[JobFinished, int | None]:
    """Wait until the job ends. Return its last event, and the step that was saved last, or None if no step was.

    A new coordinator is asked again to end the job. If the newest state was already saved, it is not saved again.

    Args:
        before: its status before the request to end.
        save: whether the job was asked to save.

    Raises:
        JobFailedError: the job failed, or its events do not say how it ended.
    """
    kept = before["checkpoints"]
    saved: int | None = kept[-1]["step"] if kept else None
    for event in client.events(before["events"], follow=True):
        match event:
            case CheckpointSaved(step=step):
                saved = step
            case CoordinatorRestarted():
                # The coordinator before it may not have passed on the request.
                client.shutdown(EXIT_ENDED, _WHY, save=save)
            case JobFinished():
                return event, saved
            case JobFailed(why=why):
                raise JobFailedError(f"the job failed before it was stopped: {why}")
            case _:
                pass
    raise JobFailedError("the job's events end without saying how it ended: see `holdfast jobs`")
