"""`holdfast spares`: how many spares, of what kind, give the most goodput."""

from __future__ import annotations

import typer

from holdfast.cli.options import grouped
from holdfast.cli.spares import fit, map, plan, validate

app = typer.Typer(
    name="spares",
    help="Plan spares: how many, of what kind, give a cluster the most goodput.",
    no_args_is_help=True,
    add_completion=False,
    rich_help_panel="Plan",
)

app.command("plan")(grouped(plan.plan))
app.command("map")(map.best_map)
app.command("validate")(validate.validate)
app.command("fit")(fit.fit)
