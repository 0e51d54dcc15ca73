"""The live view of a job in a terminal: step, loss, samples/s, a line per node, and the events as they happen."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from holdfast.cli.job.progress import loss_text, stamped
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
    StepCommitted,
    WorkersChanged,
)

_SHOWN_EVENTS = 10
_RATE_STEPS = 20
_REFRESH_PER_S = 8
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


@dataclass(slots=True)
class NodeLine:
    """One node, as the events tell it."""

    state: str
    agent_pid: int
    worker_pids: tuple[int, ...]
    since: float


@dataclass(slots=True)
class JobPicture:
    """What the view shows; pure: events in, a picture out."""

    job: str = ""
    url: str = ""
    generation: int = 0
    world: int = 0
    step: int = 0
    loss: float | None = None
    samples: int = 0
    nodes: dict[str, NodeLine] = field(default_factory=dict[str, NodeLine])
    events: deque[ReadEvent] = field(default_factory=lambda: deque(maxlen=_SHOWN_EVENTS))
    recent: deque[StepCommitted] = field(default_factory=lambda: deque(maxlen=_RATE_STEPS))
    failure: str = ""

    @property
    def samples_per_s(self) -> float:
        """Over the last steps; 0 where there are too few."""
        seconds = sum(step.step_s for step in self.recent)
        return sum(step.samples for step in self.recent) / seconds if seconds > 0 else 0.0

    def take(self, event: ReadEvent) -> None:
        """Take in one event."""
        if isinstance(event, StepCommitted):
            self._step(event)
            return
        self.events.append(event)
        match event:
            case JobStarted() | CoordinatorRestarted():
                self.job, self.url = event.job, event.url
            case GenerationStarted():
                self.generation, self.world = event.generation, event.world_size
                self._members(event.members)
            case JobFailed():
                self.failure = event.why
            case NodesJoined():
                for joined in event.nodes:
                    line = NodeLine("joining", joined.agent_pid, joined.worker_pids, event.time)
                    self.nodes[joined.node] = line
            case WorkersChanged() | NodeLeft() | FailureDetected() if event.node in self.nodes:
                self._changed(event, self.nodes[event.node])
            case _:
                pass

    def _step(self, event: StepCommitted) -> None:
        self.step, self.loss, self.world = event.step, event.loss, event.world_size
        self.samples += event.samples
        if event.step_s > 0:
            self.recent.append(event)

    def _members(self, members: Sequence[str]) -> None:
        for name, node in self.nodes.items():
            if name in members:
                node.state = "training"
            elif not node.state.startswith("left"):
                node.state = "waiting"

    @staticmethod
    def _changed(event: WorkersChanged | NodeLeft | FailureDetected, node: NodeLine) -> None:
        match event:
            case WorkersChanged():
                node.worker_pids = event.worker_pids
            case NodeLeft():
                node.state, node.worker_pids = f"left ({event.reason})", ()
            case FailureDetected():
                node.state = event.kind


def render(picture: JobPicture, steps: int = 0) -> RenderableType:
    """Draw a picture. `steps`: how many there will be, 0 where that is not known."""
    head = Table.grid(padding=(0, 3))
    of = f"/{steps}" if steps else ""
    loss = loss_text(picture.loss)
    facts = (
        ("step", f"{picture.step}{of}"),
        ("loss", loss),
        ("samples/s", f"{picture.samples_per_s:.1f}"),
        ("workers", str(picture.world)),
        ("generation", str(picture.generation)),
    )
    head.add_row(*[Text.assemble((f"{name} ", "dim"), (value, "bold")) for name, value in facts])
    nodes = Table(box=None, padding=(0, 3, 0, 0))
    for title in ("node", "state", "agent", "workers"):
        nodes.add_column(title, header_style="dim")
    for name, node in picture.nodes.items():
        style = "" if node.state in ("training", "joining", "waiting") else "dim red"
        nodes.add_row(name, node.state, str(node.agent_pid), " ".join(map(str, node.worker_pids)), style=style)
    events = Group(*[Text(stamped(event), _COLOURS.get(type(event), "")) for event in picture.events])
    title = f"holdfast {picture.job} {picture.url}".rstrip()
    return Panel(Group(head, Text(), nodes, Text(), events), title=Text(title), title_align="left")


class LiveProgress:
    """Shows a job while it runs; a context manager, called with each event."""

    def __init__(self, console: Console, *, steps: int = 0) -> None:
        self.picture = JobPicture()
        self._steps = steps
        self._live = Live(render(self.picture, steps), console=console, refresh_per_second=_REFRESH_PER_S)

    @property
    def failure(self) -> str:
        """Why the job failed, "" where it did not."""
        return self.picture.failure

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def __call__(self, event: ReadEvent) -> None:
        """Take one event; it is drawn with the next refresh."""
        self.picture.take(event)
        # A finished drawing: the thread that refreshes must not look at what changes here.
        self._live.update(render(self.picture, self._steps))
