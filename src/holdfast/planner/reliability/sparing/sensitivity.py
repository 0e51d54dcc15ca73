"""The best strategy at each point of the MTBF-MTTR plane: sparing paper, section 4.3.

Axes: T repair times, M times between failures.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from holdfast.planner.reliability.sparing.case import SparingCase, SparingStrategy, scaled_failures
from holdfast.planner.reliability.sparing.evaluation import HOPELESS_GPUS, evaluate
from holdfast.planning.special import BoolArray, FloatArray, IntArray


@dataclass(frozen=True, kw_only=True, slots=True)
class Scenario:
    """The effects that a map of the best sparing strategy includes."""

    name: str
    model: bool
    hardware: bool
    placement: bool


#: Figures 2-5 of the paper, in order.
SCENARIOS = (
    Scenario(name="no gains, no placement", model=False, hardware=False, placement=False),
    Scenario(name="model gain", model=True, hardware=False, placement=False),
    Scenario(name="model and hardware gain", model=True, hardware=True, placement=False),
    Scenario(name="both gains and placement", model=True, hardware=True, placement=True),
)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SensitivityMap:
    """The best strategy over a grid; rows follow MTTR, columns tray MTBF."""

    scenario: Scenario
    strategies: tuple[SparingStrategy, ...]
    #: shape (M,)
    mtbf_tray_hours: FloatArray
    #: shape (T,)
    mttr_hours: FloatArray
    #: shape (strategies, T, M)
    goodput_gpus: FloatArray

    @property
    def best(self) -> IntArray:
        """Index of the best strategy, or the first of several, (T, M)."""
        return np.argmax(self.goodput_gpus, axis=0)

    @property
    def hopeless(self) -> BoolArray:
        """Whether no strategy has any goodput, (T, M)."""
        return self.goodput_gpus.max(axis=0) < HOPELESS_GPUS

    @property
    def shares(self) -> FloatArray:
        """Share of the grid's points at which each strategy is best, (strategies,). Hopeless points count for none."""
        counts = np.bincount(self.best[~self.hopeless], minlength=len(self.strategies))
        return counts / self.best.size


def _varied(strategy: SparingStrategy, scenario: Scenario) -> SparingStrategy:
    return replace(strategy, spare_blocks=None, hardware_gain=strategy.hardware_gain if scenario.hardware else None)


def sensitivity_map(
    case: SparingCase, scenario: Scenario, mtbf_tray_hours: FloatArray, mttr_hours: FloatArray
) -> SensitivityMap:
    """Return the map of `scenario` over a grid of tray MTBFs (M,) and MTTRs (T,), in hours.

    The case's placement, hardware and model only count if the scenario includes them. The rack MTBF keeps its ratio to
    the tray's. Each point has its own best number of spare blocks, even if a strategy of the case gives a number: that
    number was chosen for one point.
    """
    mtbf, mttr = np.meshgrid(mtbf_tray_hours, mttr_hours)
    varied = replace(
        case,
        failures=scaled_failures(case.failures, mtbf, mttr),
        strategies=tuple(_varied(strategy, scenario) for strategy in case.strategies),
        placement=case.placement if scenario.placement else None,
        hardware=case.hardware if scenario.hardware else None,
        model=case.model if scenario.model else None,
    )
    return SensitivityMap(
        scenario=scenario,
        strategies=varied.strategies,
        mtbf_tray_hours=mtbf_tray_hours,
        mttr_hours=mttr_hours,
        goodput_gpus=evaluate(varied).goodput_gpus,
    )
