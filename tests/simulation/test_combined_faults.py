"""Replica groups of several workers with the faults of other families, including schedules that once failed."""

from __future__ import annotations

import pytest

from tests.simulation.cluster import run_plan
from tests.simulation.families.combined_plans import combined_plan
from tests.simulation.faults.plans import FaultKind
from tests.simulation.schedules.enumeration import FIRST_COMBINED_SEED, family_of, plan_of

SCHEDULES = 60


@pytest.mark.parametrize(
    "seed",
    [
        # Deadlock: a node drained in the decision that finishes the last step had not applied that step. It blocked the
        # commit, the other nodes waited for the commit to accept their checkpoint, and the node waited for them.
        35_000_004_783,
        # A wrong gradient at a local rank other than 0 was committed, or refused by the wrong node.
        35_000_000_163,
        35_000_000_169,
        # These were stuck or failed before other faults were fixed.
        35_000_004_972,
        35_000_005_565,
        # A sample that no node can compute went to the same node after each rollback, until that node was excluded.
        35_104_630_457,
    ],
)
def test_a_schedule_that_failed_holds(seed: int) -> None:
    run_plan(plan_of(seed))


@pytest.mark.parametrize("chunk", range(4))
def test_combined_schedules_hold(chunk: int) -> None:
    for number in range(chunk * SCHEDULES // 4, (chunk + 1) * SCHEDULES // 4):
        seed = FIRST_COMBINED_SEED + 1_000_000 + number
        try:
            run_plan(plan_of(seed))
        except Exception as error:
            raise AssertionError(f"schedule {seed} failed: python -m tests.simulation replay {seed}") from error


def test_combined_plans_have_replica_groups_and_every_kind_of_fault() -> None:
    plans = [combined_plan(FIRST_COMBINED_SEED + number) for number in range(600)]
    assert family_of(plans[0].seed) == "combined"
    assert all(plan.places > 1 or plan.layouts for plan in plans)
    seen = {fault.kind for plan in plans for fault in plan.faults}
    wanted = {FaultKind.MOVE, FaultKind.DRAIN, FaultKind.NOTICE, FaultKind.CORRUPT_SUM, FaultKind.FLIP}
    assert wanted | {FaultKind.KILL_WORKERS, FaultKind.LINK_DOWN, FaultKind.SLOW_STORE, FaultKind.INTERRUPT} <= seen
    assert any(plan.pooled for plan in plans)
    assert any(plan.standbys for plan in plans)
    assert any(plan.crashes for plan in plans)
    assert any(plan.stops_at for plan in plans)
    assert not any(
        plan.restart and FaultKind.PARTITION_FOR_GOOD in {fault.kind for fault in plan.faults} for plan in plans
    )
