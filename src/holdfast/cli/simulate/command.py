"""`holdfast simulate`: its options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from holdfast.cli.output import AsJson
from holdfast.errors import BadInputError

#: the panel of what concerns pools
POOLS = "Jobs that share a pool"


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
    availability: Annotated[
        str | None,
        typer.Option(
            metavar="TRACE",
            help="Let a pool's jobs live through this CSV (seconds,event,node; events add, remove, fault), or trace-a, "
            "trace-b of Unicron's paper.",
            rich_help_panel=POOLS,
        ),
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(
            metavar="NAME[,NAME]",
            help="Pool policies and other systems to compare: docs/fleet.md.",
            show_default="waf,equal,weighted,hit-only,megatron",
            rich_help_panel=POOLS,
        ),
    ] = None,
    job: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="JOB.toml",
            help="A job of the pool, with [pace] and output.flop_per_sample.",
            show_default="six of Unicron's Table 3",
            rich_help_panel=POOLS,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Forecast what failures will cost a job: its ETTR and goodput, and the part of a recovery that takes most.

    Failures and repairs of all nodes are drawn, months of them, and the job lives through them: recovering live, and
    beside it, through the same failures, by restarts from checkpoints. With --availability: what jobs that share a pool
    achieve through a trace, by ways to share and to recover.
    """
    # Imported here: SciPy takes a quarter of a second that no other command should pay.
    from holdfast.cli.simulate.inputs import given_case
    from holdfast.cli.simulate.report import show_forecast, show_scale
    from holdfast.reliability.monte_carlo.estimate import SimulationSettings

    options = {"nodes": nodes, "mtbf_hours": mtbf, "mttr_hours": mttr, "standbys": standbys}
    given = {key: value for key, value in options.items() if value is not None}
    drawing = {"--hours": hours, "--replications": replications, "--seed": seed}
    if availability is not None:
        _refuse_beside_trace({**options, "--replications": replications}, scale=scale)
        _show_pool(
            cluster, settings or [], nodes, (availability, hours, seed or 0), (policy, job or []), as_json=as_json
        )
        return
    for name, value in (("--policy", policy), ("--job", job)):
        if value:
            raise BadInputError(f"{name} is of use to a pool only: give --availability TRACE beside it")
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


def _refuse_beside_trace(given: dict[str, str | int | None], *, scale: bool) -> None:
    """Refuse what would change nothing: a trace says itself what fails."""
    said = {
        "mtbf_hours": "--mtbf",
        "mttr_hours": "--mttr",
        "standbys": "--standbys",
        "--replications": "--replications",
    }
    for key, name in said.items():
        if given[key] is not None:
            raise BadInputError(
                f"{name} is {given[key]}: beside --availability it changes nothing; leave one of them out"
            )
    if scale:
        raise BadInputError("--scale shows one job's recovery: leave out --availability, or --scale")


def _show_pool(
    cluster: Path | None,
    settings: list[str],
    nodes: str | None,
    trace_of: tuple[str, float | None, int],
    asked: tuple[str | None, list[Path]],
    *,
    as_json: bool,
) -> None:
    from holdfast.cli.simulate.inputs import given_case
    from holdfast.cli.simulate.pools import show_pool, systems_asked, tasks_asked, trace_asked

    case = given_case(cluster, settings, {"nodes": nodes} if nodes is not None else {})
    (name, hours, seed), (policies, jobs) = trace_of, asked
    trace = trace_asked(name, case.nodes if cluster is not None or nodes is not None else None, hours, seed)
    systems = systems_asked(policies, case)
    show_pool(tasks_asked(jobs, trace.most_nodes), trace, systems, as_json=as_json)
