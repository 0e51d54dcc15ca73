"""The cost of a failure under three recovery schemes, behind one interface.

A scheme returns two numbers, for any number R of spare blocks per zone. beta is the share of the working blocks' time
that is lost because blocks are missing. gamma is the share of the rest that is lost to failures. CETT is then (K-I)/K
(L-R)/L (1-beta) (1-gamma) for each scheme (sparing paper, Eq. 7 as corrected).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import numpy as np

from holdfast.errors import BadInputError
from holdfast.planner.reliability.sparing.blocking import (
    job_blocked_probability,
    log_zone_free_probability,
    zone_blocked_probability,
)
from holdfast.planning.checkpointing import FailureClock, PeriodTimes, log_useful_fraction, period_times
from holdfast.planning.special import (
    FloatArray,
    Floats,
    IntArray,
    as_floats,
    require_not_negative,
    require_positive,
)

SECONDS_PER_HOUR = 3600.0


class RackFailures(StrEnum):
    """How often a rack failure is charged to the job (errata of the sparing paper, point 6)."""

    #: Each block of a rack is charged the rack's failures in full, as in the paper.
    PER_BLOCK = "per_block"
    #: One rack failure is one interruption, regardless of the rack's number of blocks.
    PER_RACK = "per_rack"


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockPool:
    """A strategy's blocks in the form that recovery schemes use. Arrays broadcast."""

    zones: int
    #: L, blocks per zone
    blocks: int
    #: P, blocks that must be in the same zone
    group_blocks: int
    #: share of time in which one block is out of production
    unavailability: FloatArray
    #: 1/MTBF_F: how often one working block interrupts the job, per hour
    interruptions_per_hour: FloatArray


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """Times of saving state and of a rollback. Seconds; arrays broadcast."""

    period_seconds: Floats
    save_seconds: Floats
    detect_seconds: Floats
    restart_seconds: Floats
    clock: FailureClock = FailureClock.FROZEN

    def __post_init__(self) -> None:
        """Raise `BadInputError` for a period of 0 or less, a negative time, or saving longer than the period."""
        require_positive("checkpoint.period_seconds", self.period_seconds)
        for key in ("save_seconds", "detect_seconds", "restart_seconds"):
            require_not_negative(f"checkpoint.{key}", getattr(self, key))
        longer = as_floats(self.save_seconds) > as_floats(self.period_seconds)
        if longer.any():
            save, period = (
                np.broadcast_to(each, longer.shape)[longer] for each in (self.save_seconds, self.period_seconds)
            )
            raise BadInputError(
                f"checkpoint.save_seconds = {save[0]:g}: must be at most period_seconds = {period[0]:g}"
            )

    def times(self, interruptions_per_hour: Floats) -> PeriodTimes:
        """Return how the seconds of a period are spent."""
        return period_times(
            rate=as_floats(interruptions_per_hour) / SECONDS_PER_HOUR,
            period=self.period_seconds,
            save=self.save_seconds,
            detect=self.detect_seconds,
            restart=self.restart_seconds,
            clock=self.clock,
        )

    def log_useful_fraction(self, interruptions_per_hour: Floats) -> FloatArray:
        """Return log(1 - gamma)."""
        return log_useful_fraction(
            rate=as_floats(interruptions_per_hour) / SECONDS_PER_HOUR,
            period=self.period_seconds,
            save=self.save_seconds,
            detect=self.detect_seconds,
            restart=self.restart_seconds,
            clock=self.clock,
        )


class RecoveryScheme(Protocol):
    """Beta and gamma of a recovery scheme. `spare_blocks` is R per zone, and broadcasts with the pool's arrays."""

    def beta(self, pool: BlockPool, spare_blocks: IntArray) -> FloatArray:
        """Return the share of working-block time lost because blocks are missing."""
        ...

    def gamma(self, pool: BlockPool, spare_blocks: IntArray) -> FloatArray:
        """Return the share of the remaining time that is lost to failures."""
        ...

    def log_yield(self, pool: BlockPool, spare_blocks: IntArray) -> FloatArray:
        """Return log((1 - beta) (1 - gamma)), for comparisons of spare counts. It may be -inf, but never NaN.

        With `log(L - R)` added it must have a single maximum over R.
        """
        ...

    def period_times(self, pool: BlockPool, spare_blocks: IntArray) -> PeriodTimes | None:
        """Return how a checkpoint period is spent, or None for a scheme without checkpoints."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Synchronous:
    """The paper's scheme: any failure rolls the job back, and any zone without enough blocks blocks the job."""

    checkpoint: Checkpoint

    def beta(self, pool: BlockPool, spare_blocks: IntArray) -> FloatArray:
        """Return the probability that the job is blocked, as it is if any zone has more than its spare blocks down."""
        blocked = zone_blocked_probability(pool.blocks, spare_blocks, pool.unavailability)
        return job_blocked_probability(blocked, pool.zones)

    def gamma(self, pool: BlockPool, spare_blocks: IntArray) -> FloatArray:
        return -np.expm1(self.checkpoint.log_useful_fraction(self._rate(pool, spare_blocks)))

    def log_yield(self, pool: BlockPool, spare_blocks: IntArray) -> FloatArray:
        """Return log((1 - beta) (1 - gamma)): no zone is blocked, and the time between failures is useful."""
        free = pool.zones * log_zone_free_probability(pool.blocks, spare_blocks, pool.unavailability)
        return free + self.checkpoint.log_useful_fraction(self._rate(pool, spare_blocks))

    def period_times(self, pool: BlockPool, spare_blocks: IntArray) -> PeriodTimes | None:
        return self.checkpoint.times(self._rate(pool, spare_blocks))

    def _rate(self, pool: BlockPool, spare_blocks: IntArray) -> FloatArray:
        return pool.interruptions_per_hour * (pool.blocks - as_floats(spare_blocks)) * pool.zones


@dataclass(frozen=True, kw_only=True, slots=True)
class SemiSynchronous:
    """Each zone is a replica that rolls back alone, and the zones average their models from time to time.

    A failure costs its own zone only. A zone without enough blocks drops out until it has enough. The job is blocked
    only while more than `loss_limit_zones` zones are out. Averaging is assumed to be free.
    """

    checkpoint: Checkpoint
    loss_limit_zones: int

    def __post_init__(self) -> None:
        require_not_negative("recovery.loss_limit_zones", self.loss_limit_zones)

    def beta(self, pool: BlockPool, spare_blocks: IntArray) -> FloatArray:
        """Return the mean share of zones that do not work: blocked ones, or all if more than the limit are blocked.

        A zone is blocked if more blocks than its `spare_blocks` are down.
        """
        blocked = zone_blocked_probability(pool.blocks, spare_blocks, pool.unavailability)
        if self.loss_limit_zones >= pool.zones:
            return blocked
        # E[(B - X)/B; X <= limit] over X ~ Binomial(B, p) is (1-p) Pr(Binomial(B-1, p) <= limit): fix one working
        # zone, and count the blocked zones among the others.
        others = zone_blocked_probability(pool.zones - 1, self.loss_limit_zones, blocked)
        return blocked + (1.0 - blocked) * others

    def gamma(self, pool: BlockPool, spare_blocks: IntArray) -> FloatArray:
        return -np.expm1(self.checkpoint.log_useful_fraction(self._rate(pool, spare_blocks)))

    def log_yield(self, pool: BlockPool, spare_blocks: IntArray) -> FloatArray:
        """Return log((1 - beta) (1 - gamma)): a zone works, few others are blocked, and its work is useful.

        Few is at most `loss_limit_zones`; this factor is left out if the limit covers all zones.
        """
        free = log_zone_free_probability(pool.blocks, spare_blocks, pool.unavailability)
        if self.loss_limit_zones < pool.zones:
            blocked = -np.expm1(free)
            free = free + log_zone_free_probability(pool.zones - 1, self.loss_limit_zones, blocked)
        return free + self.checkpoint.log_useful_fraction(self._rate(pool, spare_blocks))

    def period_times(self, pool: BlockPool, spare_blocks: IntArray) -> PeriodTimes | None:
        return self.checkpoint.times(self._rate(pool, spare_blocks))

    def _rate(self, pool: BlockPool, spare_blocks: IntArray) -> FloatArray:
        return pool.interruptions_per_hour * (pool.blocks - as_floats(spare_blocks))


@dataclass(frozen=True, kw_only=True, slots=True)
class Elastic:
    """No checkpoints: a failure stops the job for a fixed time, then it continues with the remaining blocks.

    A zone trains on min(L - R, blocks up) blocks, in complete placement groups. The job is never blocked.
    """

    down_seconds: Floats

    def __post_init__(self) -> None:
        require_not_negative("recovery.down_seconds", self.down_seconds)

    def beta(self, pool: BlockPool, spare_blocks: IntArray) -> FloatArray:
        """Return the mean share of a zone's working groups that are down because too few of its blocks are up."""
        # E[k groups at work] is the sum over g of Pr(at least g groups are up), each a binomial tail.
        groups = (pool.blocks - np.asarray(spare_blocks)) // pool.group_blocks
        lost = np.zeros(np.broadcast_shapes(groups.shape, pool.unavailability.shape))
        at_once = max(1, 1_000_000 // lost.size)
        most = int(np.max(groups))
        for first in range(1, most + 1, at_once):
            g = np.arange(first, min(first + at_once, most + 1)).reshape(-1, *[1] * lost.ndim)
            missing = zone_blocked_probability(pool.blocks, pool.blocks - g * pool.group_blocks, pool.unavailability)
            lost = lost + np.where(g <= groups, missing, 0.0).sum(axis=0)
        return lost / groups

    def gamma(self, pool: BlockPool, spare_blocks: IntArray) -> FloatArray:
        """Return the share of time in which the job is down, `down_seconds` after each failure."""
        stopped = self._rate(pool, spare_blocks) * as_floats(self.down_seconds) / SECONDS_PER_HOUR
        return stopped / (1.0 + stopped)

    def log_yield(self, pool: BlockPool, spare_blocks: IntArray) -> FloatArray:
        """Return log((1 - beta) (1 - gamma)), -inf if either is 1."""
        with np.errstate(divide="ignore"):
            return np.log1p(-self.beta(pool, spare_blocks)) + np.log1p(-self.gamma(pool, spare_blocks))

    def period_times(self, pool: BlockPool, spare_blocks: IntArray) -> PeriodTimes | None:
        return None

    def _rate(self, pool: BlockPool, spare_blocks: IntArray) -> FloatArray:
        """Return the failures per hour of the job's blocks that work on average, in all zones."""
        working = (pool.blocks - as_floats(spare_blocks)) * (1.0 - self.beta(pool, spare_blocks))
        return pool.interruptions_per_hour * working * pool.zones


def check_loss_limit(scheme: RecoveryScheme, zones: int) -> None:
    """Raise `BadInputError` if a semi-synchronous job tolerates the loss of zones that do not exist."""
    if isinstance(scheme, SemiSynchronous) and scheme.loss_limit_zones > zones:
        raise BadInputError(
            f"recovery.loss_limit_zones = {scheme.loss_limit_zones}: must be at most cluster.zones = {zones}"
        )
