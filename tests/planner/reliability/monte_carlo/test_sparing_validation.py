"""Figure 6: one zone of 1,024 racks. The simulation is within 1 % of the closed form, for one and for two repair
processes.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from holdfast.planner.reliability.monte_carlo.estimate import SimulationSettings
from holdfast.planner.reliability.monte_carlo.validation import compare, compare_repair_mixes
from holdfast.planner.reliability.sparing.case import SparingCase, SparingStrategy
from holdfast.planner.reliability.sparing.reference import catalina

SETTINGS = SimulationSettings(replications=8, hours=4380.0, seed=5)
STRATEGIES = [SparingStrategy(block_gpus=72, spare_gpus=0), SparingStrategy(block_gpus=72, spare_gpus=8)]


@pytest.fixture
def figure_6() -> SparingCase:
    case = catalina()
    one_zone = replace(case.cluster, zones=1, racks_per_zone=1024)
    return replace(case, cluster=one_zone, placement=None, strategies=tuple(STRATEGIES))


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: strategy.label)
def test_two_repair_processes_stay_within_one_percent(figure_6: SparingCase, strategy: SparingStrategy) -> None:
    rows = compare_repair_mixes(
        figure_6, strategy, SETTINGS, epsilons=(0.0, 0.5, 1.0), mttr_auto_hours=1.0, mttr_ticket_hours=48.0
    )
    for row in rows:
        assert abs(row.gap) < 0.01, row
        assert row.cett.contains(row.closed_form), row


def test_composite_repair_stays_within_one_percent_and_a_running_clock_does_not(figure_6: SparingCase) -> None:
    for row in compare(figure_6, SETTINGS):
        if row.assumptions in ("as the closed form", "racks once"):  # With one block per rack, both are the same.
            assert abs(row.gap) < 0.01, row
            assert row.cett.contains(row.closed_form), row
        else:
            # The frozen clock hides these 1.7 to 2 % (errata).
            assert -0.025 < row.gap < -0.012, row
