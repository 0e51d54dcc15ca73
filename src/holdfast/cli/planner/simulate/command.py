"""`holdfast simulate`: its options."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.cli.options import with_option_groups
from holdfast.cli.output import AsJson
from holdfast.cli.planner.simulate.options import DrawnFailures, PoolTrace

if TYPE_CHECKING:
    from holdfast.planner.fleet.case import FleetCase


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command("simulate")(with_option_groups(simulate))


def simulate(
    cluster: Annotated[
        Path | None,
        typer.Argument(metavar="[CLUSTER.toml]", help="A cluster; see examples/catalina.toml.", show_default=False),
    ] = None,
    nodes: Annotated[str | None, typer.Option(metavar="N", help="Nodes of the full job.", show_default="1024")] = None,
    hours: Annotated[
        float | None,
        typer.Option(help="Simulated time of each replication.", show_default="2160"),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same numbers.", show_default="0")] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Set a number of the model (docs/scale.md)."),
    ] = None,
    as_json: AsJson = False,
    *,
    failures: DrawnFailures,
    pool: PoolTrace,
) -> None:
    """Forecast the cost of failures for a job of any size.

    Simulates months of random failures and repairs, once with live recovery and once with restarts from checkpoints.
    With --availability it simulates jobs that share a pool, and compares ways to share nodes and to recover.
    """
    # Imported here: SciPy takes a quarter of a second that no other command should pay.
    from holdfast.cli.planner.simulate.inputs import read_case
    from holdfast.cli.planner.simulate.report import show_forecast, show_scale
    from holdfast.planner.reliability.monte_carlo.estimate import SimulationSettings

    given = {**({"nodes": nodes} if nodes is not None else {}), **failures.keys}
    if pool.availability is not None:
        failures.check_unused()
        case = read_case(cluster, settings or [], given)
        _show_pool(case.nodes if cluster or nodes else None, hours, seed or 0, pool, case, as_json=as_json)
        return
    pool.check_unused()
    drawing = {"--hours": hours, "--replications": failures.replications, "--seed": seed}
    case = read_case(cluster, settings or [], given, scale=failures.scale, drawing=drawing)
    if failures.scale:
        show_scale(case, as_json=as_json)
        return
    simulated = SimulationSettings(
        replications=20 if failures.replications is None else failures.replications,
        hours=2160.0 if hours is None else hours,
        seed=seed or 0,
    )
    show_forecast(case, simulated, as_json=as_json)


def _show_pool(
    nodes: int | None, hours: float | None, seed: int, pool: PoolTrace, case: FleetCase, *, as_json: bool
) -> None:
    """Simulate the jobs of a pool through a trace, with each chosen policy, and print the results."""
    from holdfast.cli.planner.simulate.pools import read_systems, read_tasks, read_trace_of, show_pool

    assert pool.availability is not None
    trace = read_trace_of(pool.availability, nodes, hours, seed)
    systems = read_systems(pool.policy, case)
    show_pool(read_tasks(pool.job or [], trace.most_nodes), trace, systems, as_json=as_json)
