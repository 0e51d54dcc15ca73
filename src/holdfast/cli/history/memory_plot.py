"""What leavers, joiners and stayers held and moved around a change of the members (TrainMover, Figure 19)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from holdfast.protocol.events import MemorySampled, ReadEvent
from holdfast.protocol.messages.memory import MemoryOfNode

_COLOURS = {"leaver": "#c0392b", "joiner": "#27803b", "stayer": "#1f5fa8"}
_VERBS = {"leaver": "leaves", "joiner": "joins", "stayer": "stays"}
_MB = 1e6


def newest_change(events: Sequence[ReadEvent]) -> MemorySampled | None:
    """Return the newest change whose memory is known, of those where somebody takes another's place if there is one."""
    sampled = [event for event in events if isinstance(event, MemorySampled)]
    moves = [event for event in sampled if {"leaver", "joiner"} <= {node.role for node in event.nodes}]
    return max(moves or sampled, key=lambda event: event.time, default=None)


def draw_memory(figure: Any, change: MemorySampled, start: float) -> None:
    """Draw state bytes per second, and below them memory, by node; `start`: of the job, unix seconds."""
    rates, held = figure.subplots(2, 1, sharex=True, height_ratios=(2, 3))
    at = change.time - start
    for node in change.nodes:
        colour, name = _COLOURS.get(node.role, "#555555"), f"{node.node} {_VERBS.get(node.role, node.role)}"
        seconds = [at - sample.ago_s for sample in node.samples]
        held.plot(seconds, [sample.memory / _MB for sample in node.samples], color=colour, linewidth=1.4, label=name)
        for way, sign in (("sent", 1.0), ("received", -1.0)):
            moved = [sign * rate / _MB for rate in _rates(node, way)]
            rates.step(seconds[1:], moved, where="pre", color=colour, linewidth=1.4)
    rates.axhline(0.0, color="#999999", linewidth=0.8)
    rates.set_ylabel("state, MB per second\n(up: sent, down: received)")
    rates.set_title(
        f"the nodes' workers around the end of generation {change.since_generation}", fontsize=10, loc="left"
    )
    held.set_ylabel("memory, MB")
    held.set_xlabel("seconds since the job's start")
    for axes in (rates, held):
        axes.grid(color="#dddddd", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    # (above its panel: memory may be high anywhere within)
    held.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=5, fontsize=8, frameon=False)


def _rates(node: MemoryOfNode, way: str) -> list[float]:
    """Return the bytes per second between samples; a process that was replaced begins at nothing again."""
    return [
        max(0.0, getattr(after, way) - getattr(before, way)) / max(before.ago_s - after.ago_s, 1e-3)
        for before, after in pairwise(node.samples)
    ]
