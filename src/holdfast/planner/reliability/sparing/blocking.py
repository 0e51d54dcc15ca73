"""Probability that spare blocks run out: sparing paper, Eq. 4 and Appendix B."""

from __future__ import annotations

import numpy as np

from holdfast.planning.special import FloatArray, Floats, IntArray, as_floats, regularized_beta


def block_unavailability(block_mtbf: Floats, mttr: Floats) -> FloatArray:
    """Return the long-run share of time in which one block is out of production, MTTR / (MTBF + MTTR)."""
    return as_floats(mttr) / (as_floats(block_mtbf) + as_floats(mttr))


def zone_blocked_probability(
    blocks: int | IntArray, spare_blocks: int | IntArray, unavailability: Floats
) -> FloatArray:
    """Return Pr(blocked), Eq. 4: more than `spare_blocks` of a zone's `blocks` are out of production.

    Blocks fail and return independently, so the number out is binomial. Its upper tail is computed as a regularised
    incomplete beta function, which keeps its relative precision far below 1e-13, unlike Eq. 4's `1 - ...`. Arguments
    broadcast. With `spare_blocks >= blocks` the probability is 0.
    """
    blocks_f, spares_f = as_floats(blocks), as_floats(spare_blocks)
    never = spares_f >= blocks_f
    tail = regularized_beta(spares_f + 1.0, np.where(never, 1.0, blocks_f - spares_f), as_floats(unavailability))
    return np.where(never, 0.0, tail)


def log_zone_free_probability(
    blocks: int | IntArray, spare_blocks: int | IntArray, unavailability: Floats
) -> FloatArray:
    """Return the log of the probability that a zone is not blocked (see `zone_blocked_probability`), or -inf on
    underflow.
    """
    blocked = zone_blocked_probability(blocks, spare_blocks, unavailability)
    log_free = np.asarray(np.log1p(-np.minimum(blocked, 0.5)))
    mostly = blocked >= 0.5
    if not np.any(mostly):
        return log_free
    # 1 - blocked has few digits there, so compute the lower tail itself. blocked > 0 implies R < L.
    shaped = np.broadcast_arrays(as_floats(blocks), as_floats(spare_blocks), as_floats(unavailability))
    blocks_f, spares_f, q = (each[mostly] for each in shaped)
    with np.errstate(divide="ignore"):
        log_free[mostly] = np.log(regularized_beta(blocks_f - spares_f, spares_f + 1.0, 1.0 - q))
    return log_free


def job_blocked_probability(zone_blocked: Floats, zones: int | IntArray) -> FloatArray:
    """Return beta, the probability that any zone is blocked and thus the job: 1 - (1 - Pr(blocked))**B.

    The paper prints 1 - Pr(blocked)**B, which is the probability that not all zones are blocked.
    """
    zone = as_floats(zone_blocked)
    with np.errstate(divide="ignore"):
        return -np.expm1(as_floats(zones) * np.log1p(-zone))
