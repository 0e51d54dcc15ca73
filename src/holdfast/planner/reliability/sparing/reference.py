"""The sparing paper's production case (section 4.1) and its statements (section 4.3), for comparison.

Axes: T repair times, M times between failures.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from holdfast.planner.reliability.sparing.case import (
    Cluster,
    FailureModel,
    Hardware,
    Model,
    Placement,
    SparingCase,
    SparingStrategy,
)
from holdfast.planner.reliability.sparing.recovery import Checkpoint, Synchronous
from holdfast.planner.reliability.sparing.sensitivity import SensitivityMap
from holdfast.planning.special import BoolArray


def catalina() -> SparingCase:
    """Return 4 zones of 256 racks with 72 GPUs, 2 per tray, and the six strategies of Table 1.

    The paper does not print alpha. Its rounded model gains fit 0.206 best.
    """
    return SparingCase(
        cluster=Cluster(zones=4, racks_per_zone=256, gpus_per_rack=72, gpus_per_tray=2),
        failures=FailureModel(mtbf_tray_hours=20_000.0, mtbf_rack_hours=10_000.0, mttr_hours=24.0),
        recovery=Synchronous(
            checkpoint=Checkpoint(period_seconds=250.0, save_seconds=0.05, detect_seconds=60.0, restart_seconds=360.0)
        ),
        placement=Placement(group_gpus=2304),
        hardware=Hardware(spare_gpus_per_rack=8, power_limit_ratio=1.09, gain=1.034),
        model=Model(alpha=0.206, baseline_tensor_parallel=16),
        strategies=tuple(
            SparingStrategy(block_gpus=block, spare_gpus=spare)
            for block, spare in ((72, 0), (72, 8), (36, 0), (36, 4), (18, 0), (18, 2))
        ),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Statement:
    """The best strategies in a part of the plane, as section 4.3 states for one of Figures 2-5.

    The paper's axes are not legible in our text, so the parts are ours, found on the plane of 1e3..1e5 h tray MTBF and
    0.1..100 h MTTR. The size of a part depends on the axes: Figure 2's statement on small blocks holds on a quarter of
    the plane with logarithmic axes, and on most of it with linear ones.
    """

    figure: int
    text: str
    #: labels of the strategies that are best there
    winners: frozenset[str]
    mtbf_tray_hours: tuple[float, float] = (0.0, math.inf)
    mttr_hours: tuple[float, float] = (0.0, math.inf)

    def holds(self, one: SensitivityMap) -> BoolArray:
        """Return the points at which one of the winners is best, (T, M)."""
        winners = [index for index, strategy in enumerate(one.strategies) if strategy.label in self.winners]
        return np.isin(one.best, winners)

    def part(self, one: SensitivityMap) -> BoolArray:
        """Return which points of the map the statement is about, (T, M), by its ranges of MTTR and tray MTBF."""
        mtbf, mttr = np.meshgrid(one.mtbf_tray_hours, one.mttr_hours)
        inside = (mtbf >= self.mtbf_tray_hours[0]) & (mtbf <= self.mtbf_tray_hours[1])
        return inside & (mttr >= self.mttr_hours[0]) & (mttr <= self.mttr_hours[1])


STATEMENTS = (
    Statement(
        figure=2,
        text="blocks of 36 and 18 GPUs without spare trays dominate",
        winners=frozenset({"36/36", "18/18"}),
        mtbf_tray_hours=(2e4, math.inf),
        mttr_hours=(10.0, math.inf),
    ),
    Statement(
        figure=2,
        text="72/72 is best at very short repair times",
        winners=frozenset({"72/72"}),
        mttr_hours=(0.0, 0.35),
    ),
    Statement(
        figure=2,
        text="72/64 is best at very low MTBF",
        winners=frozenset({"72/64"}),
        mtbf_tray_hours=(0.0, 6e3),
        mttr_hours=(60.0, math.inf),
    ),
    Statement(
        figure=3,
        text="blocks of 72 GPUs dominate",
        winners=frozenset({"72/72", "72/64"}),
    ),
    Statement(
        figure=3,
        text="72/72 is best at high reliability and short repairs",
        winners=frozenset({"72/72"}),
        mtbf_tray_hours=(1e4, math.inf),
        mttr_hours=(0.0, 10.0),
    ),
    Statement(
        figure=3,
        text="72/64 is best at low reliability and long repairs",
        winners=frozenset({"72/64"}),
        mtbf_tray_hours=(0.0, 1e4),
        mttr_hours=(60.0, math.inf),
    ),
    Statement(
        figure=3,
        text="yet 72/72 is best at very low MTBF and short repairs",
        winners=frozenset({"72/72"}),
        mtbf_tray_hours=(0.0, 2e3),
        mttr_hours=(0.0, 10.0),
    ),
    Statement(figure=5, text="72/64 dominates the entire region", winners=frozenset({"72/64"})),
)
