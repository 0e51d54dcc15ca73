"""`holdfast report`: what happened in a job, from its event file, as tables and as a picture."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from holdfast.cli.connection import Server
from holdfast.cli.following.events import EventsFile, read_job_events
from holdfast.cli.following.progress import loss_text
from holdfast.cli.following.time_table import print_account
from holdfast.cli.history import memory_plot
from holdfast.cli.history.report_plot import plot_events
from holdfast.cli.options import with_option_groups
from holdfast.cli.output import AsJson, print_json, print_line
from holdfast.errors import BadInputError
from holdfast.observability.report import JobReport, make_report


def register(app: typer.Typer) -> None:
    """Add this module's command."""
    app.command("report")(with_option_groups(report))


def report(
    events: EventsFile = None,
    plot: Annotated[Path | None, typer.Option(help="PNG for throughput, nodes, step times, loss.")] = None,
    plot_memory: Annotated[Path | None, typer.Option(help="PNG for the memory in the newest change of nodes.")] = None,
    as_json: AsJson = False,
    *,
    server: Server,
) -> None:
    """Summarize a job: progress, recoveries, their cost."""
    read = list(read_job_events(events, server))
    if not read:
        raise BadInputError("the job has no event yet: try again when it has begun")
    summary = make_report(read)
    if plot is not None:
        plot_events(read, plot)
    if plot_memory is not None:
        memory_plot.plot_memory(read, plot_memory)
    if as_json:
        print_json(asdict(summary))
        return
    print_report(summary, Console())
    for picture in filter(None, (plot, plot_memory)):
        print_line(f"plot: {picture}")


def print_report(summary: JobReport, console: Console) -> None:
    """Print the summary as people read it: totals, time by cause, notes, and a table with one row per recovery."""
    loss = f", loss {loss_text(summary.first_loss)} -> {loss_text(summary.final_loss)}"
    console.print(
        f"[bold]{escape(summary.job)}[/]: {summary.outcome} after {summary.elapsed_s:.1f} s; {summary.steps} steps, "
        f"{summary.samples} samples{loss}",
        highlight=False,
    )
    exact = (
        "every step counted once, none is missing" if not summary.gaps else f"{summary.gaps} steps missing or doubled"
    )
    console.print(
        f"median step {summary.median_step_s * 1e3:.0f} ms; {exact}",
        highlight=False,
    )
    print_account(summary.time, console)
    for note in _notes(summary):
        console.print(note, highlight=False)
    if not summary.recoveries:
        console.print("no node failed or joined", highlight=False)
        return
    table = Table("at", "event", "nodes", "state from", "sent", "next step after", "minus a usual step", box=None)
    for recovery in summary.recoveries:
        table.add_row(
            f"{recovery.time - summary.started:.1f} s",
            escape(recovery.cause),
            escape(", ".join(recovery.nodes)),
            escape(recovery.state_source),
            f"{recovery.moved_bytes / 1e6:.1f} MB" if recovery.moved_bytes else "-",
            f"{recovery.down_s:.3f} s",
            f"{recovery.extra_s:+.3f} s",
        )
    console.print(table)


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _notes(summary: JobReport) -> Iterator[str]:
    """Yield the lines of the report that only some jobs have: emulation, skipped steps, moved experts."""
    if summary.emulated_token_s:
        yield f"expert computation was EMULATED: {summary.emulated_token_s:g} s per token forward, twice that backward"
    if summary.emulated_micro_batch_s:
        yield f"the accelerator was EMULATED: {summary.emulated_micro_batch_s:g} s per micro-batch"
    if summary.overflows:
        yield f"steps skipped because the loss scale was too large: {summary.overflows}"
    if failed := summary.skipped - summary.overflows:
        yield f"steps skipped because of NaN or infinite gradients, or by the script: {failed}"
    if summary.rebalances:
        yield f"experts were moved {_times(summary.rebalances)} to balance their load"
    if summary.redealt:
        yield f"micro-batches were redistributed {_times(summary.redealt)}, because a node became slow or fast again"
