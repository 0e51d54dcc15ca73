"""`holdfast replay`: a job lives through an availability trace, on this machine."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from holdfast.cli.job.launch_options import LaunchOptions, Script, ScriptArgs, with_launch_options
from holdfast.cli.job.progress import PlainProgress, loss_text
from holdfast.cli.job.run import OnEvent, run_shown, say, show_tails, tell_failure, warn, worker_logs
from holdfast.clock import SystemClock
from holdfast.control.launch.launcher import launch
from holdfast.control.launch.settings import LaunchSettings
from holdfast.errors import EXIT_DONE, EXIT_ENDED, EXIT_INTERRUPTED, BadInputError
from holdfast.observability.replay_summary import ReplaySummary, summarise_replay
from holdfast.protocol.events import ReadEvent

if TYPE_CHECKING:
    from holdfast.planning.availability import Window

#: for how many seconds of the trace arrivals are gathered (Lazarus, section 6.4)
_JOIN_WINDOW_S = 120.0


class OptionsAroundTrace(TyperCommand):
    """A command whose options may stand before and after its first argument; after the second all is the script's."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put the options before both."""
        options: list[str] = []
        rest = list(args)
        trace: list[str] = []
        while rest and rest[0] != "--" and not (trace and not rest[0].startswith("-")):
            if not rest[0].startswith("-"):
                trace.append(rest.pop(0))
                continue
            count = 2 if rest[0] in self._with_value else 1
            options += rest[:count]
            rest = rest[count:]
        if rest[:1] == ["--"]:
            rest = rest[1:]
        return super().parse_args(ctx, [*options, "--", *trace, *rest] if trace or rest else options)

    @property
    def _with_value(self) -> set[str]:
        options = [param for param in self.params if param.param_type_name == "option"]
        return {name for param in options for name in param.opts if not getattr(param, "is_flag", False)}


def register(app: typer.Typer) -> None:
    """Add this module's command."""
    settings = {"allow_interspersed_args": False}
    app.command("replay", cls=OptionsAroundTrace, context_settings=settings)(with_launch_options(replay))


def replay(
    trace: Annotated[Path, typer.Argument(help="CSV with the header seconds,event,node.", metavar="TRACE")],
    script: Script,
    args: ScriptArgs = None,
    speed: Annotated[float, typer.Option(help="Seconds of the trace that pass in one.")] = 60.0,
    begin: Annotated[float, typer.Option("--from", help="Begin at this second of the trace.")] = 0.0,
    until: Annotated[
        float | None, typer.Option(help="End at this second of the trace.", show_default="its last event")
    ] = None,
    join_window: Annotated[
        float | None,
        typer.Option(
            help="Seconds without another arrival before newcomers are taken in, together.",
            show_default="120 of the trace",
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the summary as JSON, and all else where errors go.")
    ] = False,
    *,
    options: LaunchOptions,
) -> None:
    """Run a job whose nodes come and go as in a trace: they are really started, and killed without warning.

    The job starts with the nodes that are there at the trace's begin; the trace's clock starts with the first committed
    step. Ends with 0 when the trace is over or the job is done, 1 when it failed, 2 for bad input.
    """
    from holdfast.control.launch.trace_run import TraceRun  # with numpy and scipy, which no other command needs

    if not (math.isfinite(speed) and speed > 0):
        raise BadInputError(f"--speed is {speed:g}: it must be above 0")
    window = read_window(trace, begin, until)
    settings = dataclasses.replace(
        options.settings(script, args),
        nodes=len(window.start_nodes),
        node_names=window.start_nodes,
        join_window=_JOIN_WINDOW_S / speed if join_window is None else join_window,
    )
    events: list[ReadEvent] = []
    director = TraceRun(window, speed, since=SystemClock().time())

    async def job(settings: LaunchSettings, on_event: OnEvent) -> int:
        def noted(event: ReadEvent) -> None:
            if event.time >= director.since:
                events.append(event)
            on_event(event)

        return await launch(settings, noted, warn, director)

    code = _run_for_json(settings, job) if as_json else run_shown(settings, job, plain=options.plain)
    summary = summarise_replay(events, director.ends, outcome=_outcome(code, over=director.over))
    if as_json:
        print(json.dumps({"trace": str(trace), "speed": speed, **dataclasses.asdict(summary)}, indent=2))
    else:
        print_summary(summary, window, speed)
    raise typer.Exit(code)


def _outcome(code: int, *, over: bool) -> str:
    if code == EXIT_DONE:
        return "trace over" if over else "job done"
    return "interrupted" if code in (EXIT_ENDED, EXIT_INTERRUPTED) else "job failed"


def read_window(trace: Path, begin: float, until: float | None) -> Window:
    """Read the part of a trace that is replayed.

    Raises:
        BadInputError: the file cannot be read, or a line breaks a rule, or no node is there at the begin.
    """
    from holdfast.planning.availability import parse_trace, window_of

    for option, value in (("--from", begin), ("--until", until)):
        if value is not None and not (math.isfinite(value) and value >= 0):
            raise BadInputError(f"{option} is {value:g}: it must be a second of the trace, 0 or more")
    try:
        text = trace.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadInputError(f"the trace {trace} cannot be read: {getattr(error, 'strerror', error)}") from None
    try:
        return window_of(parse_trace(text), begin=begin, end=until)
    except BadInputError as error:
        raise BadInputError(f"the trace {trace}, {error}") from None


def _run_for_json(settings: LaunchSettings, job: Any) -> int:
    """Run with nothing but JSON on stdout: what the workers print goes to files."""
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
    settings.check()
    progress = PlainProgress(warn)
    with worker_logs(settings) as logged:
        code = asyncio.run(job(logged, progress))
        show_tails(logged, code)
    tell_failure(code, progress.failure)
    return code


def print_summary(summary: ReplaySummary, window: Window, speed: float) -> None:
    """Print the summary as people read it."""
    lived = f"{min(window.seconds, summary.elapsed_s * speed):.0f} of {window.seconds:.0f} s of the trace, {speed:g}x"
    say(f"{summary.outcome} after {summary.elapsed_s:.1f} s ({lived})")
    undone = f", {summary.undone_steps} more were undone by roll-backs" if summary.undone_steps else ""
    say(
        f"{summary.steps} steps, {summary.samples} samples ({summary.samples_per_s:.1f} a second){undone}, "
        f"loss {loss_text(summary.final_loss)}"
    )
    actions = ", ".join(f"{count} {action}" for action, count in sorted(summary.recoveries.items())) or "none"
    say(f"{summary.nodes_joined} nodes joined, {summary.nodes_lost} were lost; recoveries: {actions}")
    say(f"down {summary.down_s:.1f} s in all, without any node {summary.without_nodes_s:.1f} s")
