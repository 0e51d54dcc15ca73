"""The picture of a change of the members: memory and moved state of its nodes (TrainMover, Figure 19)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from holdfast.cli.history.plot_style import BLUE, GREEN, GREY, RED, add_legend, new_figure, save_figure
from holdfast.errors import BadInputError
from holdfast.protocol.events import MemorySampled, ReadEvent
from holdfast.protocol.messages.memory import MemoryOfNode

#: of nodes of the same role, each has its own colour
_COLOURS = {
    "leaver": (RED, "#e8862e", "#7b241c", "#d98fb0"),
    "joiner": (GREEN, "#a3c11a", "#0b6b6b", "#6fd08c"),
    "stayer": (BLUE, "#4fb3d9", "#3b2f8f", "#9a86d1", "#7aa6b8", "#15486b", "#b59bd9", "#2e86c1", "#5b5ea6"),
}
_VERBS = {"leaver": "leaves", "joiner": "joins", "stayer": "stays"}
_MB = 1e6
#: nodes in the legend
_NAMED_AT_MOST = 9


def plot_memory(events: Sequence[ReadEvent], path: Path) -> None:
    """Draw the newest change of the members into a PNG: memory of each node, and the state it sent and received.

    Raises:
        BadInputError: no change was sampled, or the file cannot be written.
    """
    change = newest_change(events)
    if change is None:
        raise BadInputError(
            f"--plot-memory {path}: there are no samples of memory: no node has joined, left or failed yet, or all "
            "have failed since"
        )
    figure = new_figure(f"{change.job}: memory around the end of generation {change.since_generation}", height_inches=6)
    draw_memory(figure, change, start=events[0].time)
    save_figure(figure, path, "--plot-memory")


def newest_change(events: Sequence[ReadEvent]) -> MemorySampled | None:
    """Return the newest memory samples of a change of the members; None without samples.

    If samples of a move to another node exist, only these are considered.
    """
    sampled = [event for event in events if isinstance(event, MemorySampled)]
    moves = [event for event in sampled if {"leaver", "joiner"} <= {node.role for node in event.nodes}]
    return max(moves or sampled, key=lambda event: event.time, default=None)


def draw_memory(figure: Any, change: MemorySampled, start: float) -> None:
    """Draw each node's memory over time, and below it the state that it sent and received per second.

    At most `_NAMED_AT_MOST` nodes have a name. `start`: of the job, unix seconds.
    """
    memory, moved = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    at = change.time - start
    seen = Counter[str]()
    for number, node in enumerate(change.nodes):
        colours = _COLOURS.get(node.role, (GREY,))
        colour = colours[seen[node.role] % len(colours)]
        seen[node.role] += 1
        name = f"{node.node} {_VERBS.get(node.role, node.role)}"
        if number >= _NAMED_AT_MOST:
            more = len(change.nodes) - _NAMED_AT_MOST
            name = f"{more} more nodes" if number == _NAMED_AT_MOST else None
        seconds = [at - sample.ago_s for sample in node.samples]
        memory.plot(seconds, [sample.memory / _MB for sample in node.samples], color=colour, linewidth=1.4, label=name)
        for way, sign in (("sent", 1.0), ("received", -1.0)):
            rates = [sign * rate / _MB for rate in _rates(node, way)]
            moved.step(seconds[1:], rates, where="pre", color=colour, linewidth=1.4, label=name if sign > 0 else None)
    moved.axhline(0.0, color=GREY, linewidth=0.8)
    memory.set_ylabel("memory, MB")
    moved.set_ylabel("state, MB per second\n(up: sent, down: received)")
    moved.set_xlabel("seconds since the start of the job")
    for axes in (memory, moved):
        add_legend(axes)


def _rates(node: MemoryOfNode, way: str) -> list[float]:
    """Return the bytes per second between samples; a process that was replaced begins at nothing again."""
    return [
        max(0.0, getattr(after, way) - getattr(before, way)) / max(before.ago_s - after.ago_s, 1e-3)
        for before, after in pairwise(node.samples)
    ]
