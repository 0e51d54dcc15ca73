"""The picture of a job: throughput, nodes, step times and loss over time, with the events that changed them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import isnan, nan
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
    JobFailed,
    JobFinished,
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
#: labels of events are written in this many rows
_LABEL_ROWS = 4
#: shares of the picture's width: a character of a label; events that are closer have one label together
_CHARACTER, _CLOSE = 0.0085, 0.02
#: names in one label
_NAMED_TOGETHER = 3
#: If there are more events, they have no names.
_NAMED_MARKS = 24
#: matplotlib cannot draw an axis that is longer.
_LARGEST_LOSS = 1e300


def plot_events(events: Sequence[ReadEvent], path: Path) -> None:
    """Draw throughput, nodes, step times (Unicron, Figure 6) and loss over time into a PNG.

    Failures, joins and other changes are marked.

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
    stretches = _stretches(events, steps)
    _draw_throughput(throughput, stretches, start)
    _draw_nodes(nodes, events, start, steps[-1].time)
    _draw_step_times(step_times, events, start)
    _draw_loss(loss, stretches, start)
    loss.set_xlabel("seconds since the start of the job")
    panels = (throughput, nodes, step_times, loss)
    marks = list(_marks(events, start))
    if len(marks) <= _NAMED_MARKS:
        _draw_named_marks(panels, marks, max([steps[-1].time - start, *(mark.second for mark in marks)]))
    else:
        _draw_many_marks(throughput, marks)
    for axes in panels:
        add_legend(axes)
    save_figure(figure, path, "--plot")


def _begins_after_pause(events: Sequence[ReadEvent]) -> set[int]:
    """Return the `id` of each step event that is the first one after a pause: a new run, or a wait for nodes.

    A roll-back after a coordinator's restart also counts: the run before was killed.
    """
    found = set[int]()
    paused = restarted = False
    for event in events:
        match event:
            case JobFinished() | JobFailed() | JobWaiting():
                paused = True
            case CoordinatorRestarted():
                restarted = True
            case RolledBack():
                paused = paused or restarted  # The run before was killed.
            case StepCommitted():
                if paused:
                    found.add(id(event))
                paused = restarted = False
            case _:
                pass
    return found


def _stretches(events: Sequence[ReadEvent], steps: Sequence[StepCommitted]) -> list[list[StepCommitted]]:
    """Return the steps in lists, one for each stretch between pauses; one empty list without steps."""
    first = _begins_after_pause(events)
    stretches: list[list[StepCommitted]] = [[]]
    for step in steps:
        if id(step) in first and stretches[-1]:
            stretches.append([])
        stretches[-1].append(step)
    return stretches


def _draw_throughput(axes: Any, stretches: Sequence[Sequence[StepCommitted]], start: float) -> None:
    """Draw samples per second over time, with gaps at the pauses."""
    seconds: list[float] = []
    rates: list[float] = []
    for steps in stretches:
        seconds += [step.time - start for step in steps]
        rates += [nan, *_throughput(steps)]  # No line leads to the first step of a stretch.
    axes.plot(seconds, rates, color=BLUE, linewidth=1.6, label=f"all nodes together, mean of {WINDOW} steps")
    axes.set_ylabel("samples per second")
    axes.set_ylim(
        0, 1.35 * max((rate for rate in rates if not isnan(rate)), default=0.0) or 1.0
    )  # room for the names of the events


def _draw_nodes(axes: Any, events: Sequence[ReadEvent], start: float, end: float) -> None:
    """Draw how many nodes train, from each generation to the next, with a gap after each end of the job."""
    from matplotlib.ticker import MaxNLocator

    seconds: list[float] = []
    counts: list[float] = []
    for event in events:
        if isinstance(event, GenerationStarted | JobFinished | JobFailed):
            seconds.append(event.time - start)
            counts.append(len(event.members) if isinstance(event, GenerationStarted) else nan)
    if seconds:
        seconds, counts = [*seconds, max(end - start, seconds[-1])], [*counts, counts[-1]]
    axes.step(seconds, counts, where="post", color=GREEN, label="nodes that train")
    axes.set_ylim(0, 1.2 * max([1.0, *(count for count in counts if not isnan(count))]))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=4))
    axes.set_ylabel("nodes")


def _draw_step_times(axes: Any, events: Sequence[ReadEvent], start: float) -> None:
    """Draw the seconds of each step on a logarithmic axis, with the usual time and the limits for late and failed.

    The first step after a pause is left out.
    """
    from matplotlib.ticker import LogLocator

    ledger = TimeLedger()
    timed: list[tuple[float, float, float]] = []
    first = _begins_after_pause(events)
    for event in events:
        ledger.add_event(event)
        if isinstance(event, StepCommitted) and id(event) in first:
            timed.append((event.time - start, nan, nan))  # It took as long as the pause.
        elif isinstance(event, StepCommitted) and event.step_s > 0:
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


def _draw_loss(axes: Any, stretches: Sequence[Sequence[StepCommitted]], start: float) -> None:
    """Draw the loss over time, with gaps at the pauses and at steps without a loss."""
    seconds: list[float] = []
    losses: list[float] = []
    for steps in stretches:
        seconds += [steps[0].time - start, *(step.time - start for step in steps)] if steps else []
        losses += [nan, *(_loss(step) for step in steps)] if steps else []
    axes.plot(seconds, losses, color="#333333", linewidth=1.2, label="loss of the global batch")
    axes.set_ylabel("loss")


def _loss(step: StepCommitted) -> float:
    return nan if step.loss is None or abs(step.loss) > _LARGEST_LOSS else step.loss


def _throughput(steps: Sequence[StepCommitted]) -> list[float]:
    """Return the samples per second at each step but the first, over the last `WINDOW` steps."""
    rates: list[float] = []
    for place in range(1, len(steps)):
        first = max(0, place - WINDOW)
        samples = sum(step.samples for step in steps[first + 1 : place + 1])
        rates.append(samples / max(steps[place].time - steps[first].time, 1e-9))
    return rates


class Mark(NamedTuple):
    """A vertical line in the report's plot: an event that changed the job."""

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


@dataclass(slots=True)
class _Label:
    """The names of events that are close together, at the first of them. Shares are of the picture's width."""

    mark: Mark
    share: float
    row: int
    names: dict[str, None]

    @property
    def text(self) -> str:
        """The first names, and how many more there are."""
        first, more = list(self.names)[:_NAMED_TOGETHER], len(self.names) - _NAMED_TOGETHER
        return ", ".join(first) + (f" and {more} more" if more > 0 else "")

    @property
    def is_left(self) -> bool:
        """Whether the text stands left of its line: on the right it would leave the picture."""
        return self.share + _CHARACTER * len(self.text) > 1.0

    @property
    def ends(self) -> tuple[float, float]:
        """The first and the last position of the text."""
        width = _CHARACTER * len(self.text)
        return (self.share - width, self.share) if self.is_left else (self.share, self.share + width)


def _labels(marks: Sequence[Mark], span: float) -> list[_Label]:
    """Return the marks' names with a row each, so that none hides another.

    Names of marks that are close together are merged; so are names for which all `_LABEL_ROWS` rows are taken.

    Args:
        span: seconds that the picture shows.
    """
    together: list[_Label] = []
    for mark in sorted(marks, key=lambda mark: mark.second):
        share = mark.second / span if span > 0 else 0.0
        if together and share - together[-1].share < _CLOSE:
            together[-1].names[mark.label] = None
        else:
            together.append(_Label(mark, share, 0, {mark.label: None}))
    labels: list[_Label] = []
    for label in together:
        free = [row for row in range(_LABEL_ROWS) if not any(_overlap(label, one) for one in labels if one.row == row)]
        if free:
            label.row = free[0]
            labels.append(label)
        else:
            labels[-1].names |= label.names
    return labels


def _overlap(one: _Label, other: _Label) -> bool:
    (begin, end), (its_begin, its_end) = one.ends, other.ends
    return begin < its_end and its_begin < end


def _draw_named_marks(panels: Sequence[Any], marks: Sequence[Mark], span: float) -> None:
    """Draw a line through all panels for each event, with its name at the top; `span`: seconds of the picture."""
    for mark in marks:
        for axes in panels:
            axes.axvline(mark.second, color=mark.colour, linewidth=1.1, linestyle="--", alpha=0.8)
    for label in _labels(marks, span):
        panels[0].annotate(
            label.text,
            (label.mark.second, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(-3 if label.is_left else 3, -12 - 13 * label.row),
            textcoords="offset points",
            color=label.mark.colour,
            fontsize=9,
            horizontalalignment="right" if label.is_left else "left",
        )


def _draw_many_marks(axes: Any, marks: Sequence[Mark]) -> None:
    """Draw a short line at the top of a panel for each event, by colour. Names would hide each other."""
    for colour, name in ((RED, "failures, waits"), (GREEN, "nodes join"), (BROWN, "other changes")):
        seconds = [mark.second for mark in marks if mark.colour == colour]
        if seconds:
            transform = axes.get_xaxis_transform()
            axes.vlines(seconds, 0.92, 1.0, transform=transform, color=colour, linewidth=0.8, label=name)


def _who_joins(names: Sequence[str]) -> str:
    """Return which nodes join, by name, or how many if there are more than fit."""
    if len(names) > _NAMED_AT_MOST:
        return f"{len(names)} nodes join"
    return f"{', '.join(names)} {'joins' if len(names) == 1 else 'join'}"


def _label(event: ReadEvent) -> tuple[str | None, str]:
    """Return the name and colour of an event in the picture; the name is None if it is not shown."""
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
