"""Figures from the journals of a pool and its jobs, in seconds."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Events = Sequence[dict[str, Any]]
#: Steps before and after a change that count as delayed by it, and number of undisturbed steps on either side of them.
_BEFORE, _AFTER, _USUAL = 1, 3, 8


@dataclass(frozen=True)
class Figures:
    """Measured values of one kind."""

    what: str
    values: Sequence[float]

    @property
    def median(self) -> float:
        """The median, or 0 without values."""
        return statistics.median(self.values) if self.values else 0.0

    def __str__(self) -> str:
        return f"  {self.what:45}{format_spread(self.values)}"


def format_spread(values: Sequence[float]) -> str:
    """Format median, range and count."""
    if not values:
        return "none"
    return f"{statistics.median(values):.3f} ({min(values):.3f}..{max(values):.3f}; {len(values)})"


def median_step(events: Events) -> float:
    """Return the median seconds of a step."""
    return statistics.median(event["step_s"] for event in events if event["event"] == "step_committed")


def measure_delays(events: Events, since: float, steps_of: Events | None = None) -> tuple[list[float], list[float]]:
    """Return the delays of each change of a job to fewer workers, and to more workers.

    Args:
        since: Unix seconds; earlier changes do not count.
        steps_of: another job to use the steps of instead.
    """
    steps = [event for event in steps_of or events if event["event"] == "step_committed"]
    fewer, more, world = list[float](), list[float](), 0
    for event in events:
        if event["event"] != "generation_started":
            continue
        before, world = world, event["world_size"]
        if event["time"] > since and world != before:
            (more if world > before else fewer).append(_delay(steps, event["time"]))
    return fewer, more


def _delay(steps: Events, at: float) -> float:
    place = sum(step["time"] <= at for step in steps)
    around = steps[max(0, place - _BEFORE) : place + _AFTER]
    sides = (steps[max(0, place - _BEFORE - _USUAL) : place - _BEFORE], steps[place + _AFTER :][:_USUAL])
    usual = max(statistics.median(step["step_s"] for step in side) for side in sides if side)
    return max(step["step_s"] for step in around) - usual


def find_world_regained(events: Events, at: float, size: int) -> float | None:
    """Return when a job first regained this many workers after a loss since `at`, or None."""
    fewer = False
    for event in events:
        if event["event"] != "generation_started" or event["time"] <= at:
            continue
        fewer |= event["world_size"] < size
        if fewer and event["world_size"] == size:
            return event["time"]
    return None
