"""`holdfast simulate`: its options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from holdfast.cli.output import AsJson


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command("simulate", rich_help_panel="Plan")(simulate)


def simulate(
    cluster: Annotated[
        Path | None,
        typer.Argument(metavar="[CLUSTER.toml]", help="A cluster; see examples/catalina.toml.", show_default=False),
    ] = None,
    nodes: Annotated[str | None, typer.Option(metavar="N", help="Nodes of the full job.", show_default="1024")] = None,
    mtbf: Annotated[
        str | None,
        typer.Option(metavar="HOURS", help="Mean time between failures of one node.", show_default="6334"),
    ] = None,
    mttr: Annotated[
        str | None,
        typer.Option(metavar="HOURS", help="Mean time until a node that has failed is back.", show_default="133"),
    ] = None,
    standbys: Annotated[str | None, typer.Option(metavar="N", help="Further nodes, warm and idle.")] = None,
    hours: Annotated[
        float | None,
        typer.Option(help="Simulated time of each replication, after a warm-up.", show_default="2160"),
    ] = None,
    replications: Annotated[int | None, typer.Option(help="Independent simulations.", show_default="20")] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same numbers.", show_default="0")] = None,
    scale: Annotated[
        bool, typer.Option("--scale", help="Show how long a recovery takes from 4 to 16,384 nodes instead.")
    ] = False,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Set any number of the model: docs/scale.md lists them."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Forecast what failures will cost a job: its ETTR and goodput, and the part of a recovery that takes most.

    Failures and repairs of all nodes are drawn, months of them, and the job lives through them: recovering live, and
    beside it, through the same failures, by restarts from checkpoints.
    """
    # Imported here: SciPy takes a quarter of a second that no other command should pay.
    from holdfast.cli.simulate.inputs import given_case
    from holdfast.cli.simulate.report import show_forecast, show_scale
    from holdfast.reliability.monte_carlo.estimate import SimulationSettings

    options = {"nodes": nodes, "mtbf_hours": mtbf, "mttr_hours": mttr, "standbys": standbys}
    given = {key: value for key, value in options.items() if value is not None}
    drawing = {"--hours": hours, "--replications": replications, "--seed": seed}
    case = given_case(cluster, settings or [], given, scale=scale, drawing=drawing)
    if scale:
        show_scale(case, as_json=as_json)
    else:
        simulated = SimulationSettings(
            replications=20 if replications is None else replications,
            hours=2160.0 if hours is None else hours,
            seed=seed or 0,
        )
        show_forecast(case, simulated, as_json=as_json)
