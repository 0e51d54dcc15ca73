"""The picture of a job: throughput, step times and loss over time, with what happened marked; memory in a change."""

from __future__ import annotations

from collections.abc import Sequence
from math import nan
from pathlib import Path
from typing import Any

from holdfast.cli.history.memory_plot import draw_memory, newest_change
from holdfast.errors import BadInputError
from holdfast.observability.accounts.time_ledger import TimeLedger
from holdfast.observability.accounts.usual_steps import FAILED, LATE
from holdfast.observability.report import committed_steps
from holdfast.protocol.events import (
    CoordinatorRestarted,
    FailureDetected,
    GenerationStarted,
    JobWaiting,
    NodesJoined,
    ReadEvent,
    Rebalanced,
    RolledBack,
    StepCommitted,
)

#: steps over which throughput is averaged
WINDOW = 8
#: of more nodes than these there is a number
_NAMED_AT_MOST = 4
_LOST, _JOINED, _OTHER = "#c0392b", "#27803b", "#7f6a00"


def plot_events(events: Sequence[ReadEvent], path: Path) -> None:
    """Draw throughput, step times (Unicron, Figure 6) and loss over time into a PNG.

    Below, where it is known: the newest change of the members, what workers held and moved (TrainMover, Figure 19).

    Raises:
        BadInputError: there are too few steps to draw, or the file cannot be written.
    """
    # Imported here: it costs most of a second, and no other command needs it.
    from matplotlib.figure import Figure

    steps = committed_steps(events)
    if len(steps) < 2:
        raise BadInputError(f"{len(steps)} committed steps are too few for a plot: let the job run a little")
    start = events[0].time
    seconds = [step.time - start for step in steps]
    change = newest_change(events)
    figure: Any = Figure(figsize=(10, 7.6 if change is None else 12.6), layout="constrained")
    upper = figure
    if change is not None:
        upper, lower = figure.subfigures(2, 1, height_ratios=(7.6, 5))
        draw_memory(lower, change, start)
    top, middle, bottom = upper.subplots(3, 1, sharex=True, height_ratios=(3, 3, 2))
    rates = _throughput(steps)
    top.plot(seconds[1:], rates, color="#1f5fa8", linewidth=1.6)
    top.set_ylabel("samples per second")
    top.set_ylim(0, 1.3 * max(rates))  # room for the names of what happened
    bottom.plot(seconds, [nan if step.loss is None else step.loss for step in steps], color="#333333", linewidth=1.2)
    bottom.set_ylabel("loss")
    bottom.set_xlabel("seconds since the job's start")
    _draw_step_times(middle, events, start)
    _mark((top, middle, bottom), events, start)
    for axes in (top, middle, bottom):
        axes.grid(color="#dddddd", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    try:
        figure.savefig(path, dpi=130)
    except (OSError, ValueError) as error:
        raise BadInputError(f"--plot {path} cannot be written: {error}") from None


def _draw_step_times(axes: Any, events: Sequence[ReadEvent], start: float) -> None:
    """Draw each step's seconds, and beside them the usual ones of its world, known at its time: once, 1.1x and 3x."""
    from matplotlib.ticker import LogLocator

    ledger = TimeLedger()
    timed: list[tuple[float, float, float]] = []
    for event in events:
        ledger.take(event)
        if isinstance(event, StepCommitted) and event.step_s > 0:
            timed.append((event.time - start, event.step_s, ledger.usual.of(event.world_size) or nan))
    seconds, taken, usual = ([one[place] for one in timed] for place in range(3))
    axes.plot(seconds, taken, ".", color="#1f5fa8", markersize=3)
    for factor, colour, name in (
        (1.0, "#999999", "usual"),
        (LATE, _OTHER, f"{LATE:g}x"),
        (FAILED, _LOST, f"{FAILED:g}x"),
    ):
        axes.plot(seconds, [factor * one for one in usual], color=colour, linewidth=1.0, label=name)
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("")
    axes.set_ylabel("seconds per step")
    axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=3, fontsize=8, frameon=False)


def _throughput(steps: Sequence[StepCommitted]) -> list[float]:
    """Samples per second at each step but the first, over the last few steps."""
    rates: list[float] = []
    for place in range(1, len(steps)):
        first = max(0, place - WINDOW)
        samples = sum(step.samples for step in steps[first + 1 : place + 1])
        rates.append(samples / max(steps[place].time - steps[first].time, 1e-9))
    return rates


def _mark(panels: tuple[Any, ...], events: Sequence[ReadEvent], start: float) -> None:
    """Draw a line for each loss and arrival, with its name above the plot; the first world's arrivals are no news."""
    begun = next((event.time for event in events if isinstance(event, GenerationStarted)), start)
    height = 0
    for event in events:
        label, colour = _label(event)
        if label is None or (isinstance(event, NodesJoined) and event.time <= begun):
            continue
        for axes in panels:
            axes.axvline(event.time - start, color=colour, linewidth=1.1, linestyle="--", alpha=0.8)
        panels[0].annotate(
            label,
            (event.time - start, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(3, -12 - 13 * (height % 3)),
            textcoords="offset points",
            color=colour,
            fontsize=9,
        )
        height += 1


def _who_joins(names: Sequence[str]) -> str:
    if len(names) > _NAMED_AT_MOST:
        return f"{len(names)} nodes join"
    return f"{', '.join(names)} {'joins' if len(names) == 1 else 'join'}"


def _label(event: ReadEvent) -> tuple[str | None, str]:
    match event:
        case FailureDetected():
            return f"{event.node} lost", _LOST
        case NodesJoined():
            return _who_joins(event.names), _JOINED
        case RolledBack():
            return f"back to step {event.to_step}", _LOST
        case CoordinatorRestarted():
            return "coordinator restarted", _OTHER
        case Rebalanced():
            return "experts moved", _OTHER
        case JobWaiting():
            return "waits for nodes", _LOST
        case _:
            return None, _OTHER
