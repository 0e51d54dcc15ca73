"""`holdfast whatif`: the pool's next plan if a node were lost, some came, or a job were handed in."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from holdfast.cli.connection import Server
from holdfast.cli.options import with_option_groups
from holdfast.cli.output import AsJson, print_json, print_line
from holdfast.cli.pool.calibrate import warn_of_pace
from holdfast.cli.spec_options import collect_job, job_spec
from holdfast.control.launch.script_modules import with_script
from holdfast.errors import BadInputError
from holdfast.protocol.job_spec import JobSpec

#: more are not asked about; how many more it takes itself, each pool says
_MOST_ADDED = 1 << 16


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    app.command("whatif")(with_option_groups(whatif))


def whatif(
    what: Annotated[str, typer.Argument(help="lose, add or submit.", metavar="lose|add|submit", show_default=False)],
    of: Annotated[str, typer.Argument(help="A node; how many nodes; a job's file.", metavar="NODE|N|FILE")],
    as_json: AsJson = False,
    *,
    server: Server,
) -> None:
    """Forecast a pool's plan after a node or job changes.

    Nothing is changed. It prints the nodes of each job now and then.
    """
    asked = _ASKED.get(what)
    if asked is None:
        raise BadInputError(f"{what!r} is nothing that can be asked about: give {', '.join(_ASKED)}")
    change = asked(of)
    with server.pool() as client:
        found = client.what_if(**change)
    if as_json:
        print_json(found)
    else:
        _show(found)


def _parse_lost_node(node: str) -> dict[str, object]:
    return {"lose": node}


def _parse_added_nodes(nodes: str) -> dict[str, object]:
    """Return the request to add this many nodes.

    Raises:
        BadInputError: it is not a number from 1 to `_MOST_ADDED`.
    """
    if not nodes.isdecimal() or not 1 <= int(nodes) <= _MOST_ADDED:
        raise BadInputError(f"{nodes!r} is not a number of nodes to add: give 1 to {_MOST_ADDED}")
    return {"add": int(nodes)}


def _submit(file: str) -> dict[str, object]:
    return {"submit": _read_job(file)}


_ASKED: dict[str, Callable[[str], dict[str, object]]] = {
    "lose": _parse_lost_node,
    "add": _parse_added_nodes,
    "submit": _submit,
}


def _read_job(source: str) -> JobSpec:
    """Return the job of a file, and warn if it is slower with more nodes."""
    described = with_script(job_spec(collect_job(source, (), (), {})), os.getcwd()).settled(os.getcwd())
    warn_of_pace(described)
    return described


def _show(found: Mapping[str, Any]) -> None:
    """Print the shares of the jobs now and after the change, starved jobs, and the worth of the plan if known."""
    print_line(f"{found['nodes_now']} nodes to share out now, {found['nodes']} then (policy {found['policy']})")
    table = Table("job", "nodes now", "then", "", box=None)
    worth = found["worth"]
    shares = found["shares"]
    for job in sorted({*found["shares_now"], *shares}):
        table.add_row(job, str(found["shares_now"].get(job, 0)), str(shares.get(job, 0)), found["waiting"].get(job, ""))
    Console().print(table)
    for job, why in sorted(found["starved"].items()):
        print_line(f"without its min_nodes {job} would have none: {why}")
    if worth is None:
        return
    print_line(
        f"weighted FLOP until the next failure: {worth['gain']:.4g} gained, {worth['cost']:.4g} lost to the changes; "
        f"{worth['waf']:.4g} weighted FLOP/s"
    )
    if worth["next_best"]:
        other = ", ".join(f"{job} {nodes}" for job, nodes in sorted(worth["next_best"].items()))
        print_line(f"next best: {other}, worth {worth['given_up']:.4g} less")
