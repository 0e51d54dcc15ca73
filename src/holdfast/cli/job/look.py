"""Commands that look at a job: `status`, `events`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, cast

import msgspec
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from holdfast.cli.connection import Server
from holdfast.cli.job.progress import stamped, time_of_day
from holdfast.cli.job.show import event_json
from holdfast.cli.job.time_table import print_account
from holdfast.cli.options import grouped
from holdfast.cli.output import AsJson, print_json, say, warn
from holdfast.errors import EXIT_INTERRUPTED, BadInputError
from holdfast.observability.accounts.time_ledger import TimeAccount
from holdfast.observability.event_lines import read_events
from holdfast.protocol.events import ReadEvent
from holdfast.protocol.names import node_of

EventsFile = Annotated[
    Path | None,
    typer.Argument(
        metavar="[EVENTS]",
        help="A file that --events wrote; the job may still run.",
        show_default="the events of the job that runs",
    ),
]


#: who takes so many times as long as the others is worth a line
SLOW = 1.5


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    app.command("status", rich_help_panel="Look")(grouped(status))
    app.command("events", rich_help_panel="Look")(grouped(events))


def status(server: Server, as_json: AsJson = False) -> None:
    """Show who is in the job and where it stands."""
    with server.client() as client:
        answer = client.status()
    if as_json:
        print_json(answer)
        return
    console = Console()
    facts = {name: value for name, value in answer.items() if not isinstance(value, list | dict)}
    table = Table(show_header=False, box=None)
    for name, value in facts.items():
        table.add_row(name.replace("_", " "), _text(value))
    console.print(table)
    nodes: list[dict[str, Any]] = answer.get("nodes") or []
    if nodes:
        console.print(_node_table(nodes))
    for line in (
        *saving(answer),
        *standbys(answer),
        *leaving(answer),
        *drained(answer),
        *quarantined(answer),
        *stragglers(answer),
    ):
        console.print(line, markup=False, soft_wrap=True)
    if "time" in answer:
        print_account(msgspec.convert(answer["time"], TimeAccount), console)
    experts: dict[str, Any] = answer.get("experts") or {}
    if experts:
        given = experts["fault_threshold"]
        console.print(f"each expert lives on {given['given']} nodes or more (asked: {given['asked']})")
        console.print(_expert_table(experts["layers"]))


def quarantined(answer: dict[str, Any]) -> Iterator[str]:
    """Yield which nodes may not come back, why, and what lets them."""
    barred: list[dict[str, Any]] = answer.get("quarantined") or []
    for one in barred:
        since = time_of_day(one["since"])
        yield f"quarantined since {since}: {one['node']} ({one['why']}); repaired: holdfast undrain {one['node']}"


def standbys(answer: dict[str, Any]) -> Iterator[str]:
    """Yield which nodes wait to take others' places, and whether they are warm."""
    nodes: list[dict[str, Any]] = answer.get("nodes") or []
    for node in nodes:
        if node.get("standby"):
            yield f"standby: {node['node']} is {node['standby']}, it has no rank"


def leaving(answer: dict[str, Any]) -> Iterator[str]:
    """Yield which nodes are about to leave, or to give their places to standbys, and what they wait for."""
    going: list[dict[str, Any]] = answer.get("leaving") or []
    for one in going:
        what = f"gives its place to {one['to'] or 'a standby'}" if one["stays"] else "leaves"
        yield f"leaving: {one['node']} {what}; it waits for {one['waits_for']}"


def drained(answer: dict[str, Any]) -> Iterator[str]:
    """Yield which nodes have left in good order, and what lets them come back."""
    left: list[dict[str, Any]] = answer.get("drained") or []
    for one in left:
        yield f"drained: {one['node']}; holdfast undrain {one['node']} lets it come back"


def stragglers(answer: dict[str, Any]) -> Iterator[str]:
    """Yield who is slow, and at what."""
    ways = (("paces", "computes a micro-batch in {:.1f} times"), ("links", "sends the same in {:.1f} times"))
    for key, way in ways:
        scored: list[dict[str, Any]] = answer.get(key) or []
        for one in scored:
            if one["score"] >= SLOW:
                yield f"slow: {node_of(one['worker'])}, rank {one['rank']}, {way.format(one['score'])} the others' time"


def saving(answer: dict[str, Any]) -> Iterator[str]:
    """Yield which snapshot the nodes hold, how often the job is saved, and why so often."""
    held: dict[str, int] | None = answer.get("snapshot")
    if held is not None:
        yield f"snapshot of step {held['step']} in the nodes' memory: each part on {held['copies']} of them or more"
    known: dict[str, Any] | None = answer.get("saving")
    if known is None:
        return
    if known["period_s"] is None:
        yield f"checkpoints: every {known['every']} steps"
        return
    why = f"one costs {known['cost_s']:.3f} s, gone back to {known['losses']} times" if known["saves"] else "the first"
    yield f"checkpoints: every {known['period_s']:.0f} s ({why})"


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
        return "\n".join(_text(item) for item in cast(list[object], value))
    if isinstance(value, dict):
        return ", ".join(f"{name} {_text(item)}" for name, item in cast(dict[str, object], value).items())
    return "-" if value is None or value == "" else escape(str(value))


def events(
    file: EventsFile = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job ends.")] = False,
    after: Annotated[int, typer.Option(metavar="SEQ", help="Only events with a higher `seq` than this.")] = 0,
    as_json: AsJson = False,
    *,
    server: Server,
) -> None:
    """Print what has happened in a job, one line an event."""
    if file is not None and follow:
        raise BadInputError(f"--follow is for a job that runs, not for a file: leave out {file}")
    try:
        for event in events_of(file, server, after, follow=follow):
            say(event_json(event).decode() if as_json else stamped(event))
    except KeyboardInterrupt:
        raise typer.Exit(EXIT_INTERRUPTED) from None


def events_of(file: Path | None, server: Server, after: int = 0, *, follow: bool = False) -> Iterator[ReadEvent]:
    """Yield events above number `after`: of a file where one is given, else of the job that runs.

    Raises:
        BadInputError: the file is none of events. BadInputError, UnreachableError: as `Server.client`.
    """
    if file is not None:
        yield from (event for event in read_events(file, lambda said: warn(f"holdfast: {said}")) if event.seq > after)
        return
    with server.client() as client:
        yield from client.events(after, follow=follow)
