"""`holdfast submit`, `jobs`, `suspend`, `resume`, `update`: manage the jobs of a pool."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from holdfast.cli.connection import Server
from holdfast.cli.following.stop import NoWait
from holdfast.cli.options import warn_of_misplaced, with_option_groups
from holdfast.cli.output import AsJson, on_one_line, print_json, print_line, warn
from holdfast.cli.pool.calibrate import warn_of_pace
from holdfast.cli.retrying import POLL_S, retry_query
from holdfast.cli.spec_options import AsModule, SpecGroup, collect_job, job_spec, without_effect
from holdfast.control.launch.script_modules import with_script
from holdfast.control.launch.settings import check_script
from holdfast.control.pool_client import PoolClient
from holdfast.control.registry import live_jobs, registry_directory
from holdfast.documents import Given, build_struct
from holdfast.errors import EXIT_DONE, EXIT_ENDED, EXIT_FAILED, BadInputError, JobFailedError
from holdfast.protocol.job_spec import JobSpec
from holdfast.protocol.pool.record import OVER

#: how a job is over -> the exit code of who has followed it
_ENDS = {"finished": EXIT_DONE, "stopped": EXIT_ENDED}
Set = Annotated[
    list[str] | None,
    typer.Option(metavar="KEY=VALUE", help="Set any key of job.toml, such as weight=2.", show_default=False),
]


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    # What follows SCRIPT belongs to the script, options included.
    settings = {"allow_interspersed_args": False}
    app.command("submit", context_settings=settings)(with_option_groups(submit))
    app.command("jobs")(with_option_groups(jobs))
    app.command("suspend")(with_option_groups(suspend))
    app.command("resume")(with_option_groups(resume))
    app.command("update")(with_option_groups(update))


def submit(
    script: Annotated[
        str,
        typer.Argument(help="A script, a job file, or with -m a module.", metavar="SCRIPT|JOB.toml|MOD"),
    ],
    args: Annotated[list[str] | None, typer.Argument(help="The script's arguments, passed on as they are.")] = None,
    *,
    spec: Annotated[dict[str, Given], SpecGroup()],
    set: Set = None,
    follow: Annotated[bool, typer.Option("--follow", help="Wait for the job, and return its exit code.")] = False,
    as_module: AsModule = False,
    as_json: AsJson = False,
    server: Server,
) -> None:
    """Submit a job to a pool. The script must have the same path on all nodes of the pool.

    It prints the job's state, and does not wait for it without --follow.
    """
    given = collect_job(script, args or (), set or (), spec, as_module=as_module)
    described = with_script(job_spec(given), os.getcwd())
    check_script(described.script)
    warn_of_misplaced(submit, "submit", described.script, args or ())
    for warning in without_effect(given, described):
        warn(f"holdfast: {warning}")
    job = described.settled(os.getcwd())
    warn_of_pace(job)
    with server.pool() as client:
        number = client.submit(job)
        told = retry_query(lambda: client.job(job.name))
        if as_json:
            print_json({"job": job.name, "submission": number, "state": told["state"], "why": told["why"]})
        else:
            print_line(_describe_job(told))
        if follow:
            raise typer.Exit(_follow(client, job.name, number, as_json=as_json))


def _follow(client: PoolClient, name: str, number: int, *, as_json: bool) -> int:
    """Wait until a job ends, and print each change of its state unless `as_json`. Return its exit code.

    Raises:
        JobFailedError: another submission has taken the job's name.
    """
    before = ""
    while True:
        job = retry_query(lambda: client.job(name))
        if job["submission"] != number:
            raise JobFailedError(f"job {name} is another one by now: how this one ended, the pool's events say")
        line = _describe_job(job)
        if line != before and before and not as_json:
            print_line(line)
        before = line
        if job["state"] in OVER:
            return _ENDS.get(job["state"], EXIT_FAILED)
        time.sleep(POLL_S)


def jobs(as_json: AsJson = False, *, server: Server) -> None:
    """Show the jobs of a pool and of this machine."""
    alone = [] if server.address else [one for one in live_jobs(registry_directory(os.environ)) if not one.pool]
    pooled: list[dict[str, Any]] = []
    if server.address or len(alone) < len(live_jobs(registry_directory(os.environ))):
        with server.pool() as client:
            pooled = client.status()["jobs"]
    if as_json:
        print_json({"jobs": [*({"job": one.job, "url": one.url} for one in alone), *pooled]})
        return
    for one in alone:
        print_line(f"{one.job}  runs without a pool at {one.url}")
    for job in pooled:
        print_line(on_one_line(_describe_job(job)))
    if not alone and not pooled:
        print_line("there are no jobs")


def _describe_job(job: Mapping[str, Any]) -> str:
    """Return a job's line for the user: its name, then the number and names of its nodes and standbys if it runs, else
    its state and the reason.
    """
    state, nodes, why = job["state"], job["nodes"], job["why"]
    if state == "admitted":
        of = f" of {job['share']}" if len(nodes) != job["share"] else ""
        many = f"{len(nodes)}{of} {'node' if job['share'] == 1 else 'nodes'}"
        waiting = job["standbys"]
        beside = f"{len(waiting)} standby" if len(waiting) == 1 else f"{len(waiting)} standbys"
        waits = f"; {beside}: {', '.join(waiting)}" if waiting else ""
        return f"{job['job']}  runs on {many}: {', '.join(nodes) or 'none so far'}{waits}"
    return f"{job['job']}  {state}{': ' if why else ''}{why}"


def suspend(
    force: Annotated[bool, typer.Option("--force", help="Also a job without checkpoints, which will restart.")] = False,
    no_wait: NoWait = False,
    as_json: AsJson = False,
    *,
    server: Server,
) -> None:
    """Save a job of a pool, and free its nodes.

    The job is named with -j. Without --no-wait it waits until the nodes are free. It prints the job's state.
    """
    name = _named_job(server)
    with server.pool() as client:
        client.suspend(name, force=force)
        _await_settled(client, name, "suspending", no_wait=no_wait, as_json=as_json)


def resume(as_json: AsJson = False, *, server: Server) -> None:
    """Continue a suspended job of a pool.

    The job is named with -j. It prints the job's state, and does not wait until it trains.
    """
    name = _named_job(server)
    with server.pool() as client:
        client.resume(name)
        _await_settled(client, name, "", no_wait=True, as_json=as_json)


def update(
    weight: Annotated[float | None, typer.Option(help="Weight of the job relative to others.")] = None,
    priority: Annotated[int | None, typer.Option(help="Jobs of higher priority get nodes first.")] = None,
    min_nodes: Annotated[int | None, typer.Option(help="Fewest nodes that the job keeps.")] = None,
    max_nodes: Annotated[int | None, typer.Option(help="Most nodes that the job gets.")] = None,
    as_json: AsJson = False,
    *,
    server: Server,
) -> None:
    """Change the limits of a job of a pool.

    The job is named with -j. Limits that are not given stay as they are. It prints the job's state, and does not wait.
    """
    name = _named_job(server)
    given = {"weight": weight, "priority": priority, "min_nodes": min_nodes, "max_nodes": max_nodes}
    changes = {key: value for key, value in given.items() if value is not None}
    if not changes:
        raise BadInputError("no change is given: give --weight, --priority, --min-nodes or --max-nodes")
    build_struct(JobSpec, {key: Given(value, f"--{key.replace('_', '-')}") for key, value in changes.items()})
    with server.pool() as client:
        client.update(name, changes)
        _await_settled(client, name, "", no_wait=True, as_json=as_json)


def _named_job(server: Server) -> str:
    """Return the job of -j. Raises `BadInputError` without it."""
    if not server.job:
        raise BadInputError("no job is named: say which one is meant (-j NAME)")
    return server.job


def _await_settled(client: PoolClient, name: str, passing: str, *, no_wait: bool, as_json: bool) -> None:
    """Wait until a job is no longer in the state `passing`, unless `no_wait`, and print its state."""
    job = retry_query(lambda: client.job(name))
    while job["state"] == passing and not no_wait:
        time.sleep(POLL_S)
        job = retry_query(lambda: client.job(name))
    if as_json:
        print_json(job)
    else:
        print_line(on_one_line(_describe_job(job)))
