"""Commands for a job that runs: `status`, `events`, `add-node`, `fail`."""

from __future__ import annotations

import json
import os
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from holdfast.cli.job.cluster import Token
from holdfast.cli.job.progress import stamped
from holdfast.control.client import CoordinatorClient
from holdfast.control.registry import find_job, registry_directory
from holdfast.errors import EXIT_INTERRUPTED
from holdfast.observability.event_lines import decode_event

Coordinator = Annotated[str | None, typer.Option(help="The coordinator's URL.", show_default="this machine's job")]
CaFile = Annotated[str, typer.Option(help="Certificates to trust.", show_default="the system's")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    app.command("status")(status)
    app.command("events")(events)
    app.command("add-node")(add_node)
    app.command("fail")(fail)


def _client(coordinator: str | None, token: str | None, cafile: str) -> CoordinatorClient:
    return CoordinatorClient(find_job(registry_directory(os.environ), coordinator, token, cafile))


def status(coordinator: Coordinator = None, token: Token = None, cafile: CaFile = "", as_json: AsJson = False) -> None:
    """Show who is in the job and where it stands."""
    with _client(coordinator, token, cafile) as client:
        answer = client.status()
    if as_json:
        print(json.dumps(answer, indent=2))
        return
    console = Console()
    facts = {name: value for name, value in answer.items() if not isinstance(value, list | dict)}
    table = Table(show_header=False, box=None)
    for name, value in facts.items():
        table.add_row(name.replace("_", " "), _text(value))
    console.print(table)
    nodes = answer.get("nodes")
    if isinstance(nodes, list) and nodes:
        console.print(_node_table(nodes))
    experts = answer.get("experts")
    if isinstance(experts, dict):
        given = experts["fault_threshold"]
        console.print(f"each expert lives on {given['given']} nodes or more (asked: {given['asked']})")
        console.print(_expert_table(experts["layers"]))


def _node_table(nodes: list[dict[str, Any]]) -> Table:
    names = list(nodes[0])
    table = Table(*[name.replace("_", " ") for name in names])
    for node in nodes:
        table.add_row(*[_text(node.get(name)) for name in names])
    return table


def _expert_table(layers: list[dict[str, list[int]]]) -> Table:
    """Show the experts of each node, layer by layer; neighbouring layers that are placed alike share a line."""
    nodes = list(layers[0])
    table = Table("experts of layer", *nodes)
    first = 0
    for layer in range(1, len(layers) + 1):
        if layer < len(layers) and layers[layer] == layers[first]:
            continue
        name = f"{first}-{layer - 1}" if layer - 1 > first else str(first)
        table.add_row(name, *[" ".join(str(expert) for expert in layers[first][node]) for node in nodes])
        first = layer
    return table


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4f}"
    if isinstance(value, list):
        return "\n".join(_text(item) for item in value)
    if isinstance(value, dict):
        return ", ".join(f"{name} {_text(item)}" for name, item in value.items())
    return "-" if value is None or value == "" else str(value)


def events(
    coordinator: Coordinator = None,
    token: Token = None,
    cafile: CaFile = "",
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job ends.")] = False,
    after: Annotated[int, typer.Option(help="Only events with a higher `seq` than this.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Print what has happened in the job, one line an event."""
    try:
        with _client(coordinator, token, cafile) as client:
            for line in client.event_lines(after, follow=follow):
                print(json.dumps(json.loads(line)) if as_json else stamped(decode_event(line)), flush=follow)
    except KeyboardInterrupt:
        raise typer.Exit(EXIT_INTERRUPTED) from None


def add_node(
    coordinator: Coordinator = None,
    token: Token = None,
    cafile: CaFile = "",
    count: Annotated[int, typer.Option(help="How many.")] = 1,
) -> None:
    """Have the `holdfast run` that started the job start another node."""
    with _client(coordinator, token, cafile) as client:
        client.add_node(count)
    print(f"{count} more {'node is' if count == 1 else 'nodes are'} on the way")


def fail(
    node: Annotated[str, typer.Argument(help="The node's name, as `holdfast status` shows it.")],
    how: Annotated[
        str,
        typer.Option(
            help="kill, exit, raise (an exception in the training loop), stop (SIGSTOP), or hold (live, but wait at "
            "--phase until another failure ends the generation)."
        ),
    ],
    worker: Annotated[
        int | None, typer.Option(help="Only this worker of the node.", show_default="the whole node")
    ] = None,
    step: Annotated[int | None, typer.Option(help="When this step is reached.", show_default="now")] = None,
    phase: Annotated[str, typer.Option(help="At this phase, of --step or the next time: compute, voted...")] = "",
    coordinator: Coordinator = None,
    token: Token = None,
    cafile: CaFile = "",
) -> None:
    """Make a node fail, to see the job recover. Refused unless the job was started with --allow-faults."""
    with _client(coordinator, token, cafile) as client:
        client.fail(node, how, worker=worker, step=step, phase=phase)
    when = f" at step {step}" if step is not None else ""
    print(f"{node}: {how}{when}{f' in {phase}' if phase else ''}")
