"""What a job's events add up to: progress, recoveries and their cost, and whether every sample counted once."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.errors import BadInputError

JsonEvent = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Recovery:
    """One `recovered` event. `extra_s`: what it cost beyond an undisturbed step; `nodes`: who came or went."""

    time: float
    action: str
    nodes: tuple[str, ...]
    state_source: str
    bytes_moved: int
    experts_moved: int
    down_s: float
    extra_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """A job in figures; times in seconds. `gaps`: steps that are missing or doubled, which must be none.

    `emulate_compute`: seconds per token that expert computation was made to take, 0 where nothing was emulated.
    """

    job: str
    outcome: str
    started: float
    seconds: float
    steps: int
    samples: int
    first_loss: float | None
    final_loss: float | None
    median_step_s: float
    #: share of the time since the first step that went into steps of usual length
    productive: float
    recoveries: tuple[Recovery, ...]
    gaps: int
    #: of the steps, those at which the loss scale had the optimizer left alone
    skipped: int = 0
    #: placements of the experts that were switched to because of their loads
    rebalances: int = 0
    #: how long too few nodes were there
    waiting_s: float = 0.0
    emulate_compute: float = 0.0


def read_events(path: Path) -> list[JsonEvent]:
    """Read an event file; a torn last line of a job that still runs is left out.

    Raises:
        BadInputError: the file cannot be read, or a line is no event.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise BadInputError(f"{path} cannot be read as an event file: {error}") from None
    events: list[JsonEvent] = []
    for number, line in enumerate(lines[:-1], 1):
        try:
            event = json.loads(line)
        except ValueError:
            event = None
        if not isinstance(event, dict) or not {"event", "time"} <= event.keys():
            raise BadInputError(f"{path}, line {number} is no event: give the file that --events wrote")
        events.append(event)
    if not events:
        raise BadInputError(f"{path} holds no event yet")
    return events


def committed_steps(events: Iterable[JsonEvent]) -> list[JsonEvent]:
    """Return the `step_committed` events that count: those undone by a roll-back are left out."""
    kept: list[JsonEvent] = []
    for event in events:
        if event["event"] == "rolled_back":
            kept = [step for step in kept if step["step"] <= event["to_step"]]
        elif event["event"] == "step_committed":
            kept.append(event)
    return kept


def make_report(events: Sequence[JsonEvent]) -> Report:
    """Add up a job's events."""
    steps = committed_steps(events)
    usual = statistics.median([step["seconds"] for step in steps[1:]]) if len(steps) > 1 else 0.0
    training = steps[-1]["time"] - steps[0]["time"] if steps else 0.0
    outcomes = [event["event"] for event in events if event["event"] in ("job_finished", "job_failed")]
    numbers = [step["step"] for step in steps]
    return Report(
        job=events[0].get("job", ""),
        outcome=outcomes[-1].removeprefix("job_") if outcomes else "running",
        started=events[0]["time"],
        seconds=events[-1]["time"] - events[0]["time"],
        steps=len(steps),
        samples=sum(step["samples"] for step in steps),
        first_loss=steps[0]["loss"] if steps else None,
        final_loss=steps[-1]["loss"] if steps else None,
        median_step_s=usual,
        productive=min(1.0, usual * (len(steps) - 1) / training) if training > 0 else 0.0,
        recoveries=tuple(_recoveries(events, usual)),
        skipped=sum(step.get("skipped", False) for step in steps),
        rebalances=sum(event["event"] == "rebalanced" for event in events),
        waiting_s=_waiting_s(events),
        emulate_compute=events[0].get("emulate_compute", 0.0),
        gaps=sum(number != place for place, number in enumerate(numbers, numbers[0] if numbers else 1)),
    )


def _waiting_s(events: Sequence[JsonEvent]) -> float:
    """Return for how long the job stood still for want of nodes, up to the last event."""
    total, since = 0.0, None
    for event in events:
        if event["event"] == "job_waiting" and since is None:
            since = event["time"]
        elif event["event"] == "epoch_started" and since is not None:
            total, since = total + event["time"] - since, None
    return total if since is None else total + events[-1]["time"] - since


def _recoveries(events: Sequence[JsonEvent], usual: float) -> list[Recovery]:
    found: list[Recovery] = []
    involved: list[str] = []
    for event in events:
        if event["event"] in ("failure_detected", "node_joined"):
            involved.append(event["node"])
        if event["event"] == "epoch_started" and event["reason"] == "start":
            involved = []
        if event["event"] != "recovered":
            continue
        found.append(
            Recovery(
                time=event["time"],
                action=event["action"],
                nodes=tuple(dict.fromkeys(involved)),
                state_source=event["state_source"],
                bytes_moved=event["bytes_moved"],
                experts_moved=event.get("experts_moved", 0),
                down_s=event["down_s"],
                extra_s=event["down_s"] - usual,
            )
        )
        involved = []
    return found
