"""The cost of failures for a job over months, with the simulation's error: live recovery compared with restarts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from holdfast.planner.fleet.case import FleetCase
from holdfast.planner.fleet.failures import simulate_courses
from holdfast.planner.fleet.live_job import LiveJob
from holdfast.planner.fleet.recovery import PARTS
from holdfast.planner.fleet.restarted_job import RestartedJob
from holdfast.planner.fleet.time_account import OTHER_LOSSES, Account
from holdfast.planner.reliability.monte_carlo.estimate import Estimate, SimulationSettings, estimate
from holdfast.planner.reliability.sparing.recovery import SECONDS_PER_HOUR
from holdfast.planning.checkpointing import FailureClock, best_period

#: seconds between checkpoints of a live job, which rarely needs them
HOURLY_S = 3600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Forecast:
    """The expected goodput of a simulated job under one way to recover."""

    #: training time over all time
    ettr: Estimate
    #: useful time over the useful time of the full job without failures
    goodput: Estimate
    #: shares of all time, by cause
    lost: dict[str, Estimate]
    #: seconds of each part of a recovery
    per_failure: dict[str, Estimate]
    #: per day
    failures: Estimate
    #: per day
    rollbacks: Estimate

    @property
    def dominant(self) -> str:
        """The cause in `per_failure` with the most seconds."""
        return max(self.per_failure, key=lambda part: self.per_failure[part].mean)


@dataclass(frozen=True, kw_only=True, slots=True)
class Forecasts:
    """The same failures under live recovery and under restarts."""

    live: Forecast
    restarts: Forecast
    #: seconds between checkpoints
    live_period_s: float
    #: seconds between checkpoints
    restarts_period_s: float


def forecast(case: FleetCase, settings: SimulationSettings) -> Forecasts:
    """Simulate a case with live recovery and with restarts, under the same failures.

    Without a checkpoint period in the case, live recovery saves once an hour, and restarts at the optimal period.

    Raises:
        BadInputError: there are too many failures to simulate.
    """
    live_s, restarts_s = case.checkpoint.period_s or HOURLY_S, restarts_period_s(case)
    live, restarts, seconds = list[Account](), list[Account](), settings.hours * SECONDS_PER_HOUR
    chances = np.random.SeedSequence([settings.seed, 1]).spawn(settings.replications)
    for course, chance in zip(simulate_courses(case, settings), chances, strict=True):
        live.append(LiveJob(case, course, live_s, np.random.default_rng(chance)).run())
        restarts.append(RestartedJob(case, course, restarts_s).run())
    return Forecasts(
        live=_summarize(live, seconds, PARTS),
        restarts=_summarize(restarts, seconds, ("restart", "rollback")),
        live_period_s=live_s,
        restarts_period_s=restarts_s,
    )


def restarts_period_s(case: FleetCase) -> float:
    """Return the seconds between checkpoints of a job that restarts: the case's value, or the optimum if that is 0."""
    if case.checkpoint.period_s:
        return case.checkpoint.period_s
    rate = case.failures_per_hour / SECONDS_PER_HOUR
    return float(
        best_period(
            rate=rate,
            save=case.checkpoint.save_s,
            detect=case.restart.detect_s,
            restart=case.restart.restart_s,
            clock=FailureClock.RUNNING,
        )
    )


def _summarize(accounts: Sequence[Account], seconds: float, parts: Sequence[str]) -> Forecast:
    """Return means over replications, with confidence intervals, from one account for each.

    Losses are shares of `seconds`, failures and rollbacks are per day. Causes that lost no time are left out of `lost`.
    `per_failure` has the seconds lost per failure to each cause in `parts`, also if they are 0.
    """

    def mean(value: Callable[[Account], float]) -> Estimate:
        return estimate(np.array([value(account) for account in accounts]))

    losses = [what for what in (*PARTS, *OTHER_LOSSES) if any(account.lost[what] for account in accounts)]
    days = seconds / 86400.0
    return Forecast(
        ettr=mean(lambda account: account.trained / seconds),
        goodput=mean(lambda account: account.useful / seconds),
        lost={what: mean(lambda account, what=what: account.lost[what] / seconds) for what in losses},
        per_failure={part: _mean_per_failure(accounts, part) for part in parts},
        failures=mean(lambda account: account.failures / days),
        rollbacks=mean(lambda account: account.rollbacks / days),
    )


def _mean_per_failure(accounts: Sequence[Account], part: str) -> Estimate:
    """Return the mean seconds lost to a part in each failure, with an interval from linearising the ratio of two means.

    Without failures it is 0.
    """
    lost = np.array([account.lost[part] for account in accounts])
    failures = np.array([account.failures for account in accounts], dtype=np.float64)
    if not failures.any():
        return estimate(np.zeros(lost.size))
    ratio = lost.sum() / failures.sum()
    return estimate(ratio + (lost - ratio * failures) / failures.mean())
