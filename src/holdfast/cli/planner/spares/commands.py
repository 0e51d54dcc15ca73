"""`holdfast spares`: how many spares, of what kind, give the most goodput."""

from __future__ import annotations

import typer

from holdfast.cli.help import HelpfulGroup, HelpfulTyper
from holdfast.cli.options import with_option_groups
from holdfast.cli.planner.spares import fit, map, plan, validate

app = HelpfulTyper(
    cls=HelpfulGroup,
    name="spares",
    help="Plan the number and kind of spare nodes.",
    add_completion=False,
)

app.command("plan")(with_option_groups(plan.plan))
app.command("map")(map.best_map)
app.command("validate")(validate.validate)
app.command("fit")(fit.fit)


def register(to: typer.Typer) -> None:
    """Add this module's group of commands."""
    to.add_typer(app, name="spares")
