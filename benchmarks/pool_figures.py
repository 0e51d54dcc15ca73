"""What the journals of a pool and its jobs come to, in seconds."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Events = Sequence[dict[str, Any]]
#: steps around a change that count as held up by it, and on either side of those that are the usual ones
_BEFORE, _AFTER, _USUAL = 1, 3, 8


@dataclass(frozen=True)
class Figures:
    """Some measured values of one thing."""

    what: str
    values: Sequence[float]

    @property
    def median(self) -> float:
        """The median, 0 where nothing was measured."""
        return statistics.median(self.values) if self.values else 0.0

    def __str__(self) -> str:
        return f"  {self.what:45}{spread(self.values)}"


def spread(values: Sequence[float]) -> str:
    """Return median, range and number."""
    if not values:
        return "none"
    return f"{statistics.median(values):.3f} ({min(values):.3f}..{max(values):.3f}; {len(values)})"


def median_step(events: Events) -> float:
    """Return how long a step takes usually."""
    return statistics.median(event["step_s"] for event in events if event["event"] == "step_committed")


def held_up(events: Events, since: float, steps_of: Events | None = None) -> tuple[list[float], list[float]]:
    """Return what each change of a job's world to fewer, and to more workers has held up.

    Args:
        since: unix seconds; earlier ones do not count. steps_of: another job, whose steps are looked at instead.
    """
    steps = [event for event in steps_of or events if event["event"] == "step_committed"]
    fewer, more, world = list[float](), list[float](), 0
    for event in events:
        if event["event"] != "generation_started":
            continue
        before, world = world, event["world_size"]
        if event["time"] > since and world != before:
            (more if world > before else fewer).append(_longer(steps, event["time"]))
    return fewer, more


def _longer(steps: Events, at: float) -> float:
    place = sum(step["time"] <= at for step in steps)
    around = steps[max(0, place - _BEFORE) : place + _AFTER]
    sides = (steps[max(0, place - _BEFORE - _USUAL) : place - _BEFORE], steps[place + _AFTER :][:_USUAL])
    usual = max(statistics.median(step["step_s"] for step in side) for side in sides if side)
    return max(step["step_s"] for step in around) - usual


def world_again(events: Events, at: float, size: int) -> float | None:
    """Return when a job first had so many workers after it had had fewer since `at`; None where it had not."""
    fewer = False
    for event in events:
        if event["event"] != "generation_started" or event["time"] <= at:
            continue
        fewer |= event["world_size"] < size
        if fewer and event["world_size"] == size:
            return event["time"]
    return None
