"""The command line: one module per group of commands, put together here."""

from __future__ import annotations

import sys
import traceback
from typing import Any

import typer
from typer.core import TyperGroup

from holdfast.cli.experts import place
from holdfast.cli.job import cluster, inspect, replay, report, run
from holdfast.errors import EXIT_OUR_FAULT, HoldfastError


class Commands(TyperGroup):
    """All commands; `spares` is loaded only where it is used: SciPy takes longer than most commands do.

    (Typer brings its own copy of click, so its types have no public names.)
    """

    def list_commands(self, ctx: Any) -> list[str]:
        return [*super().list_commands(ctx), "spares"]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name != "spares":
            return super().get_command(ctx, cmd_name)
        from holdfast.cli.spares import commands

        group = typer.main.get_command(commands.app)
        group.name = cmd_name
        return group


app = typer.Typer(
    name="holdfast",
    cls=Commands,
    help="Keeps large training jobs moving.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)

# One line per module; each adds its own commands.
run.register(app)
replay.register(app)
cluster.register(app)
inspect.register(app)
report.register(app)
place.register(app)


def main() -> None:
    """Run the command line; errors of ours end it with one line and their own exit code."""
    try:
        app()
    except HoldfastError as error:
        print(f"holdfast: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None
    except BaseException as error:
        if isinstance(error, SystemExit):
            raise
        traceback.print_exc()
        print("holdfast: this is a mistake of ours: please report it with the lines above", file=sys.stderr)
        raise SystemExit(EXIT_OUR_FAULT) from None
