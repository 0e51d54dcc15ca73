"""All scripts leave their loops with `break` after the same step; the job finishes even if a coordinator dies."""

from __future__ import annotations

from dataclasses import replace

import pytest

from holdfast.errors import EXIT_DONE
from tests.simulation.cluster import SimCluster
from tests.simulation.faults.plans import Fault, FaultKind, FaultPlan


@pytest.mark.parametrize("power_cuts", [False, True])
@pytest.mark.parametrize(("nodes", "workers"), [(1, 1), (1, 2), (3, 1), (2, 2)])
def test_scripts_that_leave_finish_the_job_despite_a_crash_at_any_write(
    nodes: int, workers: int, *, power_cuts: bool
) -> None:
    plan = FaultPlan(seed=5, nodes=nodes, start_nodes=nodes, workers_per_node=workers, steps=2, leaves=True)
    undisturbed = SimCluster(plan)
    assert undisturbed.run().exit_code == EXIT_DONE
    for write in range(1, undisturbed.writes + 1):
        outcome = SimCluster(replace(plan, crashes=(write,), power_cuts=power_cuts)).run()
        assert outcome.exit_code == EXIT_DONE, f"{write}: {outcome.why}"


def test_scripts_that_leave_without_a_coordinator_finish_the_job() -> None:
    for seed in range(40):
        away = Fault(kind=FaultKind.CRASH_COORDINATOR, time=0.3 + 0.02 * seed, duration=1.5)
        plan = FaultPlan(seed=seed, steps=5, workers_per_node=1 + seed % 2, leaves=True, faults=(away,))
        outcome = SimCluster(plan).run()
        assert outcome.exit_code == EXIT_DONE, f"{seed}: {outcome.why}"


@pytest.mark.parametrize("seed", range(0, 60, 2))
def test_a_node_that_joins_as_all_others_leave_does_not_fail_the_job(seed: int) -> None:
    """The workers that should send it the state had left, so no live copy existed and the job failed."""
    plan = FaultPlan(
        seed=seed, nodes=2, start_nodes=1, workers_per_node=2, steps=1 + seed % 3, micro_batches=2, leaves=True
    )
    outcome = SimCluster(plan).run()
    assert outcome.exit_code == EXIT_DONE, outcome.why
