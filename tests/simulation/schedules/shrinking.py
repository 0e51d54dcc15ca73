"""Shrinks a failing schedule: removes faults, crashes, nodes and steps while it fails in the same way."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace

from tests.simulation.cluster import SimCluster
from tests.simulation.faults.plans import FaultPlan

#: The maximum number of runs to shrink one schedule.
MOST_RUNS = 400

Failing = Callable[[FaultPlan], str]


def failure(cluster: SimCluster) -> str:
    """Run a cluster and return its failure, or "" if it passes. Equal strings probably mean the same fault."""
    try:
        cluster.run()
    except Exception as error:  # noqa: BLE001 - any exception, such as a KeyError in a machine, is a failure
        return signature(error)
    return ""


def signature(error: Exception) -> str:
    """Return the error without the names, numbers and lists that differ between schedules."""
    lines = str(error).splitlines() or [""]
    text = re.sub(r"\[.*?\]|\(.*\)|\{.*\}", "", lines[0])
    words = [word for word in text.split() if not any(letter.isdigit() for letter in word)]
    return f"{type(error).__name__}: {' '.join(words)}"[:120]


def shrunk(plan: FaultPlan, failing: Failing | None = None) -> FaultPlan:
    """Return a minimal plan that fails as `plan` does, or `plan` itself if it passes."""
    failing = failing or (lambda smaller: failure(SimCluster(smaller)))
    wanted, runs = failing(plan), 1
    progress = bool(wanted)
    while progress:
        progress = False
        for smaller in _smaller(plan):
            if runs >= MOST_RUNS:
                return plan
            runs += 1
            if failing(smaller) == wanted:
                plan, progress = smaller, True
                break
    return plan


def _smaller(plan: FaultPlan) -> Iterator[FaultPlan]:
    """Yield smaller plans, the smallest first."""
    for name in ("faults", "crashes", "crashes_after_strike"):
        things = getattr(plan, name)
        for rest in _parts(things):
            yield replace(plan, **{name: rest})
    for name, least in (
        ("workers_per_node", 1),
        ("nodes", 1),
        ("steps", 1),
        ("micro_batches", 1),
        ("checkpoint_every", 0),
        ("experts", 0),
        ("slots", 0),
        ("rebalance_every", 0),
        ("start_spread", 0.0),
    ):
        for value in dict.fromkeys((least, type(least)(getattr(plan, name) // 2), getattr(plan, name) - 1)):
            if least <= value < getattr(plan, name) and _fits(smaller := _with(plan, name, value)):
                yield smaller


def _with(plan: FaultPlan, name: str, value: float) -> FaultPlan:
    plan = replace(plan, **{name: value})
    return replace(plan, start_nodes=min(plan.start_nodes, plan.nodes))


def _fits(plan: FaultPlan) -> bool:
    """Return whether the workers of each node form complete replica groups."""
    return all(plan.workers_per_node % places == 0 for places in (plan.places, *(places for _, places in plan.layouts)))


def _parts(things: tuple[object, ...]) -> Iterator[tuple[object, ...]]:
    """Yield the tuple without one run of its items: first halves, then quarters, at the end single items."""
    length = len(things)
    while length >= 1:
        for start in range(0, len(things), length):
            yield things[:start] + things[start + length :]
        length //= 2
