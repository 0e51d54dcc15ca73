"""The live view of a job in a terminal: a panel with its progress, below everything that has been printed so far."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import BinaryIO, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from holdfast.cli.following.progress import DETAILS, PlainProgress, Rate, count_workers, describe_with_time, loss_text
from holdfast.cli.output import on_one_line
from holdfast.protocol.events import (
    CoordinatorRestarted,
    Event,
    FailureDetected,
    GenerationStarted,
    JobFailed,
    JobFinished,
    JobStarted,
    JobWaiting,
    NodeLeft,
    NodesJoined,
    ReadEvent,
    Recovered,
    RolledBack,
    StandbyReady,
    StepCommitted,
)

_RATE_STEPS = 20
_REFRESH_PER_S = 4
#: names of nodes in one line of the panel
_NAMED = 8
_COLOURS: dict[type[Event], str] = {
    FailureDetected: "bold red",
    JobFailed: "bold red",
    NodeLeft: "yellow",
    Recovered: "bold green",
    JobFinished: "bold green",
    NodesJoined: "cyan",
    RolledBack: "yellow",
    JobWaiting: "bold yellow",
}
#: seconds in which the processes of an ended job close their output
_CLOSING_S = 2.0


@dataclass(slots=True)
class JobPicture:
    """The contents of the panel, as they follow from the events."""

    job: str = ""
    url: str = ""
    world: int = 0
    step: int = 0
    #: the last step of the job, or 0 if it is not known
    last_step: int = 0
    loss: float | None = None
    #: the state of each node, by name
    nodes: dict[str, str] = field(default_factory=dict[str, str])
    rate: Rate = field(default_factory=lambda: Rate(_RATE_STEPS))
    last_event: ReadEvent | None = None
    failure: str = ""

    def on_event(self, event: ReadEvent) -> None:
        """Update position, loss, rate, nodes by state, newest event and failure from an event.

        A step or a detail is not kept as the newest event.
        """
        self.rate.on_event(event)
        if isinstance(event, StepCommitted):
            self.step, self.loss, self.world = event.step, event.loss, event.world_size
            self.last_step = event.last_step
            return
        if not isinstance(event, DETAILS):
            self.last_event = event
        match event:
            case JobStarted() | CoordinatorRestarted():
                self.job, self.url = event.job, event.url
            case GenerationStarted():
                self.world = event.world_size
                self._set_members(event.members)
            case JobFailed():
                self.failure = event.why
            case NodesJoined():
                self.nodes |= dict.fromkeys(event.names, "joining")
            case StandbyReady():
                self.nodes[event.node] = "standby"
            case NodeLeft():
                self.nodes[event.node] = f"left ({event.reason})"
            case _:
                pass

    def _set_members(self, members: Sequence[str]) -> None:
        """Set the members to training, and those that trained before and are no longer members to waiting."""
        for name, state in self.nodes.items():
            if state == "training":
                self.nodes[name] = "waiting"
        self.nodes |= dict.fromkeys(members, "training")


def render(picture: JobPicture, *, on_ctrl_c: str = "") -> RenderableType:
    """Return the panel: step, loss, rate, time left and progress bar, names of the nodes by state, and the newest
    event.

    Without a known last step, there is no progress bar and no time left.

    Args:
        on_ctrl_c: what Ctrl-C does; "" for no such line.
    """
    last = picture.last_step
    lines: list[RenderableType] = []
    facts = [
        f"step {picture.step}{f' of {last}' if last else ''}",
        f"loss {loss_text(picture.loss)}",
        f"{picture.rate.samples_per_s:.1f} samples/s",
        count_workers(picture.world),
    ]
    if last:
        bar = Table.grid(expand=True)
        bar.add_row(ProgressBar(total=last, completed=min(picture.step, last)))
        lines.append(bar)
    if left := picture.rate.time_left(picture.step, last):
        facts.append(left)
    lines.append(_one_line("   ".join(facts), "bold"))
    for state in dict.fromkeys(picture.nodes.values()):
        names = [name for name, its in picture.nodes.items() if its == state]
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        lines.append(_one_line(f"{state}: {', '.join(names[:_NAMED])}{more}", "" if state == "training" else "dim"))
    if picture.last_event is not None:
        lines.append(
            _one_line(
                f"last event: {describe_with_time(picture.last_event)}", _COLOURS.get(type(picture.last_event), "")
            )
        )
    if on_ctrl_c:
        lines.append(_one_line(f"Ctrl-C: {on_ctrl_c}", "dim"))
    title = f"holdfast {picture.job} {picture.url}".rstrip()
    # The terminal echoes ^C at the cursor. On a line of its own that moves no other line.
    return Group(Panel(Group(*lines), title=Text(title), title_align="left"), Text())


def _one_line(text: str, style: str) -> Text:
    """Return one line, which is cut off where the panel ends: a line that wraps would stay on the screen."""
    return Text(on_one_line(text), style, no_wrap=True, overflow="ellipsis")


class LiveProgress:
    """Shows a job while it runs; a context manager, called with each event."""

    def __init__(self, console: Console, *, on_ctrl_c: str = "", verbose: bool = False) -> None:
        self.picture = JobPicture()
        self._on_ctrl_c = on_ctrl_c
        self._console = console
        self._events = PlainProgress(self.print_line, every_s=None, verbose=verbose)
        self._live = Live(self._draw(), console=console, refresh_per_second=_REFRESH_PER_S, transient=True)

    @property
    def failure(self) -> str:
        """Why the job failed, or "" if it did not."""
        return self.picture.failure

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def __call__(self, event: ReadEvent) -> None:
        """Print an event above the panel, and update the panel, which is drawn with the next refresh."""
        self._events(event)
        self.picture.on_event(event)
        # A finished drawing: the thread that refreshes must not read what changes here.
        self._live.update(self._draw())

    def print_line(self, line: str) -> None:
        """Print a line above the panel; one that is too long wraps at words."""
        self._console.print(Text(line))

    def _draw(self) -> RenderableType:
        return render(self.picture, on_ctrl_c=self._on_ctrl_c)


def can_animate() -> bool:
    """Whether stdout is a terminal that can redraw a panel; one with TERM=dumb cannot."""
    return sys.stdout.isatty() and not Console(force_terminal=True).is_dumb_terminal


@contextlib.contextmanager
def terminal_apart() -> Generator[tuple[Console, Callable[[Callable[[str], None]], None]]]:
    """Redirect stdout and stderr into a pipe, so that only a console writes to the terminal. Restored at the end.

    Yields:
        The console, and a function that starts a thread. The thread calls the given function with each line that this
            process or its children print. All of them must end within the context.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    kept = os.dup(1), os.dup(2)
    read, write = os.pipe()
    os.dup2(write, 1)
    os.dup2(write, 2)
    os.close(write)
    reader: list[threading.Thread] = []

    def start_reader(print_line: Callable[[str], None]) -> None:
        """Start the thread that reads the pipe, and calls `print_line` with each line."""
        thread = threading.Thread(target=_print_lines, args=(os.fdopen(read, "rb"), print_line), daemon=True)
        reader.append(thread)
        thread.start()

    try:
        with os.fdopen(os.dup(kept[0]), "w", encoding=sys.stdout.encoding, errors="replace") as terminal:
            yield Console(file=terminal), start_reader
            _restore(kept)
            for thread in reader:
                thread.join(_CLOSING_S)
    finally:
        _restore(kept)
        for number in kept:
            os.close(number)


def _restore(kept: tuple[int, int]) -> None:
    for number, original in zip((1, 2), kept, strict=True):
        os.dup2(original, number)


def _print_lines(pipe: BinaryIO, print_line: Callable[[str], None]) -> None:
    """Print each line of a pipe until it is closed by all writers, and close it."""
    with pipe:
        for line in pipe:
            print_line(on_one_line(line.decode(errors="replace").rstrip("\n")))
