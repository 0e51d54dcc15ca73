"""The forecast's recovery times against the fine simulator, in a small job with known link and group times."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from statistics import fmean

import msgspec
import pytest

from holdfast.errors import EXIT_DONE
from holdfast.planner.fleet.case import FleetCase
from holdfast.planner.fleet.scale import mean_parts
from holdfast.protocol import events as ev
from tests.simulation.cluster import SimCluster
from tests.simulation.faults.plans import Fault, FaultKind, FaultPlan
from tests.simulation.world import START, Timing, World
from tests.simulation.world import Parts as Broken

NODES, ROUNDS, STEPS = 6, 4, 18
PLAN = FaultPlan(seed=1, nodes=NODES, start_nodes=NODES, micro_batches=NODES * ROUNDS, steps=STEPS, start_spread=0.0)
RUNS = 60


def commit_times(plan: FaultPlan) -> list[float]:
    cluster = SimCluster(plan)
    assert cluster.run().exit_code == EXIT_DONE
    return [event.time - START for event in cluster.world.journal.events if isinstance(event, ev.StepCommitted)]


def usual_step_s(nodes: int) -> float:
    """Return the mean step time of an undisturbed job of `nodes` nodes."""
    runs = [commit_times(replace(PLAN, seed=seed, nodes=nodes, start_nodes=nodes)) for seed in range(6)]
    return fmean((times[-1] - times[3]) / (STEPS - 4) for times in runs)


def lost_s(kind: FaultKind, step_s: float) -> float:
    """Return the additional time of the step in which a node fails, over a usual step of the remaining nodes."""
    lost: list[float] = []
    for seed in range(RUNS):
        rng = Random(seed)
        at = 1.0 + rng.random() * 4 * step_s
        times = commit_times(replace(PLAN, seed=seed, faults=(Fault(kind=kind, time=at, target=rng.randrange(64)),)))
        next_one = next(place for place, time in enumerate(times) if time > at)
        lost.append(times[next_one] - times[next_one - 1])
    return fmean(lost) - usual_step_s(NODES - 1)


def case_like(timing: Timing, *, silent: bool, step_s: float) -> FleetCase:
    """Return the same job for the forecast: a message takes one link, and a group takes its build time."""
    link, build, config = (
        fmean(timing.link),
        fmean(timing.spans["build"]),
        World(PLAN, Broken(), keep_trace=False).config,
    )
    times = {
        "silent_share": float(silent),
        "lease_s": config.lease_s,
        "heartbeat_s": config.heartbeat_s,
        "tick_s": config.tick_s,
        "reset_s": link,
        "decide_s": 2 * link,  # The Stop message and the reports.
        "tell_s": link,
        "nccl_s": 2 * link + build,  # Addresses to the coordinator, and from there to the others.
        "decide_per_node_s": 0.0,
        "tell_per_node_s": 0.0,
        "nccl_per_worker_s": 0.0,
    }
    job = {"step_s": step_s, "rounds": ROUNDS}
    return msgspec.convert({"nodes": NODES, "workers_per_node": 1, "job": job, "recovery": times}, FleetCase)


def expected_s(*, silent: bool, step_s: float) -> float:
    parts = mean_parts(case_like(Timing(), silent=silent, step_s=step_s))
    return parts.total - parts.redo  # A usual step of fewer nodes already contains the redone work.


def test_a_node_that_fails_costs_as_much_as_in_the_fine_simulator() -> None:
    step_s = usual_step_s(NODES)
    expected = expected_s(silent=False, step_s=step_s)
    assert lost_s(FaultKind.KILL_NODE, step_s) == pytest.approx(expected, abs=0.1 * (step_s + expected))


def test_a_silent_node_costs_at_most_its_lease() -> None:
    """If other nodes wait for it, it is removed sooner; the forecast counts the whole lease."""
    step_s = usual_step_s(NODES)
    seen = expected_s(silent=False, step_s=step_s)
    assert seen < lost_s(FaultKind.SILENT_NODE, step_s) < expected_s(silent=True, step_s=step_s)
