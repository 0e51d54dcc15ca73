"""`holdfast spares plan`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from holdfast.cli.output import AsJson, print_json, print_line, warn
from holdfast.cli.planner.spares.checkpoint import CheckpointOptions, PeriodPlan, periods_text, planned_periods
from holdfast.cli.planner.spares.report import PlotDirectory, evaluation_json, evaluation_text
from holdfast.cli.planner.spares.standbys import StandbyOptions, planned_standbys, standbys_json, standbys_text
from holdfast.cli.planner.spares.toml import CaseFile, read_case
from holdfast.errors import BadInputError
from holdfast.planner.reliability.sparing.evaluation import evaluate
from holdfast.planning.standbys import StandbyCase, StandbyPlan

Standbys = tuple[StandbyCase, StandbyPlan]


def plan(
    cluster: Annotated[
        Path | None,
        typer.Argument(metavar="[CLUSTER.toml]", help="The case; see examples/catalina.toml.", show_default=False),
    ] = None,
    as_json: AsJson = False,
    plot: PlotDirectory = None,
    *,
    standbys: StandbyOptions,
    checkpoint: CheckpointOptions,
) -> None:
    r"""Recommend spares and a checkpoint period.

    For each strategy (block size and working GPUs) it prints: the spare blocks per zone R, the shares of the GPUs that
    are spare between blocks, spare inside blocks, or stranded by the placement, CETT (the share of the GPU time in
    which the job trains), the gains, and the goodput. Then it names the best strategy and the second best, and shows
    how the rest of the GPU time is spent.

    If \[standbys] or the options contain how long a failure stops the job with a standby and without one, it prints how
    many warm standby nodes pay for themselves.

    If \[checkpoint] or the options contain the cost of a checkpoint, it prints the best checkpoint period, next to the
    periods of Young and Daly. With all options of the checkpoint period, CLUSTER.toml is not needed for that.
    """
    file = None if cluster is None else read_case(cluster)
    if file is None and (standbys.given or plot is not None or not checkpoint.given):
        raise BadInputError("CLUSTER.toml is missing: give it, or all options of the checkpoint period, for that alone")
    planned = None if file is None else planned_standbys(file, standbys)
    periods = planned_periods(file, checkpoint)
    if as_json:
        print_json(_json(file, planned, periods))
    else:
        print_line("\n\n".join(_text(file, planned, periods)))
    if file is not None and plot is not None:
        _draw(file, plot)


def _json(file: CaseFile | None, planned: Standbys | None, periods: PeriodPlan | None) -> dict[str, Any]:
    return {
        **({} if file is None else evaluation_json(file.case, evaluate(file.case))),
        **({} if planned is None else {"standbys": standbys_json(*planned)}),
        **({} if periods is None else {"checkpoint": asdict(periods)}),
    }


def _text(file: CaseFile | None, planned: Standbys | None, periods: PeriodPlan | None) -> list[str]:
    """Return the paragraphs of the plan: strategies, warm standbys, checkpoint periods, without those not asked for."""
    parts: list[str] = []
    if file is not None:
        parts.append(evaluation_text(file.case, evaluate(file.case)))
    if planned is not None:
        parts.append(f"Warm standbys: {standbys_text(*planned)}")
    if periods is not None:
        parts.append(f"Checkpoints: {periods_text(periods)}")
    return parts


def _draw(file: CaseFile, folder: Path) -> None:
    """Draw use of the GPU time, and goodput by spare blocks, into PNGs of a folder; report each file on stderr."""
    from holdfast.cli.planner.spares.plots import plot_losses, plot_spare_blocks

    evaluation = evaluate(file.case)
    for draw in (plot_losses, plot_spare_blocks):
        warn(f"wrote {draw(file.case, evaluation, folder)}")
