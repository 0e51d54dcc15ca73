"""All kinds of faults at once: storms, flapping nodes, faults during recoveries and differing clocks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from holdfast.errors import EXIT_DONE
from holdfast.observability.history.audit import audit_events
from holdfast.observability.report import make_report
from holdfast.protocol import events as ev
from tests.simulation.cluster import SimCluster
from tests.simulation.families.storm_plans import storm_plan
from tests.simulation.faults.plans import Fault, FaultKind, FaultPlan
from tests.simulation.schedules.enumeration import FIRST_STORM_SEED
from tests.simulation.schedules.shrinking import failure

SCHEDULES = 40
JUMP = Fault(kind=FaultKind.CLOCK_JUMP, time=0.3)
CRASH = Fault(kind=FaultKind.CRASH_COORDINATOR, time=0.31, duration=0.1)


def test_random_storms() -> None:
    struck: set[str] = set()
    for seed in range(FIRST_STORM_SEED, FIRST_STORM_SEED + SCHEDULES):
        cluster = SimCluster(storm_plan(seed))
        assert not failure(cluster), f"python -m tests.simulation replay {seed}"
        struck |= {fault for fault, _ in cluster.injector.seen}
        events = cluster.world.journal.events
        assert audit_events(events).sound, seed
        time = make_report(events).time
        assert sum(time.seconds.values()) == pytest.approx(time.wall_s, rel=0.01), seed
    assert {FaultKind.CLOCK_JUMP, FaultKind.CUT, FaultKind.POWER_CUT, FaultKind.HANG, FaultKind.RAISE} <= struck


@pytest.mark.parametrize("which", range(4), ids=["two hours back", "a bit back", "a bit ahead", "two hours ahead"])
def test_a_clock_jump_changes_no_decision(which: int) -> None:
    faults = (replace(JUMP, target=which), CRASH)
    cluster = SimCluster(FaultPlan(seed=5, nodes=3, start_nodes=3, steps=8, start_spread=0.0, faults=faults))
    assert cluster.run().exit_code == EXIT_DONE
    events = cluster.world.journal.events
    restarted = next(event for event in events if isinstance(event, ev.CoordinatorRestarted))
    before = events[events.index(restarted) - 1]
    assert (restarted.time - before.time < -1.0) if which < 2 else (restarted.time - before.time > 1.0)
    assert not [event for event in events if isinstance(event, ev.FailureDetected | ev.RolledBack)]
    assert all(event.step_s >= 0.0 for event in events if isinstance(event, ev.StepCommitted))
