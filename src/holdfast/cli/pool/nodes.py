"""`holdfast nodes`, and what `drain`, `undrain` and `scale` do where a pool's nodes, or a job of it, are meant."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from holdfast.cli.connection import Server
from holdfast.cli.options import with_option_groups
from holdfast.cli.output import AsJson, print_json, print_line
from holdfast.cli.retrying import POLL_S, retry_query
from holdfast.control.pool_client import PoolClient
from holdfast.errors import RefusedError


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    app.command("nodes")(with_option_groups(nodes))


def nodes(as_json: AsJson = False, *, server: Server) -> None:
    """Show the nodes of a pool."""
    with server.pool() as client:
        told = client.status()["nodes"]
    if as_json:
        print_json({"nodes": told})
        return
    if not told:
        print_line("there are no nodes")
        return
    table = Table("node", "rack", "zone", "job", "state", box=None)
    for node in told:
        table.add_row(node["node"], node["rack"], node["zone"], node["job"], state_of(node))
    Console().print(table)


def state_of(node: Mapping[str, Any]) -> str:
    """Return the state of a node of a pool in words.

    Without a job: drained, else free or away. With one: how the job uses it, then whether it leaves, will be drained or
    is away, joined by commas.
    """
    if not node["job"]:
        state = "free" if node["here"] else "away"
        return "drained" if node["drained"] else state
    words = ["waits as a standby" if node["standby"] else "in use"]
    words += ["leaves"] if node["leaving"] else []
    words += ["will be drained"] if node["drained"] else []
    words += [] if node["here"] else ["away"]
    return ", ".join(words)


def move_together(pool: PoolClient, *, dry_run: bool, no_wait: bool, as_json: bool) -> None:
    """Move a pool's jobs into fewer racks and zones, if that is worth the cost, and print the moves.

    Wait until they are done, unless `no_wait`. With `dry_run`, only print them.
    """
    with pool as client:
        found = client.compact(dry_run=dry_run)
        while not (dry_run or no_wait) and retry_query(client.status)["moves_to_come"]:
            time.sleep(POLL_S)
    if as_json:
        print_json(found)
        return
    for move in found["moves"]:
        print_line(f"{move['job']}: {move['from_node']} -> {move['to_node']}")
    for job, (before, after) in found["racks"].items():
        zones = "{} -> {}".format(*found["zones"][job])
        print_line(f"{job}: {before} -> {after} racks, {zones} zones")
    if not found["moves"]:
        print_line("no job is worth moving: fewer racks or zones are not to be had, or not for what that costs")
    else:
        cost = f"{found['cost_s']:.1f} s of their training, and are worth {found['gain_s']:.0f} s"
        print_line(f"{len(found['moves'])} moves, one after another: they cost the jobs about {cost}")


def undrain_nodes(pool: PoolClient, names: Sequence[str], *, as_json: bool) -> None:
    """Allow jobs to get these nodes again, and print that."""
    pool.undrain(names)
    if as_json:
        print_json({"nodes": dict.fromkeys(names, True)})
        return
    for name in names:
        print_line(f"{name} may be given to jobs again")


def scale_job(pool: PoolClient, name: str, size: str, *, as_json: bool) -> None:
    """Set the most nodes that a job of a pool gets: `size`, or with `+` that many more than its share now.

    Print its state.

    Raises:
        RefusedError: the job needs more nodes than that.
    """
    with pool as client:
        job = client.job(name)
        most = int(job["share"]) + int(size) if size.startswith("+") else int(size)
        if most < job["min_nodes"]:
            raise RefusedError(
                f"job {name} needs {job['min_nodes']} nodes: lower that first "
                f"(holdfast update -j {name} --min-nodes {most})"
            )
        client.update(name, {"max_nodes": most})
        job = client.job(name)
    if as_json:
        print_json(job)
        return
    here = f"its share is {job['share']} now" if job["state"] == "admitted" else f"it is {job['state']}"
    print_line(f"{name} may have {most} {'node' if most == 1 else 'nodes'}: {here}, as others leave them over")
