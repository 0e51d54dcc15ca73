"""What `holdfast spares plan` says of checkpoint periods."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated

import typer

from holdfast.cli.planner.spares.report import duration, percent, table
from holdfast.cli.planner.spares.toml import CaseFile
from holdfast.errors import BadInputError
from holdfast.planner.reliability.sparing.evaluation import block_pool, evaluate
from holdfast.planner.reliability.sparing.recovery import SECONDS_PER_HOUR
from holdfast.planning.checkpointing import (
    FailureClock,
    best_period,
    daly_period,
    wasted_fraction,
    young_period,
)
from holdfast.planning.special import require_finite, require_not_negative, require_positive

PANEL = "Checkpoint period"
_FILES = "[checkpoint] in CLUSTER.toml"


@dataclass(frozen=True, kw_only=True)
class CheckpointOptions:
    """What a checkpoint costs; in place of what CLUSTER.toml says."""

    job_mtbf_hours: Annotated[
        float | None,
        typer.Option(
            help="Hours between failures of the whole job.",
            show_default="the best strategy's",
            rich_help_panel=PANEL,
        ),
    ] = None
    save_seconds: Annotated[
        float | None,
        typer.Option(help="What saving a checkpoint costs.", show_default=_FILES, rich_help_panel=PANEL),
    ] = None
    detect_seconds: Annotated[
        float | None,
        typer.Option(help="From a failure to its detection.", show_default=_FILES, rich_help_panel=PANEL),
    ] = None
    restart_seconds: Annotated[
        float | None,
        typer.Option(help="From detection to training again.", show_default=_FILES, rich_help_panel=PANEL),
    ] = None

    @property
    def given(self) -> bool:
        """Whether the user asks for the period."""
        return any(value is not None for value in asdict(self).values())


@dataclass(frozen=True, kw_only=True, slots=True)
class PeriodPlan:
    """Checkpoint periods for a job with this failure rate."""

    job_mtbf_hours: float
    periods: list[dict[str, float | str]]


def planned_periods(file: CaseFile | None, options: CheckpointOptions) -> PeriodPlan | None:
    """Return the checkpoint period that wastes least, next to Young's and Daly's, or None if it is not asked for.

    The best period minimises the model's own gamma, the share of unblocked time that is not useful work, exactly:
    with the failure clock frozen while saving and restarting (as the sparing paper assumes), and with it running.

    Raises:
        BadInputError: a time is missing, or breaks a rule.
    """
    known = None if file is None else file.checkpoint
    if known is None and not options.given:
        return None
    times = {
        "save": _choose_value("--save-seconds", options.save_seconds, known and known.save_seconds),
        "detect": _choose_value("--detect-seconds", options.detect_seconds, known and known.detect_seconds),
        "restart": _choose_value("--restart-seconds", options.restart_seconds, known and known.restart_seconds),
    }
    mtbf = _choose_value("--job-mtbf-hours", options.job_mtbf_hours, None if file is None else _job_mtbf_hours(file))
    require_finite("--job-mtbf-hours", mtbf)
    for name, seconds in times.items():
        require_finite(f"--{name}-seconds", seconds)
    require_positive("--job-mtbf-hours", mtbf)
    require_positive("--save-seconds", times["save"])
    require_not_negative("--detect-seconds", times["detect"])
    require_not_negative("--restart-seconds", times["restart"])
    rows = _periods(1.0 / (mtbf * SECONDS_PER_HOUR), times, None if known is None else float(known.period_seconds))
    return PeriodPlan(job_mtbf_hours=mtbf, periods=rows)


def periods_text(plan: PeriodPlan) -> str:
    """Return how often the job fails, and a table of checkpoint periods with their length and the wasted shares."""
    cells = [
        [
            str(row["method"]),
            f"{row['period_seconds']:.4g} s",
            percent(float(row["gamma_frozen"]), 3),
            percent(float(row["gamma_running"]), 3),
        ]
        for row in plan.periods
    ]
    headers = ["period", "length", "wasted, clock frozen", "wasted, clock running"]
    return "\n".join([f"The job fails every {duration(plan.job_mtbf_hours)}.", "", table(headers, cells)])


def _choose_value(option: str, given: float | None, known: object) -> float:
    """Return the option's value, or else the one of the file. Raises `BadInputError` if neither is given."""
    value = known if given is None else given
    if not isinstance(value, int | float):
        raise BadInputError(f"{option}: is missing; give it, or a CLUSTER.toml that says it")
    return float(value)


def _job_mtbf_hours(file: CaseFile) -> float:
    """Return the mean time between interruptions of the job in hours, with the best sparing strategy."""
    evaluation = evaluate(file.case)
    best = evaluation.strategies[int(evaluation.best)]
    pool = block_pool(file.case, best.strategy, best.block_mtbf_hours)
    blocks = pool.zones * (pool.blocks - int(best.spare_blocks))
    return 1.0 / (float(pool.interruptions_per_hour) * blocks)


def _periods(rate: float, times: dict[str, float], configured: float | None) -> list[dict[str, float | str]]:
    """Return a row for each checkpoint period: best (both clocks), Young, Daly, and the configured one if there is one.

    Each has the method, the period in seconds, and the wasted share with the failure clock frozen and running.

    Args:
        rate: failures per second.
        times: seconds to save, detect and restart, by these names.
        configured: the period in the cluster's file in seconds, or None.
    """
    save, detect, restart = times["save"], times["detect"], times["restart"]

    def best(clock: FailureClock) -> float:
        return float(best_period(rate=rate, save=save, detect=detect, restart=restart, clock=clock))

    def wasted(period: float, clock: FailureClock) -> float:
        waste = wasted_fraction(rate=rate, period=period, save=save, detect=detect, restart=restart, clock=clock)
        return float(waste)

    periods = [
        ("best, clock frozen", best(FailureClock.FROZEN)),
        ("best, clock running", best(FailureClock.RUNNING)),
        ("Young", float(young_period(rate=rate, save=save))),
        ("Daly", float(daly_period(rate=rate, save=save))),
    ]
    if configured is not None:
        periods.append(("in CLUSTER.toml", configured))
    return [
        {
            "method": method,
            "period_seconds": period,
            "gamma_frozen": wasted(period, FailureClock.FROZEN),
            "gamma_running": wasted(period, FailureClock.RUNNING),
        }
        for method, period in periods
    ]
