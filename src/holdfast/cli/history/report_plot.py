"""The picture of a job: throughput, nodes, step times and loss over time, with the events that changed them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import nan
from pathlib import Path
from typing import Any, NamedTuple

from holdfast.cli.history.plot_style import BLUE, BROWN, GREEN, GREY, RED, add_legend, new_figure, save_figure
from holdfast.cli.output import seconds_in_words
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
#: If more nodes join at once, their number is shown.
_NAMED_AT_MOST = 4
#: labels of events are written in so many rows, one after the other
_LABEL_ROWS = 3
#: If there are more events, they have no names.
_NAMED_MARKS = 24
#: matplotlib cannot draw an axis that is longer.
_LARGEST_LOSS = 1e300


def plot_events(events: Sequence[ReadEvent], path: Path) -> None:
    """Draw throughput, nodes, step times (Unicron, Figure 6) and loss over time into a PNG.

    Raises:
        BadInputError: there are too few steps to draw, or the file cannot be written.
    """
    steps = committed_steps(events)
    if len(steps) < 2:
        raise BadInputError(f"{len(steps)} committed steps are too few for a plot: let the job run a little")
    start = events[0].time
    figure = new_figure(
        f"{steps[-1].job}: {len(steps)} steps in {seconds_in_words(steps[-1].time - start)}", height_inches=9.0
    )
    throughput, nodes, step_times, loss = figure.subplots(4, 1, sharex=True, height_ratios=(3, 1.5, 3, 2))
    _draw_throughput(throughput, steps, start)
    _draw_nodes(nodes, events, start, steps[-1].time)
    _draw_step_times(step_times, events, start)
    _draw_loss(loss, steps, start)
    loss.set_xlabel("seconds since the start of the job")
    panels = (throughput, nodes, step_times, loss)
    marks = list(_marks(events, start))
    if len(marks) <= _NAMED_MARKS:
        _draw_named_marks(panels, marks)
    else:
        _draw_many_marks(throughput, marks)
    for axes in panels:
        add_legend(axes)
    save_figure(figure, path, "--plot")


def _draw_throughput(axes: Any, steps: Sequence[StepCommitted], start: float) -> None:
    rates = _throughput(steps)
    seconds = [step.time - start for step in steps[1:]]
    axes.plot(seconds, rates, color=BLUE, linewidth=1.6, label=f"all nodes together, mean of {WINDOW} steps")
    axes.set_ylabel("samples per second")
    axes.set_ylim(0, 1.35 * max(rates) or 1.0)  # room for the names of the events


def _draw_nodes(axes: Any, events: Sequence[ReadEvent], start: float, end: float) -> None:
    """Draw how many nodes train, from each generation to the next."""
    from matplotlib.ticker import MaxNLocator

    started = [event for event in events if isinstance(event, GenerationStarted)]
    seconds = [event.time - start for event in started]
    counts = [len(event.members) for event in started]
    if started:
        seconds, counts = [*seconds, max(end - start, seconds[-1])], [*counts, counts[-1]]
    axes.step(seconds, counts, where="post", color=GREEN, label="nodes that train")
    axes.set_ylim(0, 1.2 * max([*counts, 1]))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=4))
    axes.set_ylabel("nodes")


def _draw_step_times(axes: Any, events: Sequence[ReadEvent], start: float) -> None:
    """Draw the seconds of each step, and what is usual, late and failed for the nodes that trained then."""
    from matplotlib.ticker import LogLocator

    ledger = TimeLedger()
    timed: list[tuple[float, float, float]] = []
    for event in events:
        ledger.take(event)
        if isinstance(event, StepCommitted) and event.step_s > 0:
            timed.append((event.time - start, event.step_s, ledger.usual.of(event.world_size) or nan))
    seconds, taken, usual = ([one[place] for one in timed] for place in range(3))
    axes.plot(seconds, taken, ".", color=BLUE, markersize=3, label="one step")
    for factor, colour, name in (
        (1.0, GREY, "usual for these nodes"),
        (LATE, BROWN, f"late ({LATE:g} x usual)"),
        (FAILED, RED, f"failed ({FAILED:g} x usual)"),
    ):
        axes.plot(seconds, [factor * one for one in usual], color=colour, linewidth=1.0, label=name)
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("")
    axes.set_ylabel("seconds per step")


def _draw_loss(axes: Any, steps: Sequence[StepCommitted], start: float) -> None:
    losses = [nan if step.loss is None or abs(step.loss) > _LARGEST_LOSS else step.loss for step in steps]
    seconds = [step.time - start for step in steps]
    axes.plot(seconds, losses, color="#333333", linewidth=1.2, label="loss of the global batch")
    axes.set_ylabel("loss")


def _throughput(steps: Sequence[StepCommitted]) -> list[float]:
    """Return the samples per second at each step but the first, over the last few steps."""
    rates: list[float] = []
    for place in range(1, len(steps)):
        first = max(0, place - WINDOW)
        samples = sum(step.samples for step in steps[first + 1 : place + 1])
        rates.append(samples / max(steps[place].time - steps[first].time, 1e-9))
    return rates


class Mark(NamedTuple):
    """An event that changed the job."""

    second: float
    label: str
    colour: str


def _marks(events: Sequence[ReadEvent], start: float) -> Iterator[Mark]:
    """Yield each failure, newcomer and change, but not the nodes with which the job began."""
    begun = next((event.time for event in events if isinstance(event, GenerationStarted)), start)
    for event in events:
        label, colour = _label(event)
        if label is not None and not (isinstance(event, NodesJoined) and event.time <= begun):
            yield Mark(event.time - start, label, colour)


def _draw_named_marks(panels: Sequence[Any], marks: Sequence[Mark]) -> None:
    """Draw a line through all panels for each event, with its name at the top."""
    for number, mark in enumerate(marks):
        for axes in panels:
            axes.axvline(mark.second, color=mark.colour, linewidth=1.1, linestyle="--", alpha=0.8)
        panels[0].annotate(
            mark.label,
            (mark.second, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(3, -12 - 13 * (number % _LABEL_ROWS)),
            textcoords="offset points",
            color=mark.colour,
            fontsize=9,
        )


def _draw_many_marks(axes: Any, marks: Sequence[Mark]) -> None:
    """Draw a short line at the top of a panel for each event: names would hide each other."""
    for colour, name in ((RED, "failures, waits"), (GREEN, "nodes join"), (BROWN, "other changes")):
        seconds = [mark.second for mark in marks if mark.colour == colour]
        if seconds:
            transform = axes.get_xaxis_transform()
            axes.vlines(seconds, 0.92, 1.0, transform=transform, color=colour, linewidth=0.8, label=name)


def _who_joins(names: Sequence[str]) -> str:
    if len(names) > _NAMED_AT_MOST:
        return f"{len(names)} nodes join"
    return f"{', '.join(names)} {'joins' if len(names) == 1 else 'join'}"


def _label(event: ReadEvent) -> tuple[str | None, str]:
    match event:
        case FailureDetected():
            return f"{event.node} fails", RED
        case NodesJoined():
            return _who_joins(event.names), GREEN
        case RolledBack():
            return f"back to step {event.to_step}", RED
        case CoordinatorRestarted():
            return "new coordinator", BROWN
        case Rebalanced():
            return "experts move", BROWN
        case JobWaiting():
            return "waits for nodes", RED
        case _:
            return None, BROWN
