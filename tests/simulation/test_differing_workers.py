"""Workers with differing script options: the first is replaced; later the script is at fault."""

from __future__ import annotations

from dataclasses import replace

import pytest

from holdfast.errors import EXIT_DONE, EXIT_FAILED
from holdfast.protocol import events as ev
from tests.simulation.cluster import SimCluster
from tests.simulation.families.differ_plans import differ_plan
from tests.simulation.faults.plans import Fault, FaultKind, FaultPlan
from tests.simulation.schedules.enumeration import FIRST_DIFFER_SEED
from tests.simulation.schedules.shrinking import failure

SCHEDULES = 60
ODD = Fault(kind=FaultKind.DIFFER, boundary="applied", step=2, target=1)
PLAN = FaultPlan(seed=5, nodes=4, start_nodes=4, steps=6, start_spread=0.0)


def found(cluster: SimCluster) -> list[tuple[str, str]]:
    events = cluster.world.journal.events
    return [(event.what, event.likely_cause) for event in events if isinstance(event, ev.CorruptionFound)]


def test_random_schedules_with_workers_that_differ() -> None:
    struck = 0
    for seed in range(FIRST_DIFFER_SEED, FIRST_DIFFER_SEED + SCHEDULES):
        cluster = SimCluster(differ_plan(seed))
        assert not failure(cluster), f"python -m tests.simulation replay {seed}"
        struck += bool(found(cluster))
    assert struck > SCHEDULES / 4, "too few faults had an effect"


def test_a_worker_that_differs_is_replaced_and_the_job_continues() -> None:
    cluster = SimCluster(replace(PLAN, faults=(ODD,)))
    assert cluster.run().exit_code == EXIT_DONE
    assert found(cluster) == [("settings", "script")]
    failed = [event for event in cluster.world.journal.events if isinstance(event, ev.FailureDetected)]
    assert [event.category for event in failed] == ["replica_differs"]


def test_a_second_difference_within_five_minutes_fails_the_job() -> None:
    cluster = SimCluster(replace(PLAN, faults=(ODD, replace(ODD, step=4, target=2))))
    outcome = cluster.run()
    assert outcome.exit_code == EXIT_FAILED
    assert "(2 times in 300 s)" in outcome.why
    assert "the likely cause is the script" in outcome.why


@pytest.mark.parametrize("seed", [33359901369, 33723882770])
def test_a_wrong_worker_that_stays_first_is_replaced_next(seed: int) -> None:
    """Of two workers the one that received its state is replaced; then the other differs from two nodes: one fault."""
    cluster = SimCluster(differ_plan(seed))
    assert not failure(cluster)
    assert [cause for _, cause in found(cluster)] == ["transfer", "script"]


def test_a_job_without_a_majority_fails() -> None:
    faults = (ODD, replace(ODD, target=2), replace(ODD, target=3))
    cluster = SimCluster(replace(PLAN, faults=faults))
    outcome = cluster.run()
    assert outcome.exit_code == EXIT_FAILED
    assert "no majority" in outcome.why
    assert found(cluster) == [("settings", "script")]
