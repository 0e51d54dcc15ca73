"""The live view of a job in a terminal: step, loss, samples/s, a line per node, and the events as they happen."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from holdfast.cli.progress import Event, loss_text, stamped

_SHOWN_EVENTS = 10
_RATE_STEPS = 20
_REFRESH_PER_S = 8
_COLOURS = {
    "failure_detected": "bold red",
    "job_failed": "bold red",
    "node_left": "yellow",
    "recovered": "bold green",
    "job_finished": "bold green",
    "node_joined": "cyan",
    "rolled_back": "yellow",
    "job_waiting": "bold yellow",
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
    epoch: int = 0
    world: int = 0
    step: int = 0
    loss: float | None = None
    samples: int = 0
    nodes: dict[str, NodeLine] = field(default_factory=dict)
    events: deque[Event] = field(default_factory=lambda: deque(maxlen=_SHOWN_EVENTS))
    recent: deque[Event] = field(default_factory=lambda: deque(maxlen=_RATE_STEPS))
    failure: str = ""

    @property
    def samples_per_s(self) -> float:
        """Over the last steps; 0 where there are too few."""
        seconds = sum(event["seconds"] for event in self.recent)
        return sum(event["samples"] for event in self.recent) / seconds if seconds > 0 else 0.0

    def take(self, event: Event) -> None:
        """Take in one event."""
        kind = event["event"]
        if kind == "step_committed":
            self._step(event)
            return
        self.events.append(event)
        self._node(kind, event)
        if kind in ("job_started", "coordinator_restarted"):
            self.job, self.url = event["job"], event["url"]
        elif kind == "epoch_started":
            self.epoch, self.world = event["epoch"], event["world"]
            self._members(event["members"])
        elif kind == "job_failed":
            self.failure = event["why"]

    def _step(self, event: Event) -> None:
        self.step, self.loss, self.world = event["step"], event["loss"], event["world"]
        self.samples += event["samples"]
        if event["seconds"] > 0:
            self.recent.append(event)

    def _members(self, members: list[str]) -> None:
        for name, node in self.nodes.items():
            if name in members:
                node.state = "training"
            elif not node.state.startswith("left"):
                node.state = "waiting"

    def _node(self, kind: str, event: Event) -> None:
        name = event.get("node", "")
        if kind == "node_joined":
            pids = tuple(event["worker_pids"])
            self.nodes[name] = NodeLine("joining", event["agent_pid"], pids, event["time"])
        elif name not in self.nodes:
            return
        elif kind == "workers_changed":
            self.nodes[name].worker_pids = tuple(event["worker_pids"])
        elif kind == "node_left":
            self.nodes[name].state = f"left ({event['reason']})"
            self.nodes[name].worker_pids = ()
        elif kind == "failure_detected":
            self.nodes[name].state = event["kind"]


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
        ("epoch", str(picture.epoch)),
    )
    head.add_row(*[Text.assemble((f"{name} ", "dim"), (value, "bold")) for name, value in facts])
    nodes = Table(box=None, padding=(0, 3, 0, 0))
    for title in ("node", "state", "agent", "workers"):
        nodes.add_column(title, header_style="dim")
    for name, node in picture.nodes.items():
        style = "" if node.state in ("training", "joining", "waiting") else "dim red"
        nodes.add_row(name, node.state, str(node.agent_pid), " ".join(map(str, node.worker_pids)), style=style)
    events = Group(*[Text(stamped(event), _COLOURS.get(event["event"], "")) for event in picture.events])
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

    def __call__(self, event: dict[str, Any]) -> None:
        """Take one event; it is drawn with the next refresh."""
        self.picture.take(event)
        # A finished drawing: the thread that refreshes must not look at what changes here.
        self._live.update(render(self.picture, self._steps))
