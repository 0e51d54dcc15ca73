"""Losses of GPU time by cause: the parts that CETT leaves out (sparing paper, Eq. 2)."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from holdfast.planner.reliability.sparing.case import SparingCase, placed_share
from holdfast.planner.reliability.sparing.evaluation import StrategyGoodput, block_pool
from holdfast.planning.special import FloatArray


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Losses:
    """Shares of all GPU time, arrays of the case's shape; with CETT they sum to 1."""

    spare_trays: FloatArray
    spare_blocks: FloatArray
    stranded_blocks: FloatArray
    blocked: FloatArray
    checkpoint_saving: FloatArray
    lost_work: FloatArray
    restart: FloatArray

    def items(self) -> list[tuple[str, FloatArray]]:
        """Return (name, share), in the order of the fields."""
        return [(field.name, getattr(self, field.name)) for field in fields(self)]


def losses(case: SparingCase, outcome: StrategyGoodput) -> Losses:
    """Return the causes of the share 1 - CETT.

    Without checkpoints (elastic recovery), the only cost of failures is down time, which counts as `restart`.
    """
    strategy = outcome.strategy
    working_trays = strategy.working_gpus / strategy.block_gpus
    pool = block_pool(case, strategy, outcome.block_mtbf_hours)
    placed = placed_share(case.placement, strategy)
    in_use = working_trays * (outcome.blocks - outcome.spare_blocks) / outcome.blocks
    working = in_use * placed
    running = working * (1.0 - outcome.beta)
    times = case.recovery.period_times(pool, outcome.spare_blocks)
    wasted = running * outcome.gamma
    if times is None:
        saving, lost, restart = np.zeros_like(wasted), np.zeros_like(wasted), wasted
    else:
        saving, lost, restart = _split(wasted, times.save, times.lost_work, times.restart)
    return Losses(
        spare_trays=np.full(np.shape(working), 1.0 - working_trays),
        spare_blocks=working_trays * (outcome.spare_blocks - outcome.stranded_blocks) / outcome.blocks,
        stranded_blocks=working_trays * outcome.stranded_blocks / outcome.blocks + in_use * (1.0 - placed),
        blocked=working * outcome.beta,
        checkpoint_saving=saving,
        lost_work=lost,
        restart=restart,
    )


def _split(
    wasted: FloatArray, save: FloatArray, lost_work: FloatArray, restart: FloatArray
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Divide the `wasted` time into saving, lost work and restarts, in proportion to the three other arguments.

    If these overflow, all of it is lost work.
    """
    # If no period ever completes, the times overflow. All time then counts as lost work.
    overhead = save + lost_work + restart
    hopeless = ~np.isfinite(overhead)
    safe = np.where(hopeless | (overhead == 0.0), 1.0, overhead)
    saving = np.where(hopeless, 0.0, wasted * save / safe)
    restarting = np.where(hopeless, 0.0, wasted * np.where(hopeless, 0.0, restart) / safe)
    return saving, wasted - saving - restarting, restarting
