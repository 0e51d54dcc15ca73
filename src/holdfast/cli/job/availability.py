"""`holdfast run --availability TRACE`: a job's nodes come and go as in a trace, on this machine."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.cli.following.progress import loss_text
from holdfast.cli.following.show import OnEvent, Shown, filter_this_run, run_shown
from holdfast.cli.options import EXPERIMENTS
from holdfast.cli.output import print_json_line, print_line, warn
from holdfast.cli.spec_options import NODES
from holdfast.clock import SystemClock
from holdfast.control.launch.launcher import launch
from holdfast.control.launch.settings import LaunchSettings
from holdfast.documents import Given, open_given
from holdfast.errors import EXIT_DONE, EXIT_ENDED, EXIT_INTERRUPTED, BadInputError
from holdfast.observability.replay_summary import ReplaySummary, summarise_replay
from holdfast.protocol.events import ReadEvent
from holdfast.units import parse_duration

if TYPE_CHECKING:
    from holdfast.planning.availability import Window

#: for how many seconds of the trace arrivals are gathered (Lazarus, section 6.4)
_JOIN_WINDOW_S = 120.0
_SPEED = 60.0


@dataclass(frozen=True, kw_only=True)
class TraceOptions:
    """Nodes that come and go as in a trace."""

    availability: Annotated[
        Path | None,
        typer.Option(
            metavar="TRACE",
            help="CSV of nodes that start and fail. Its header is seconds,event,node. Nodes are really started, and "
            "killed without warning.",
            rich_help_panel=EXPERIMENTS,
        ),
    ] = None
    speed: Annotated[
        float | None,
        typer.Option(
            help="Seconds of the trace per second of the run.", show_default=f"{_SPEED:g}", rich_help_panel=EXPERIMENTS
        ),
    ] = None
    begin: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="TIME",
            help="Begin at this time of the trace.",
            show_default="0",
            rich_help_panel=EXPERIMENTS,
        ),
    ] = None
    until: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="Time of the trace at which to end.",
            show_default="its last event",
            rich_help_panel=EXPERIMENTS,
        ),
    ] = None

    def check_unused(self) -> None:
        """Refuse options that have no effect without a trace.

        Raises:
            BadInputError: naming the option.
        """
        for name, value in (("--speed", self.speed), ("--from", self.begin), ("--until", self.until)):
            if value is not None:
                raise BadInputError(f"{name} is {value}: it counts in a trace; give --availability TRACE")

    def pace(self) -> float:
        """Return how many seconds of the trace pass in one second; `_SPEED` without the option.

        Raises:
            BadInputError: the option is not a number above 0.
        """
        speed = _SPEED if self.speed is None else self.speed
        if not (math.isfinite(speed) and speed > 0):
            raise BadInputError(f"--speed is {speed:g}: it must be above 0")
        return speed


def run_through(
    options: TraceOptions,
    given: Mapping[str, Given],
    settings_of: Callable[[Mapping[str, Given]], LaunchSettings],
    shown: Shown,
) -> int:
    """Run a job through the trace, and print a summary.

    The job starts with the nodes at the start of the trace. The clock of the trace starts with the first committed
    step. The job ends with the trace, or with its last step.

    Returns:
        The job's exit code.

    Raises:
        BadInputError: the trace or an option breaks a rule. Nothing was started.
    """
    from holdfast.control.launch.trace_run import TraceRun  # with numpy and scipy, which no other command needs

    assert options.availability is not None
    speed, window = options.pace(), read_window(options.availability, options.begin, options.until)
    if NODES in given and given[NODES].name == "--nodes":
        raise BadInputError("leave out --nodes: the trace of --availability contains the nodes")
    if "recovery.join_window" not in given:
        given = {**given, "recovery.join_window": Given(_JOIN_WINDOW_S / speed, "--join-window")}
    nodes = {"min_nodes": Given(0, "the trace's nodes"), NODES: Given(len(window.start_nodes), "the trace's nodes")}
    settings = dataclasses.replace(settings_of({**given, **nodes}), node_names=window.start_nodes)
    events: list[ReadEvent] = []
    director = TraceRun(window, speed, since=SystemClock().time())

    async def job(settings: LaunchSettings, on_event: OnEvent) -> int:
        """Run the job with the trace, and keep the events since its start for the summary."""

        def noted(event: ReadEvent) -> None:
            """Keep an event for the summary, and show it."""
            if event.time >= director.since:
                events.append(event)
            shown(event)

        shown = filter_this_run(settings.spec.output.events, on_event)
        return await launch(settings, noted, warn, director)

    code = run_shown(settings, job, shown)
    summary = summarise_replay(events, director.ends, outcome=_outcome(code, over=director.over))
    if shown.as_json:
        facts = {"trace": str(options.availability), "speed": speed, **dataclasses.asdict(summary)}
        print_json_line({"summary": facts})
    else:
        print_summary(summary, window, speed)
    return code


def _outcome(code: int, *, over: bool) -> str:
    """Return how a replay ended, in words: the trace is over, the job is done, interrupted or failed."""
    if code == EXIT_DONE:
        return "trace over" if over else "job done"
    return "interrupted" if code in (EXIT_ENDED, EXIT_INTERRUPTED) else "job failed"


def read_window(trace: Path, begin: str | None, until: str | None) -> Window:
    """Return the part of a trace that the job runs through.

    Args:
        begin, until: times of the trace, such as 1900 or 2h; None for its start and its end.

    Raises:
        BadInputError: the file cannot be read, a line breaks a rule, or the part starts without nodes.
    """
    from holdfast.planning.availability import parse_trace, select_window

    first = _trace_time("--from", begin) or 0.0
    last = _trace_time("--until", until)
    try:
        with open_given(trace) as file:
            text = file.read().decode()
    except (OSError, UnicodeDecodeError) as error:
        raise BadInputError(f"the trace {trace} cannot be read: {getattr(error, 'strerror', error)}") from None
    try:
        return select_window(parse_trace(text), begin=first, end=last)
    except BadInputError as error:
        raise BadInputError(f"the trace {trace}, {error}") from None


def _trace_time(option: str, text: str | None) -> float | None:
    """Return a time of the trace in seconds, or None for None.

    Raises:
        BadInputError: the text is not a duration; the message names the option.
    """
    if text is None:
        return None
    try:
        return parse_duration(text)
    except ValueError:
        raise BadInputError(f"{option} is {text}: it must be a time of the trace, such as 1900 or 2h") from None


def print_summary(summary: ReplaySummary, window: Window, speed: float) -> None:
    """Print how a replay ended, its steps, samples and loss, joined and lost nodes, recoveries, and down time."""
    lived = f"{min(window.seconds, summary.elapsed_s * speed):.0f} of {window.seconds:.0f} s of the trace, {speed:g}x"
    print_line(f"{summary.outcome} after {summary.elapsed_s:.1f} s ({lived})")
    undone = f", {summary.undone_steps} more were undone by roll-backs" if summary.undone_steps else ""
    print_line(
        f"{summary.steps} steps, {summary.samples} samples ({summary.samples_per_s:.1f} a second){undone}, "
        f"loss {loss_text(summary.final_loss)}"
    )
    actions = ", ".join(f"{count} {action}" for action, count in sorted(summary.recoveries.items())) or "none"
    print_line(f"{summary.nodes_joined} nodes joined, {summary.nodes_lost} were lost; recoveries: {actions}")
    print_line(f"down {summary.down_s:.1f} s in all, without any node {summary.without_nodes_s:.1f} s")
