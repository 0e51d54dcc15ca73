"""The command line, `holdfast`. Its commands are listed in `command_table`."""

from __future__ import annotations

import errno
import traceback
from typing import Annotated, NoReturn

import typer
from typer.exceptions import TyperException

from holdfast.cli.command_table import Commands
from holdfast.cli.help import HelpfulTyper
from holdfast.cli.output import on_one_line, open_standard_streams, say, warn
from holdfast.errors import EXIT_FAILED, EXIT_OUR_FAULT, HoldfastError

app = HelpfulTyper(
    name="holdfast",
    cls=Commands,
    help="Keeps large PyTorch training jobs running through failures.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

#: errors of a disk that is full or read-only
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


def _version(asked: bool) -> None:
    if asked:
        import importlib.metadata

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
