"""The FLOP of a round are reported at most once and correctly, despite failures."""

from __future__ import annotations

from dataclasses import replace

from holdfast.protocol import events as ev
from tests.simulation.cluster import SimCluster
from tests.simulation.families.storm_plans import ready_plan
from tests.simulation.machines.training import FLOP_PER_SAMPLE
from tests.simulation.schedules.enumeration import FIRST_READY_SEED, FIRST_WIDE_SEED, plan_of
from tests.simulation.schedules.shrinking import failure

SCHEDULES = 12


def test_flop_are_emitted_at_most_once_and_are_the_ranks_counts() -> None:
    plans = [ready_plan(seed) for seed in range(FIRST_READY_SEED, FIRST_READY_SEED + SCHEDULES)]
    plans += [plan_of(seed) for seed in range(FIRST_WIDE_SEED, FIRST_WIDE_SEED + SCHEDULES)]
    known = 0
    for plan in plans:
        cluster = SimCluster(replace(plan, counts_flop=True))
        assert failure(cluster) == "", f"seed {plan.seed}"
        counted = [event for event in cluster.world.journal.events if isinstance(event, ev.FlopCounted)]
        assert [event.flop_per_sample for event in counted] in ([], [FLOP_PER_SAMPLE]), f"seed {plan.seed}"
        known += len(counted)
    assert known > SCHEDULES
