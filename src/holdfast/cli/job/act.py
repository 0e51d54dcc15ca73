"""Commands that act on a job that runs: `scale`, `undrain`, `inject`."""

from __future__ import annotations

import re
from typing import Annotated

import typer

from holdfast.cli.connection import Server
from holdfast.cli.options import grouped
from holdfast.cli.output import AsJson, print_json, say
from holdfast.control.client import CoordinatorClient
from holdfast.coordination.nodes.injection import FAULTS
from holdfast.errors import BadInputError, RefusedError


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    app.command("scale", rich_help_panel="Act")(grouped(scale))
    app.command("undrain", rich_help_panel="Act")(grouped(undrain))
    app.command("inject", rich_help_panel="Test")(grouped(inject))


def scale(
    size: Annotated[str, typer.Argument(metavar="N|+N", help="To N nodes, or by N more.")],
    as_json: AsJson = False,
    *,
    server: Server,
) -> None:
    """Have the `holdfast run` that started the job start further nodes."""
    if not re.fullmatch(r"\+?[0-9]{1,9}", size) or int(size) < 1:
        raise BadInputError(f"the size is {size!r}: give a number of nodes, 4, or how many more, +1")
    with server.client() as client:
        count = int(size) if size.startswith("+") else _missing(client, int(size))
        if count:
            client.add_nodes(count)
    if as_json:
        print_json({"nodes_started": count})
    else:
        say(f"{count} more {'node is' if count == 1 else 'nodes are'} on the way")


def _missing(client: CoordinatorClient, size: int) -> int:
    """Return how many nodes a job lacks of a size."""
    here = len(client.status()["nodes"])
    if size < here:
        raise RefusedError(f"the job has {here} nodes: stopping nodes is not supported, so {size} is too few")
    return size - here


def undrain(
    nodes: Annotated[list[str], typer.Argument(metavar="NODE...", help="Names, as `holdfast status` shows them.")],
    as_json: AsJson = False,
    *,
    server: Server,
) -> None:
    """Let quarantined nodes come back: repaired, they are looked at once more, and join."""
    with server.client() as client:
        started = {node: client.undrain(node) for node in nodes}
    if as_json:
        print_json({"nodes": started})
        return
    for node, is_started in started.items():
        say(f"{node} may come back: {'it is being started' if is_started else 'start `holdfast agent` there again'}")


def inject(
    fault: Annotated[
        str,
        typer.Argument(
            metavar="FAULT",
            help="; ".join(f"{name}: {what}" for name, what in FAULTS.items()) + ".",
            show_default=False,
        ),
    ],
    node: Annotated[str, typer.Argument(metavar="NODE", help="The node's name, as `holdfast status` shows it.")],
    worker: Annotated[
        int | None,
        typer.Option(help="Only this worker of the node.", show_default="the whole node; of a worker's faults, 0"),
    ] = None,
    step: Annotated[int | None, typer.Option(help="When this step is reached.", show_default="now")] = None,
    phase: Annotated[str, typer.Option(help="At this phase, of --step or the next time: compute, voted...")] = "",
    times: Annotated[float, typer.Option(help="Of slow, slow-link: how many times as long.")] = 3.0,
    by_s: Annotated[
        float, typer.Option("--by", metavar="SECONDS", help="Of clock-jump: how far, negative for back.")
    ] = 3600.0,
    as_json: AsJson = False,
    *,
    server: Server,
) -> None:
    """Make a node fail, to see the job recover. Refused unless the job was started with --allow-faults."""
    with server.client() as client:
        client.inject(fault, node, worker=worker, step=step, phase=phase, times=times, by_s=by_s)
    if as_json:
        print_json({"fault": fault, "node": node, "worker": worker, "step": step, "phase": phase or None})
        return
    when = f" at step {step}" if step is not None else ""
    say(f"{node}: {fault}{when}{f' in {phase}' if phase else ''}")
