"""Schedules with only non-finite gradients after some step: the job fails with its last good step saved."""

from __future__ import annotations

from dataclasses import replace

import pytest

from holdfast.errors import EXIT_FAILED
from holdfast.protocol import events as ev
from tests.simulation.cluster import SimCluster
from tests.simulation.faults.plans import Fault, FaultKind, FaultPlan
from tests.simulation.schedules.enumeration import FIRST_SKIPPING_SEED, plan_of
from tests.simulation.schedules.shrinking import failure

SCHEDULES = 100
PLAN = FaultPlan(seed=5, steps=9, start_spread=0.0, skips_from=4, max_skipped=3, checkpoint_every=100)


def test_random_schedules() -> None:
    failed = 0
    for seed in range(FIRST_SKIPPING_SEED, FIRST_SKIPPING_SEED + SCHEDULES):
        cluster = SimCluster(plan_of(seed))
        assert not failure(cluster), f"python -m tests.simulation replay {seed}"
        failed += any(isinstance(event, ev.JobFailed) for event in cluster.world.journal.events)
    assert failed > SCHEDULES / 4, "too few schedules reach the limit of skipped steps"


@pytest.mark.parametrize("every", [100, 1])
def test_the_newest_checkpoint_is_of_the_last_good_step(every: int) -> None:
    """This also holds if each step is saved; skipped steps are not saved."""
    cluster = SimCluster(replace(PLAN, checkpoint_every=every))
    assert cluster.run().exit_code == EXIT_FAILED
    events = cluster.world.journal.events
    assert [event.step for event in events if isinstance(event, ev.CheckpointSaved)][-1] == 3
    assert [event.step for event in events if isinstance(event, ev.StepCommitted)][-1] == 6


def test_a_failure_between_skipped_steps_does_not_end_their_row() -> None:
    dies = Fault(kind=FaultKind.KILL_NODE, boundary="reducing", step=5, target=2)
    cluster = SimCluster(replace(PLAN, faults=(dies,)))
    assert cluster.run().exit_code == EXIT_FAILED
    (failed,) = [event for event in cluster.world.journal.events if isinstance(event, ev.JobFailed)]
    assert "3 steps in a row" in failed.why
    assert "the last good step is 3" in failed.why


@pytest.mark.parametrize("seed", [36299994086, 36686393424])
def test_too_many_skipped_steps_fail_a_loop_that_ends_at_a_swap(seed: int) -> None:
    """Its members never entered the last generation, so the skipped steps were not counted."""
    outcome = SimCluster(plan_of(seed)).run()
    assert outcome.exit_code == EXIT_FAILED, f"python -m tests.simulation replay {seed}"
    assert "in a row were skipped" in outcome.why


@pytest.mark.parametrize("seed", [36799543111])
def test_a_loop_of_short_steps_may_end_before_the_skipped_steps_are_counted(seed: int) -> None:
    """A finished simulated loop does not wait for the checkpoint of the last good step."""
    assert SimCluster(plan_of(seed)).run().exit_code == EXIT_FAILED
