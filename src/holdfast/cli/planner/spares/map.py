"""`holdfast spares map`."""

from __future__ import annotations

import math
from typing import Annotated

import numpy as np
import typer

from holdfast.cli.output import AsJson, print_json, print_line, warn
from holdfast.cli.planner.spares.report import ClusterFile, PlotDirectory, percent, table
from holdfast.cli.planner.spares.toml import read_case
from holdfast.errors import BadInputError
from holdfast.planner.reliability.sparing.sensitivity import SCENARIOS, SensitivityMap, sensitivity_map

#: Points along an axis: four maps of their square take minutes.
_MOST_POINTS = 1000


def best_map(
    cluster: ClusterFile,
    mtbf: Annotated[str, typer.Option(metavar="FROM:TO", help="Range of the tray's MTBF in hours.")] = "1e3:1e5",
    mttr: Annotated[str, typer.Option(metavar="FROM:TO", help="MTTR in hours.")] = "0.1:100",
    points: Annotated[int, typer.Option(help="Points of each axis, logarithmic.")] = 80,
    as_json: AsJson = False,
    plot: PlotDirectory = None,
) -> None:
    """Map the best strategy over MTBF and MTTR.

    There are four maps, as in Figures 2-5 of the sparing paper: without gains and placement, with the model gain, also
    with the hardware gain, and also with the placement. The printed numbers are each strategy's share of the map. The
    axes are logarithmic.
    """
    if not 2 <= points <= _MOST_POINTS:
        raise BadInputError(f"--points = {points}: must be 2 or more, and at most {_MOST_POINTS:,}")
    case = read_case(cluster).case
    grid = [np.geomspace(*span, points) for span in (_parse_range("--mtbf", mtbf), _parse_range("--mttr", mttr))]
    maps = [sensitivity_map(case, scenario, *grid) for scenario in SCENARIOS]
    if as_json:
        print_json([_map_json(one) for one in maps])
    else:
        headers = ["best on share of plane", *(strategy.label for strategy in maps[0].strategies), "no goodput"]
        print_line(table(headers, [_map_row(one) for one in maps]))
    if plot is not None:
        from holdfast.cli.planner.spares.plots import plot_maps

        warn(f"wrote {plot_maps(maps, case, plot)}")


def _parse_range(option: str, text: str) -> tuple[float, float]:
    """Return the two numbers of FROM:TO. Raises `BadInputError` unless 0 < FROM < TO."""
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
