"""Monte Carlo estimates of a strategy's CETT, with confidence intervals, for comparison with the closed form.

Axes: N replications.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from holdfast.errors import BadInputError
from holdfast.planner.reliability.distributions import Distribution, Exponential, RateProfile, Scaled
from holdfast.planner.reliability.monte_carlo.fleet import Fleet, simulate_fleet
from holdfast.planner.reliability.monte_carlo.job import simulate_job
from holdfast.planner.reliability.sparing.case import SparingCase, SparingStrategy, blocks_per_zone, placed_share
from holdfast.planner.reliability.sparing.recovery import Checkpoint, RackFailures, Synchronous
from holdfast.planning.special import (
    FloatArray,
    as_floats,
    require_finite,
    require_not_negative,
    require_positive,
    student_quantile,
)

#: More replications would take days.
MOST_REPLICATIONS = 100_000
#: Failures simulated at the same time. More replications are run in turns, to bound memory.
FAILURES_AT_ONCE = 3e6
#: Failures in one replication. More are refused: they would take minutes and gigabytes.
MOST_FAILURES = 2e7


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulationSettings:
    """Length and number of simulations. The same seed gives the same result."""

    replications: int = 100
    hours: float = 8760.0
    seed: int = 0
    #: hours that are simulated but not counted, so that the initial state has no effect; None for 10 mean repairs
    warmup_hours: float | None = None

    def __post_init__(self) -> None:
        """Raise `BadInputError` for too few or many replications, hours of 0 or infinite, or a negative seed."""
        if self.replications < 2:
            raise BadInputError(f"replications = {self.replications}: must be 2 or more, to give a confidence interval")
        if self.replications > MOST_REPLICATIONS:
            raise BadInputError(f"replications = {self.replications}: must be at most {MOST_REPLICATIONS:,}")
        require_positive("hours", self.hours)
        require_finite("hours", self.hours)
        require_not_negative("seed", self.seed)


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """A mean over replications and its confidence interval."""

    mean: float
    low: float
    high: float

    def contains(self, value: float) -> bool:
        """Whether `value` lies within the interval."""
        return self.low <= value <= self.high


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SimulatedStrategy:
    """The results of one strategy, with one value per replication, (N,)."""

    cett: FloatArray
    beta: FloatArray
    gamma: FloatArray
    #: blocks leaving production, per block-hour in production
    block_failure_rate: FloatArray


def estimate(values: FloatArray, confidence: float = 0.99) -> Estimate:
    """Return the mean of independent `values` (N,) with Student's interval, which has zero width if all are equal."""
    mean, spread = float(values.mean()), float(values.std(ddof=1))
    half = student_quantile(0.5 + confidence / 2.0, values.size - 1) * spread / math.sqrt(values.size)
    return Estimate(mean=mean, low=mean - half, high=mean + half)


def simulate_strategy(
    case: SparingCase,
    strategy: SparingStrategy,
    spare_blocks: int,
    settings: SimulationSettings,
    *,
    repairs: Distribution | None = None,
    failure_gaps: Distribution | None = None,
    timeline: RateProfile | None = None,
) -> SimulatedStrategy:
    """Return CETT, beta, gamma and the block failure rate of each replication, with `spare_blocks` spare blocks per
    zone.

    Args:
        case: plain numbers only. Its `rack_failures` and its checkpoint's `clock` choose between the assumptions of the
            closed form and more realistic ones.
        strategy: the blocks.
        spare_blocks: R.
        settings: length and number of simulations.
        repairs: hours of a repair, or None for exponential repairs with the case's MTTR.
        failure_gaps: the shape of the gaps between the fleet's tray failures, stretched to the case's rate, or None for
            exponential gaps.
        timeline: how the rate of tray failures varies over time, or None for a constant rate.

    Raises:
        BadInputError: the recovery scheme is not the synchronous one, or there are too many failures to simulate.
    """
    checkpoint = synchronous_checkpoint(case)
    fleet = _fleet(case, strategy, repairs, failure_gaps, timeline)
    warmup = warmup_of(fleet, settings)
    parts = [
        _simulate_part(fleet, checkpoint, spare_blocks, rng, size, warmup, settings.hours)
        for rng, size in in_turns(fleet, settings, warmup)
    ]
    blocked, useful, failures, up = (np.concatenate(column) for column in zip(*parts, strict=True))
    working = strategy.working_gpus / strategy.block_gpus * (1.0 - spare_blocks / fleet.blocks)
    working *= placed_share(case.placement, strategy)
    return SimulatedStrategy(
        cett=working * useful / settings.hours,
        beta=blocked / settings.hours,
        gamma=1.0 - useful / np.maximum(settings.hours - blocked, np.finfo(float).tiny),
        block_failure_rate=failures / up,
    )


def warmup_of(fleet: Fleet, settings: SimulationSettings) -> float:
    """Return the hours that are simulated before counting starts."""
    return 10.0 * fleet.repairs.mean if settings.warmup_hours is None else settings.warmup_hours


def in_turns(fleet: Fleet, settings: SimulationSettings, warmup: float) -> Iterator[tuple[np.random.Generator, int]]:
    """Yield the replications in turns that fit into memory: a random generator, and the number of replications.

    Raises:
        BadInputError: there are too many failures to simulate.
    """
    rate = 1.0 / fleet.tray_failure_gaps.mean + fleet.all_blocks / fleet.mtbf_rack_hours
    expected = rate * (warmup + settings.hours)
    if expected > MOST_FAILURES:
        raise BadInputError(
            f"hours = {settings.hours:g}: brings {expected:.1g} failures per replication, "
            f"more than the {MOST_FAILURES:.0e} that can be simulated: simulate fewer hours"
        )
    at_once = max(1, min(settings.replications, int(FAILURES_AT_ONCE / max(expected, 1.0))))
    sizes = [at_once] * (settings.replications // at_once)
    if settings.replications % at_once:
        sizes.append(settings.replications % at_once)
    for size, seed in zip(sizes, np.random.SeedSequence(settings.seed).spawn(len(sizes)), strict=True):
        yield np.random.default_rng(seed), size


def synchronous_checkpoint(case: SparingCase) -> Checkpoint:
    """Return the checkpoint times of a synchronous case. Only this scheme can be simulated.

    Raises:
        BadInputError: the case has another recovery scheme.
    """
    if not isinstance(case.recovery, Synchronous):
        raise BadInputError('recovery.scheme: only "synchronous" can be simulated')
    return case.recovery.checkpoint


def _fleet(
    case: SparingCase,
    strategy: SparingStrategy,
    repairs: Distribution | None,
    failure_gaps: Distribution | None,
    timeline: RateProfile | None,
) -> Fleet:
    """Return the fleet to simulate for a strategy. None for a distribution means exponential, with the case's mean.

    Given gaps are stretched to the case's rate. The blocks of a rack fail together only if `rack_failures` is
    `PER_RACK`.
    """
    trays, blocks = strategy.block_gpus // case.cluster.gpus_per_tray, blocks_per_zone(case.cluster, strategy)
    gap = float(as_floats(case.failures.mtbf_tray_hours)) / (trays * blocks * case.cluster.zones)
    shares_rack = case.failures.rack_failures is RackFailures.PER_RACK
    return Fleet(
        zones=case.cluster.zones,
        blocks=blocks,
        trays=trays,
        spare_trays=strategy.spare_gpus // case.cluster.gpus_per_tray,
        blocks_per_rack=case.cluster.gpus_per_rack // strategy.block_gpus if shares_rack else 1,
        timeline=timeline,
        tray_failure_gaps=Exponential(gap) if failure_gaps is None else Scaled(shape=failure_gaps, mean=gap),
        mtbf_rack_hours=float(as_floats(case.failures.mtbf_rack_hours)),
        repairs=Exponential(float(as_floats(case.failures.mttr_hours))) if repairs is None else repairs,
        repair_chain=case.failures.repair_chain,
    )


def _simulate_part(
    fleet: Fleet,
    checkpoint: Checkpoint,
    spare_blocks: int,
    rng: np.random.Generator,
    replications: int,
    warmup: float,
    hours: float,
) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
    """Return (hours blocked, useful hours, block failures, block-hours in production), each (replications,)."""
    history = simulate_fleet(fleet, rng, replications, warmup + hours)
    job = simulate_job(
        history,
        checkpoint,
        zones=fleet.zones,
        blocks=fleet.blocks,
        spare_blocks=spare_blocks,
        replications=replications,
        warmup_hours=warmup,
        hours=hours,
    )
    start, end = np.maximum(history.outage_start, warmup), np.minimum(history.outage_end, warmup + hours)
    out = np.bincount(history.outage_replication, weights=np.maximum(end - start, 0.0), minlength=replications)
    inside = history.outage_replication[history.outage_start >= warmup]
    failures = np.bincount(inside, minlength=replications).astype(np.float64)
    return job.blocked, job.useful, failures, np.asarray(fleet.all_blocks * hours - out, dtype=np.float64)
