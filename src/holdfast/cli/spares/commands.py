"""`holdfast spares`: how many spares, of what kind, give the most goodput."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from holdfast.cli.spares import checkpoint as spares_checkpoint
from holdfast.cli.spares import fit as spares_fit
from holdfast.cli.spares import standbys as spares_standbys
from holdfast.cli.spares import validate as spares_validate
from holdfast.cli.spares.report import evaluation_json, evaluation_text, percent, print_json, table
from holdfast.cli.spares.toml import read_case
from holdfast.errors import BadInputError
from holdfast.reliability.sparing.evaluation import evaluate as evaluate_case
from holdfast.reliability.sparing.sensitivity import SCENARIOS, SensitivityMap, sensitivity_map

app = typer.Typer(
    name="spares",
    help="Plan spares: how many, of what kind, give a cluster the most goodput.",
    no_args_is_help=True,
    add_completion=False,
)
ClusterFile = Annotated[Path, typer.Argument(metavar="CLUSTER.toml", help="The case; see examples/catalina.toml.")]
#: Points along an axis: four maps of their square take minutes.
_MOST_POINTS = 1000
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
PlotDirectory = Annotated[Path | None, typer.Option("--plot", metavar="DIR", help="Also draw pictures into DIR.")]


@app.command()
def evaluate(cluster: ClusterFile, as_json: AsJson = False, plot: PlotDirectory = None) -> None:
    """Evaluate every strategy of CLUSTER.toml and recommend one.

    Prints block size and working GPUs, spare blocks per zone R (stranded ones included), shares of all GPUs that are
    spare between blocks, spare inside blocks, and stranded by placement, CETT (the share of GPU time that trains),
    the gains, and goodput; then the best, the runner-up, and where the rest of the GPU time goes.
    """
    case = read_case(cluster).case
    evaluation = evaluate_case(case)
    if as_json:
        print_json(evaluation_json(case, evaluation))
    else:
        typer.echo(evaluation_text(case, evaluation))
    if plot is not None:
        from holdfast.cli.spares.plots import plot_losses, plot_spare_blocks

        for draw in (plot_losses, plot_spare_blocks):
            typer.echo(f"wrote {draw(case, evaluation, plot)}", err=True)


@app.command()
def sensitivity(
    cluster: ClusterFile,
    mtbf: Annotated[
        str, typer.Option(metavar="FROM:TO", help="Tray MTBF in hours; the rack's goes along.")
    ] = "1e3:1e5",
    mttr: Annotated[str, typer.Option(metavar="FROM:TO", help="MTTR in hours.")] = "0.1:100",
    points: Annotated[int, typer.Option(help="Points along each axis, spaced evenly in the logarithm.")] = 80,
    as_json: AsJson = False,
    plot: PlotDirectory = None,
) -> None:
    """Map which strategy is best where in the MTBF-MTTR plane.

    Four maps, as Figures 2-5 of the sparing paper: without gains and placement; with the model gain; with the
    hardware gain too; with placement too. The printed shares are of the (logarithmic) plane.
    """
    if not 2 <= points <= _MOST_POINTS:
        raise BadInputError(f"--points = {points}: must be 2 or more, and at most {_MOST_POINTS:,}")
    case = read_case(cluster).case
    grid = [np.geomspace(*span, points) for span in (_span("--mtbf", mtbf), _span("--mttr", mttr))]
    maps = [sensitivity_map(case, scenario, *grid) for scenario in SCENARIOS]
    if as_json:
        print_json([_map_json(one) for one in maps])
    else:
        headers = ["best on share of plane", *(strategy.label for strategy in maps[0].strategies), "no goodput"]
        typer.echo(table(headers, [_map_row(one) for one in maps]))
    if plot is not None:
        from holdfast.cli.spares.plots import plot_maps

        typer.echo(f"wrote {plot_maps(maps, case, plot)}", err=True)


def _span(option: str, text: str) -> tuple[float, float]:
    try:
        low, high = (float(part) for part in text.split(":"))
    except ValueError:
        raise BadInputError(f"{option} = {text!r}: must be two numbers of hours, FROM:TO, such as 1e3:1e5") from None
    if not (0.0 < low < high < math.inf):
        raise BadInputError(f"{option} = {text!r}: FROM must be above 0 and below TO")
    return low, high


def _map_row(one: SensitivityMap) -> list[str]:
    return [one.scenario.name, *(percent(share) for share in one.shares), percent(float(one.hopeless.mean()))]


def _map_json(one: SensitivityMap) -> dict[str, object]:
    return {
        "scenario": one.scenario.name,
        "strategies": [strategy.label for strategy in one.strategies],
        "mtbf_tray_hours": one.mtbf_tray_hours.tolist(),
        "mttr_hours": one.mttr_hours.tolist(),
        "best": one.best.tolist(),
        "shares": one.shares.tolist(),
        "no_goodput_share": float(one.hopeless.mean()),
    }


# Registered last: help lists commands in this order.
app.command("validate")(spares_validate.validate)
app.command("fit")(spares_fit.fit)
app.command("standbys")(spares_standbys.standbys)
app.command("checkpoint")(spares_checkpoint.checkpoint)
