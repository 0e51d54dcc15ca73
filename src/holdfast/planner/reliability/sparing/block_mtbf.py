"""Mean time between failures of a compute block: sparing paper, Eq. 3 and Appendix A."""

from __future__ import annotations

from enum import StrEnum

import numpy as np

from holdfast.planning.special import FloatArray, Floats, IntArray, as_floats, require_not_negative, require_positive


class RepairChain(StrEnum):
    """How failed trays of a running block come back."""

    #: One visit, at rate 1/MTTR, brings all of them back at once (the printed chain).
    TOGETHER = "together"
    #: Each is repaired on its own: n failed trays return one at a time, at rate n/MTTR.
    INDIVIDUAL = "individual"


def block_mtbf(
    *,
    mtbf_tray: Floats,
    mtbf_rack: Floats,
    mttr: Floats,
    trays: int | IntArray,
    spare_trays: int | IntArray,
    repair_chain: RepairChain = RepairChain.TOGETHER,
) -> FloatArray:
    """Return the mean time until a block has lost more trays than it has spares, or its rack.

    All arguments broadcast. Times and the result have the same unit. `mtbf_rack` may be infinite. Tray and rack
    failures are combined by adding their rates, as Eq. 3 does.

    Eq. 3's double sum for the chain `together` is the sum over k of mu**k times the elementary symmetric polynomial of
    degree k+1 of 1/lambda_0..1/lambda_I. It equals (prod(1 + mu/lambda_n) - 1) / mu, which lists no combinations.

    Raises:
        BadInputError: a time is not positive, or there are not fewer spare trays than trays.
    """
    require_positive("mtbf_tray", mtbf_tray)
    require_positive("mtbf_rack", mtbf_rack)
    require_positive("mttr", mttr)
    require_not_negative("spare_trays", as_floats(spare_trays))
    require_positive("trays - spare_trays", as_floats(trays) - as_floats(spare_trays))
    exhausted = spares_exhausted_time(mtbf_tray, mttr, trays, spare_trays, repair_chain)
    return 1.0 / (1.0 / as_floats(mtbf_rack) + 1.0 / exhausted)


def spares_exhausted_time(
    mtbf_tray: Floats, mttr: Floats, trays: int | IntArray, spare_trays: int | IntArray, repair_chain: RepairChain
) -> FloatArray:
    """Return the mean time from all trays up to more than `spare_trays` failed, or inf on overflow."""
    tray_rate, mu = 1.0 / as_floats(mtbf_tray), 1.0 / as_floats(mttr)
    states = np.arange(int(np.max(spare_trays)) + 1)
    with np.errstate(over="ignore"):
        if repair_chain is RepairChain.TOGETHER:
            return _together(tray_rate, mu, as_floats(trays), as_floats(spare_trays), states)
        return _individual(tray_rate, mu, as_floats(trays), as_floats(spare_trays), states)


def _together(
    tray_rate: FloatArray, mu: FloatArray, trays: FloatArray, spare_trays: FloatArray, states: IntArray
) -> FloatArray:
    """Return the mean time until a block has more than `spare_trays` failed trays, if one visit repairs all of them.

    `trays` includes the spares. `mu` is the rate of visits. `states` are numbers of failed trays; those above
    `spare_trays` are ignored.
    """
    log_product = np.zeros(np.broadcast_shapes(tray_rate.shape, mu.shape, trays.shape, spare_trays.shape))
    for n in states:
        failure_rate = np.maximum(trays - n, 1.0) * tray_rate
        log_product = log_product + np.where(n <= spare_trays, np.log1p(mu / failure_rate), 0.0)
    return np.expm1(log_product) / mu


def _individual(
    tray_rate: FloatArray, mu: FloatArray, trays: FloatArray, spare_trays: FloatArray, states: IntArray
) -> FloatArray:
    """Return the mean time until a block has more than `spare_trays` failed trays, each repaired alone at rate `mu`.

    `states` are numbers of failed trays; those above `spare_trays` are ignored.
    """
    # First passage of a birth-death chain: n to n+1 takes h_n = (1 + n mu h_{n-1}) / lambda_n on average.
    total = np.zeros(np.broadcast_shapes(tray_rate.shape, mu.shape, trays.shape, spare_trays.shape))
    step = np.zeros_like(total)
    for n in states:
        failure_rate = np.maximum(trays - n, 1.0) * tray_rate
        step = (1.0 + n * mu * step) / failure_rate
        total = total + np.where(n <= spare_trays, step, 0.0)
    return total


def interruption_rate(
    *,
    mtbf_tray: Floats,
    mtbf_rack: Floats,
    working_trays: int | IntArray,
    blocks_sharing_rack_failures: int | IntArray = 1,
) -> FloatArray:
    """Return 1/MTBF_F: how often one working block interrupts the job, per unit of time.

    Spare trays have no effect here: any fault of a working tray interrupts (section 3.3). The paper charges each block
    its rack's failures in full (`blocks_sharing_rack_failures` = 1). With the number of blocks in a rack, a rack
    failure is charged once per rack.
    """
    return as_floats(working_trays) / as_floats(mtbf_tray) + 1.0 / (
        as_floats(mtbf_rack) * as_floats(blocks_sharing_rack_failures)
    )
