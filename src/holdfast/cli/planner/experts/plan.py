"""`holdfast experts plan`: where expert replicas should live, and what that placement survives."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from holdfast.cli.help import HelpfulGroup, HelpfulTyper
from holdfast.cli.output import AsJson

group = HelpfulTyper(cls=HelpfulGroup, name="experts", help="Plan on which nodes the experts of a MoE model are.")


def register(app: typer.Typer) -> None:
    """Add the group of commands to the command line."""
    app.add_typer(group)


@group.callback()
def experts() -> None:
    """Plan on which nodes the experts of a MoE model are."""


@group.command()
def plan(
    loads: Annotated[
        Path,
        typer.Option(
            help="Tokens per layer and expert. A .csv, .json or .npz (with --iteration), or an engine's dump."
        ),
    ],
    expert_slots: Annotated[str, typer.Option(help="Expert slots of each node: 6, or 6,6,4,8.")],
    nodes: Annotated[int | None, typer.Option(help="Nodes, if --expert-slots is one number.")] = None,
    iteration: Annotated[int | None, typer.Option(help="Which of a recording's iterations to plan for.")] = None,
    fault_threshold: Annotated[int, typer.Option(help="Nodes that must hold each expert.")] = 2,
    expert_placement: Annotated[str, typer.Option(help="best, mro, spread or compact.")] = "best",
    racks: Annotated[Path | None, typer.Option(help="Each node's rack: one name per line, or a .json list.")] = None,
    failure_weights: Annotated[
        str | None, typer.Option(help="Probability of each number of lost nodes. They sum to one: 1:0.7,2:0.2,4:0.1.")
    ] = None,
    failure_rates: Annotated[
        Path | None, typer.Option(help="Failure rate of each node, one per line. Or a .json list; in any unit.")
    ] = None,
    balance_weight: Annotated[
        float | None,
        typer.Option(
            help="Weight of balance against survival. Share of fatal losses per mean node's work above the mean."
        ),
    ] = None,
    pareto: Annotated[bool, typer.Option("--pareto", help="Show the trade-off of survival and balance.")] = False,
    compare: Annotated[str | None, typer.Option(help="eplb: compare with EPLB on a recording.")] = None,
    gpus_per_node: Annotated[int, typer.Option(help="With --compare: GPUs of a node.")] = 1,
    groups: Annotated[int, typer.Option(help="With --compare: expert groups of EPLB.")] = 1,
    plot: Annotated[Path | None, typer.Option(help="PNG for placement and recovery curves.")] = None,
    as_json: AsJson = False,
) -> None:
    """Place expert replicas by their load. Show which losses of nodes the model survives."""
    # Imported here: SciPy takes a quarter of a second that no other command should pay.
    from holdfast.cli.planner.experts.work import PlanRequest, run

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
