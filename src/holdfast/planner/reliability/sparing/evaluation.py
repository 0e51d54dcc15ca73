"""Goodput of every strategy of a case: sparing paper, Eq. 1 and 7, with the errata."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from holdfast.planner.reliability.sparing.block_mtbf import block_mtbf, interruption_rate
from holdfast.planner.reliability.sparing.blocking import block_unavailability, zone_blocked_probability
from holdfast.planner.reliability.sparing.case import (
    SparingCase,
    SparingStrategy,
    blocks_per_zone,
    group_blocks,
    placed_share,
)
from holdfast.planner.reliability.sparing.gains import model_gain
from holdfast.planner.reliability.sparing.recovery import BlockPool, RackFailures
from holdfast.planner.reliability.sparing.spare_search import best_placed_spare_blocks, best_spare_blocks
from holdfast.planning.special import FloatArray, IntArray

#: A goodput below one GPU counts as none.
HOPELESS_GPUS = 1.0


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StrategyGoodput:
    """One strategy's goodput and its factors.

    Array fields have the broadcast shape of the case's failures and checkpoint times: () for plain numbers.
    """

    strategy: SparingStrategy
    #: L
    blocks: int
    #: R per zone, stranded blocks included
    spare_blocks: IntArray
    #: max(0, R - the best R for P = 1)
    stranded_blocks: IntArray
    block_mtbf_hours: FloatArray
    #: Pr(blocked) of one zone, Eq. 4
    p_blocked: FloatArray
    beta: FloatArray
    gamma: FloatArray
    cett: FloatArray
    hardware_gain: float
    model_gain: float
    goodput_gpus: FloatArray


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Evaluation:
    """All strategies of a case, in its order."""

    strategies: tuple[StrategyGoodput, ...]

    @property
    def goodput_gpus(self) -> FloatArray:
        """Goodput, (strategies, ...)."""
        return np.stack(np.broadcast_arrays(*(outcome.goodput_gpus for outcome in self.strategies)))

    @property
    def best(self) -> IntArray:
        """Index of the strategy with most goodput, or the first of several. Its shape is that of the case's arrays."""
        return np.argmax(self.goodput_gpus, axis=0)


def evaluate(case: SparingCase) -> Evaluation:
    """Return the goodput of every strategy. A strategy without a number of spare blocks gets the best one."""
    return Evaluation(strategies=tuple(evaluate_strategy(case, strategy) for strategy in case.strategies))


def evaluate_strategy(case: SparingCase, strategy: SparingStrategy) -> StrategyGoodput:
    """Return one strategy's goodput (Eq. 1), from unrounded factors, and the factors.

    The number of spare blocks is the strategy's, or else the best one that leaves whole placement groups.
    """
    mtbf = strategy_block_mtbf(case, strategy)
    pool = block_pool(case, strategy, mtbf)
    unplaced = best_spare_blocks(case.recovery, pool)
    if strategy.spare_blocks is None:
        spares = best_placed_spare_blocks(case.recovery, pool, unplaced)
    else:
        spares = np.full(unplaced.shape, strategy.spare_blocks, dtype=np.int64)
    beta, gamma = case.recovery.beta(pool, spares), case.recovery.gamma(pool, spares)
    working_share = strategy.working_gpus / strategy.block_gpus * (pool.blocks - spares) / pool.blocks
    working_share *= placed_share(case.placement, strategy)
    cett = working_share * (1.0 - beta) * (1.0 - gamma)
    hardware, model = strategy_gains(case, strategy)
    return StrategyGoodput(
        strategy=strategy,
        blocks=pool.blocks,
        spare_blocks=spares,
        stranded_blocks=np.maximum(0, spares - unplaced),
        block_mtbf_hours=mtbf,
        p_blocked=zone_blocked_probability(pool.blocks, spares, pool.unavailability),
        beta=beta,
        gamma=gamma,
        cett=cett,
        hardware_gain=hardware,
        model_gain=model,
        goodput_gpus=case.cluster.gpus * cett * hardware * model,
    )


def strategy_block_mtbf(case: SparingCase, strategy: SparingStrategy) -> FloatArray:
    """Return Eq. 3 for a strategy's blocks, in hours."""
    return block_mtbf(
        mtbf_tray=case.failures.mtbf_tray_hours,
        mtbf_rack=case.failures.mtbf_rack_hours,
        mttr=case.failures.mttr_hours,
        trays=strategy.block_gpus // case.cluster.gpus_per_tray,
        spare_trays=strategy.spare_gpus // case.cluster.gpus_per_tray,
        repair_chain=case.failures.repair_chain,
    )


def block_pool(case: SparingCase, strategy: SparingStrategy, block_mtbf_hours: FloatArray) -> BlockPool:
    """Return a strategy's blocks in the form that recovery schemes use."""
    per_rack = case.cluster.gpus_per_rack // strategy.block_gpus
    return BlockPool(
        zones=case.cluster.zones,
        blocks=blocks_per_zone(case.cluster, strategy),
        group_blocks=group_blocks(case.placement, strategy),
        unavailability=block_unavailability(block_mtbf_hours, case.failures.mttr_hours),
        interruptions_per_hour=interruption_rate(
            mtbf_tray=case.failures.mtbf_tray_hours,
            mtbf_rack=case.failures.mtbf_rack_hours,
            working_trays=strategy.working_gpus // case.cluster.gpus_per_tray,
            blocks_sharing_rack_failures=per_rack if case.failures.rack_failures is RackFailures.PER_RACK else 1,
        ),
    )


def strategy_gains(case: SparingCase, strategy: SparingStrategy) -> tuple[float, float]:
    """Return (hardware gain, model gain). The first is the strategy's own, or else that of the case's hardware.

    Without either, or hardware but no spare GPUs, it is 1. The model gain is 1 without a model.
    """
    hardware = 1.0
    if strategy.hardware_gain is not None:
        hardware = strategy.hardware_gain
    elif case.hardware is not None and strategy.spare_gpus:
        hardware = case.hardware.gain_of(strategy, case.cluster.gpus_per_rack)
    if case.model is None:
        return hardware, 1.0
    gain = model_gain(
        tensor_parallel=strategy.working_gpus,
        baseline=case.model.baseline_tensor_parallel,
        alpha=case.model.alpha,
    )
    return hardware, float(gain)
