"""The share of time lost to checkpoints and to failures between them (sparing paper, Eq. 5 and Appendix C)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from holdfast.planning.special import (
    FloatArray,
    Floats,
    as_floats,
    lambert_w,
    require_not_negative,
    require_positive,
)


class FailureClock(StrEnum):
    """Whether failures can occur while the job detects a failure, restarts or saves."""

    #: They cannot, as Appendix C assumes.
    FROZEN = "frozen"
    #: They can. A failure while saving loses the period; a failure while restarting begins the restart again.
    RUNNING = "running"


@dataclass(frozen=True, kw_only=True, slots=True)
class PeriodTimes:
    """Mean time spent per checkpoint period, by purpose. All arrays have one shape and one unit of time."""

    useful: FloatArray
    save: FloatArray
    lost_work: FloatArray
    restart: FloatArray

    @property
    def total(self) -> FloatArray:
        """The mean length of the whole period; infinite if no period ever completes."""
        return self.useful + self.save + self.lost_work + self.restart


def period_times(
    *,
    rate: Floats,
    period: Floats,
    save: Floats,
    detect: Floats,
    restart: Floats,
    clock: FailureClock = FailureClock.FROZEN,
) -> PeriodTimes:
    """Return how one checkpoint period divides into its purposes, for a job that fails at `rate`.

    Frozen clock: T = (exp(rate period) - 1) (1/rate + detect + restart) + save. This is Appendix C with the factor that
    its last line and Eq. 5 omit. Running clock: T = (exp(rate (period + save)) - 1) exp(rate (detect + restart)) /
    rate.

    The arguments broadcast and share one unit of time.
    """
    lam, tc, ts, down = as_floats(rate), as_floats(period), as_floats(save), as_floats(detect) + as_floats(restart)
    lam, tc, ts, down = np.broadcast_arrays(lam, tc, ts, down)
    segment = tc if clock is FailureClock.FROZEN else tc + ts
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        failures = np.expm1(lam * segment)
        tried = np.where(lam > 0, failures / np.where(lam > 0, lam, 1.0), segment)
        each = down if clock is FailureClock.FROZEN else np.where(lam > 0, np.expm1(lam * down) / lam, down)
        restarting = np.where(failures > 0, failures * each, 0.0)
    return PeriodTimes(useful=tc, save=ts, lost_work=tried - segment, restart=restarting)


def log_useful_fraction(
    *,
    rate: Floats,
    period: Floats,
    save: Floats,
    detect: Floats,
    restart: Floats,
    clock: FailureClock = FailureClock.FROZEN,
) -> FloatArray:
    """Return log(1 - gamma), where gamma is the share of lost time; at most 0.

    It stays finite if gamma rounds to 1, so that hopeless cases remain comparable.
    """
    lam, tc, ts = as_floats(rate), as_floats(period), as_floats(save)
    down = as_floats(detect) + as_floats(restart)
    with np.errstate(divide="ignore"):
        if clock is FailureClock.RUNNING:
            total = _log_expm1_over(lam, tc + ts) + lam * down
        else:
            total = np.logaddexp(_log_expm1_over(lam, tc) + np.log1p(lam * down), np.log(ts))
        return np.minimum(np.log(tc) - total, 0.0)


def _log_expm1_over(rate: FloatArray, time: FloatArray) -> FloatArray:
    """Return log((exp(rate time) - 1) / rate), and its limit log(time) at rate 0."""
    x = rate * time
    safe = np.where(x > 0, x, 1.0)
    return np.where(x > 0, safe + np.log(-np.expm1(-safe)) - np.log(safe), 0.0) + np.log(time)


def wasted_fraction(
    *,
    rate: Floats,
    period: Floats,
    save: Floats,
    detect: Floats,
    restart: Floats,
    clock: FailureClock = FailureClock.FROZEN,
) -> FloatArray:
    """Return gamma = 1 - period / T, the share of unblocked time that is not useful work (Eq. 5, corrected)."""
    return -np.expm1(
        log_useful_fraction(rate=rate, period=period, save=save, detect=detect, restart=restart, clock=clock)
    )


def best_period(
    *, rate: Floats, save: Floats, detect: Floats, restart: Floats, clock: FailureClock = FailureClock.FROZEN
) -> FloatArray:
    """Return the checkpoint period that minimises gamma, the share of lost time, exactly, in the unit of `save`.

    With x = rate * period, the derivative of T / period is zero if (x - 1) exp(x) + 1 = c. The solution is x = 1 + W((c
    - 1) / e), with Lambert's function W. Frozen clock: c = rate save / (1 + rate (detect + restart)). Running clock: c
    = 1 - exp(-rate save), Daly's exact optimum.

    Raises:
        BadInputError: `rate` or `save` is not positive (if saving were free, the best period would be 0), or `detect` +
            `restart` is negative.
    """
    require_positive("rate", rate)
    require_positive("save", save)
    require_not_negative("detect + restart", as_floats(detect) + as_floats(restart))
    lam, ts, down = as_floats(rate), as_floats(save), as_floats(detect) + as_floats(restart)
    c = lam * ts / (1.0 + lam * down) if clock is FailureClock.FROZEN else -np.expm1(-lam * ts)
    # Near W's branch point, rounding in c - 1 loses digits: start from the series and refine it by Newton's method.
    x = np.where(c < 1e-3, np.sqrt(2.0 * c), 1.0 + lambert_w((c - 1.0) / np.e))
    for _ in range(4):
        x = x - (x * np.exp(x) - np.expm1(x) - c) / (x * np.exp(x))
    return x / lam


def young_period(*, rate: Floats, save: Floats) -> FloatArray:
    """Return Young's first-order period, sqrt(2 save / rate) (CACM 17(9), 1974)."""
    return np.sqrt(2.0 * as_floats(save) / as_floats(rate))


def daly_period(*, rate: Floats, save: Floats) -> FloatArray:
    """Return Daly's higher-order period (FGCS 22(3), 2006, Eq. 37); 1/rate if save >= 2/rate."""
    mtbf, ts = 1.0 / as_floats(rate), as_floats(save)
    ratio = ts / (2.0 * mtbf)
    series = np.sqrt(2.0 * ts * mtbf) * (1.0 + np.sqrt(ratio) / 3.0 + ratio / 9.0) - ts
    return np.where(ratio < 1.0, series, mtbf)
