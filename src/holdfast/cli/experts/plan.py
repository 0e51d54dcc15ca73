"""`holdfast experts plan`: where expert replicas should live, and what that placement survives."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from holdfast.cli.output import AsJson

group = typer.Typer(name="experts", help="Plan where the experts of MoE layers live.", no_args_is_help=True)


def register(app: typer.Typer) -> None:
    """Add the group of commands to the command line."""
    app.add_typer(group, rich_help_panel="Plan")


@group.callback()
def experts() -> None:
    """Plan where the experts of MoE layers live."""


@group.command()
def plan(
    loads: Annotated[
        Path,
        typer.Option(help="Tokens per layer and expert: .npz (with --iteration), .csv, .json, or an engine's dump."),
    ],
    expert_slots: Annotated[str, typer.Option(help="Expert slots per node: one number, or one per node (6,6,4,8).")],
    nodes: Annotated[
        int | None, typer.Option(help="Number of nodes; optional where --expert-slots lists them.")
    ] = None,
    iteration: Annotated[int | None, typer.Option(help="Which of a recording's iterations to plan for.")] = None,
    fault_threshold: Annotated[int, typer.Option(help="On how many distinct nodes each expert must live.")] = 2,
    expert_placement: Annotated[str, typer.Option(help="best, mro, spread or compact.")] = "best",
    racks: Annotated[Path | None, typer.Option(help="Each node's rack: one name per line, or a .json list.")] = None,
    failure_weights: Annotated[
        str | None, typer.Option(help="How likely each number of lost nodes is, summing to one: 1:0.7,2:0.2,4:0.1.")
    ] = None,
    failure_rates: Annotated[
        Path | None, typer.Option(help="How often each node fails, in any unit: one number per line, or a .json list.")
    ] = None,
    balance_weight: Annotated[
        float | None,
        typer.Option(
            help="How many fatal losses a busy node is worth: share of losses per mean node's work above the mean."
        ),
    ] = None,
    pareto: Annotated[
        bool, typer.Option("--pareto", help="Also show the placements between the safest and the most even one.")
    ] = False,
    compare: Annotated[
        str | None, typer.Option(help="eplb: what EPLB and holdfast.placement make of a recording; plans nothing.")
    ] = None,
    gpus_per_node: Annotated[int, typer.Option(help="With --compare: GPUs that share a node's slots.")] = 1,
    groups: Annotated[int, typer.Option(help="With --compare: groups of experts that EPLB keeps on nodes.")] = 1,
    plot: Annotated[Path | None, typer.Option(help="Write a picture of placement and recovery curves (.png).")] = None,
    as_json: AsJson = False,
) -> None:
    """Place expert replicas on nodes by their load, and show what losses of nodes the model survives."""
    # Imported here: SciPy takes a quarter of a second that no other command should pay.
    from holdfast.cli.experts.work import PlanRequest, run

    run(
        PlanRequest(
            loads=loads,
            slots=expert_slots,
            nodes=nodes,
            iteration=iteration,
            fault_threshold=fault_threshold,
            strategy=expert_placement,
            racks=racks,
            failure_weights=failure_weights,
            failure_rates=failure_rates,
            balance_weight=balance_weight,
            pareto=pareto,
            compare=compare,
            gpus_per_node=gpus_per_node,
            groups=groups,
            plot=plot,
            as_json=as_json,
        )
    )
