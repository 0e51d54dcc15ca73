"""The best number of spare blocks per zone, for many cases at once."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from holdfast.planner.reliability.sparing.recovery import BlockPool, RecoveryScheme
from holdfast.planning.special import FloatArray, IntArray


def best_spare_blocks(scheme: RecoveryScheme, pool: BlockPool) -> IntArray:
    """Return the best number R of spare blocks per zone without placement groups, for every element of the pool's
    arrays.

    R is between 0 and L - 1, with L blocks per zone, and maximises CETT. For the synchronous scheme the objective is
    log-concave in R, so its forward difference changes sign once, and bisection finds the sign change. A binomial
    distribution function is log-concave, so are its powers, and so is n (1 - gamma(n)) in the number n of working
    blocks. (With x = rate period, y = rate down and no saving, its logarithm's second derivative is at most (-2 + 1 +
    1)/n**2; saving only lowers it.) For the other schemes, tests compare the result with a search over every R.
    """
    free = replace(pool, group_blocks=1)
    shape = np.broadcast_shapes(pool.unavailability.shape, pool.interruptions_per_hour.shape)
    low, high = np.zeros(shape, dtype=np.int64), np.full(shape, pool.blocks - 1, dtype=np.int64)
    for _ in range(int(pool.blocks - 1).bit_length()):
        middle = np.minimum((low + high) // 2, max(pool.blocks - 2, 0))
        here, more = _log_cett(scheme, free, middle), _log_cett(scheme, free, middle + 1)
        # If the goodput underflows because of too few spares, more spares can only help.
        better_above = (more > here) | np.isneginf(here)
        open_ = low < high
        low = np.where(open_ & better_above, middle + 1, low)
        high = np.where(open_ & ~better_above, middle, high)
    return low


def best_placed_spare_blocks(scheme: RecoveryScheme, pool: BlockPool, unplaced: IntArray) -> IntArray:
    """Return the best number R of spare blocks per zone that leaves whole placement groups (Eq. 6), per element of the
    pool.

    L - R must be a positive multiple of P, with L blocks per zone and P blocks per group. `unplaced` is
    `best_spare_blocks(scheme, pool)`. It is the only maximum, so the best multiple is one of the two next to it.
    """
    if pool.group_blocks == 1:
        return unplaced
    most = pool.blocks // pool.group_blocks
    fewer = np.clip((pool.blocks - unplaced) // pool.group_blocks, 1, most)
    more = np.minimum(fewer + 1, most)
    spares_fewer, spares_more = pool.blocks - fewer * pool.group_blocks, pool.blocks - more * pool.group_blocks
    take_more = _log_cett(scheme, pool, spares_more) > _log_cett(scheme, pool, spares_fewer)
    return np.where(take_more, spares_more, spares_fewer)


def _log_cett(scheme: RecoveryScheme, pool: BlockPool, spare_blocks: IntArray) -> FloatArray:
    return np.log(pool.blocks - spare_blocks) + scheme.log_yield(pool, spare_blocks)
