"""The command line: one module per group of commands, put together here."""

from __future__ import annotations

import errno
import importlib.metadata
import traceback
from typing import Annotated, Any, NoReturn

import typer
from typer.exceptions import TyperException

from holdfast.cli import demo, examples, schema
from holdfast.cli.experts import plan
from holdfast.cli.help import HelpfulGroup, HelpfulTyper
from holdfast.cli.history import audit, checkpoints, explain, export, logs, report
from holdfast.cli.job import act, end, look, run, servers, status
from holdfast.cli.output import on_one_line, open_standard_streams, say, warn
from holdfast.cli.pool import calibrate, jobs, nodes, serve, what_if
from holdfast.cli.simulate import command as simulate
from holdfast.errors import EXIT_FAILED, EXIT_OUR_FAULT, HoldfastError


class Commands(HelpfulGroup):
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
        group.rich_help_panel = "Plan"  # pyright: ignore[reportAttributeAccessIssue]
        return group


app = HelpfulTyper(
    name="holdfast",
    cls=Commands,
    help="Keeps large PyTorch training jobs running through failures.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

# One line per module; each adds its own commands.
demo.register(app)
examples.register(app)
run.register(app)
status.register(app)
look.register(app)
logs.register(app)
act.register(app)
end.register(app)
explain.register(app)
report.register(app)
audit.register(app)
export.register(app)
checkpoints.register(app)
servers.register(app)
serve.register(app)
jobs.register(app)
nodes.register(app)
what_if.register(app)
calibrate.register(app)
plan.register(app)
simulate.register(app)
schema.register(app)


#: errors of a disk that is full or read-only
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


def _version(asked: bool) -> None:
    if asked:
        say(f"holdfast {importlib.metadata.version('holdfast')}")
        raise typer.Exit


@app.callback()
def holdfast(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Keeps large PyTorch training jobs running through failures."""


def main() -> None:
    """Run the command line; whatever is wrong ends it with one line and its own exit code."""
    open_standard_streams()
    try:
        code = app(standalone_mode=False)
    except TyperException as error:  # an option or a command that there is not, or one that lacks its value
        message = error.format_message()
        _end(f"{message.rstrip('.')}; see --help" if message else "", error.exit_code)
    except HoldfastError as error:
        _end(str(error), error.exit_code)
    except BaseException as error:
        if isinstance(error, SystemExit):
            raise
        if isinstance(error, OSError) and error.errno in _NO_ROOM:
            what = f"{error.filename}: " if error.filename else "an output file cannot be written: "
            _end(f"{what}{error.strerror}; make room, or write elsewhere", EXIT_FAILED)
        traceback.print_exc()
        _end("this is a mistake of ours: please report it with the lines above", EXIT_OUR_FAULT)
    raise SystemExit(code)


def _end(complaint: str, code: int) -> NoReturn:
    if complaint:
        warn(f"holdfast: {on_one_line(complaint)}")
    raise SystemExit(code) from None
