"""One wrong gradient in a worker's sums, with other failures: it is never applied and never ends the job."""

from __future__ import annotations

from dataclasses import replace

import pytest

from holdfast.errors import EXIT_DONE, EXIT_FAILED
from holdfast.protocol import events as ev
from tests.simulation.cluster import SimCluster
from tests.simulation.families.corrupt_plans import corrupt_plan
from tests.simulation.faults.plans import Fault, FaultKind, FaultPlan
from tests.simulation.schedules.enumeration import FIRST_CORRUPT_SEED
from tests.simulation.schedules.shrinking import failure

SCHEDULES = 60
WRONG = Fault(kind=FaultKind.CORRUPT_SUM, boundary="reducing", step=2, target=1)
PLAN = FaultPlan(seed=5, nodes=3, start_nodes=3, steps=4, start_spread=0.0, faults=(WRONG,))


def refusals(cluster: SimCluster) -> list[int]:
    """Return the steps in the journal with a refused step result."""
    return [event.step for event in cluster.world.journal.events if isinstance(event, ev.CorruptionFound)]


def test_random_schedules_with_one_wrong_gradient() -> None:
    refused, struck_then = 0, 0
    for seed in range(FIRST_CORRUPT_SEED, FIRST_CORRUPT_SEED + SCHEDULES):
        plan = corrupt_plan(seed)
        assert sum(fault.kind is FaultKind.CORRUPT_SUM for fault in plan.faults) == 1
        cluster = SimCluster(plan)
        assert not failure(cluster), f"python -m tests.simulation replay {seed}"
        refused += len(refusals(cluster)) > 0
        struck_then += any(phase == "refused" for _, phase in cluster.injector.seen)
    assert refused > SCHEDULES / 4, "too few faults had an effect"
    assert struck_then > 0


@pytest.mark.parametrize("boundary", ["computing", "reducing"])
@pytest.mark.parametrize("seed", range(20))
def test_a_wrong_gradient_costs_one_more_attempt(seed: int, boundary: str) -> None:
    cluster = SimCluster(replace(PLAN, seed=seed, faults=(replace(WRONG, boundary=boundary),)))
    assert cluster.run().exit_code == EXIT_DONE
    assert refusals(cluster) == [2]
    (recovered,) = (event for event in cluster.world.journal.events if isinstance(event, ev.Recovered))
    assert (recovered.action, recovered.micro_batches_kept) == ("retry", 0)
    assert not [event for event in cluster.world.journal.events if isinstance(event, ev.FailureDetected)]


def test_a_wrong_gradient_kept_over_a_failure_is_refused_afterwards() -> None:
    """The gradient is corrupted after it is reported as held, so the next generation would use it."""
    dies = Fault(kind=FaultKind.KILL_NODE, boundary="reducing", step=2, target=2)
    cluster = SimCluster(replace(PLAN, faults=(replace(WRONG, boundary="stopped", step=0), dies)))
    assert cluster.run().exit_code == EXIT_DONE
    assert refusals(cluster) == [2]


def test_two_wrong_gradients_at_different_steps_are_two_refusals() -> None:
    cluster = SimCluster(replace(PLAN, faults=(WRONG, replace(WRONG, step=3, target=2))))
    assert cluster.run().exit_code == EXIT_DONE
    assert refusals(cluster) == [2, 3]


def test_a_step_refused_without_kept_gradients_fails_the_job() -> None:
    in_one_attempt = SimCluster(replace(PLAN, faults=(WRONG, replace(WRONG, target=2))))
    assert in_one_attempt.run().exit_code == EXIT_DONE
    cluster = SimCluster(replace(PLAN, checkpoint_every=1, faults=(WRONG, WRONG)))
    outcome = cluster.run()
    assert outcome.exit_code == EXIT_FAILED
    assert "had kept nothing" in outcome.why
    saved = [event.step for event in cluster.world.journal.events if isinstance(event, ev.CheckpointSaved)]
    assert saved[-1] == 1


@pytest.mark.parametrize("places", [2, 4])
@pytest.mark.parametrize("target", range(4))
def test_a_wrong_gradient_at_any_local_rank_is_refused(places: int, target: int) -> None:
    """This also holds at local ranks that do not count their own samples."""
    plan = FaultPlan(seed=7, nodes=2, start_nodes=2, workers_per_node=places, places=places, steps=3, start_spread=0.0)
    cluster = SimCluster(replace(plan, faults=(replace(WRONG, target=target),)))
    assert cluster.run().exit_code == EXIT_DONE
    assert refusals(cluster) == [2]
