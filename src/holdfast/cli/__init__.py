"""The command line, `holdfast`. Its commands are listed in `command_table`."""

from __future__ import annotations

import errno
import re
import traceback
from typing import Annotated, Any, NoReturn

import typer
from typer.exceptions import TyperException

from holdfast.cli.command_table import Commands
from holdfast.cli.help import HelpfulTyper
from holdfast.cli.output import on_one_line, open_standard_streams, print_line, warn
from holdfast.errors import EXIT_FAILED, EXIT_OUR_FAULT, HoldfastError

app = HelpfulTyper(
    name="holdfast",
    cls=Commands,
    help="Keeps large PyTorch training jobs running through failures.",
    pretty_exceptions_enable=False,
)

#: errors of a disk that is full or read-only
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


def _print_version(asked: bool) -> None:
    """Print the version and exit, if it is asked for."""
    if asked:
        import importlib.metadata

        print_line(f"holdfast {importlib.metadata.version('holdfast')}")
        raise typer.Exit


@app.callback()
def holdfast(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Keeps large PyTorch training jobs running through failures."""


def main() -> None:
    """Run the command line, and end with `SystemExit`. An error ends it with one line on stderr and its own exit code.

    An unexpected error prints its traceback and a request to report it, except for a full or read-only disk.
    """
    open_standard_streams()
    try:
        code = app(standalone_mode=False)
    except TyperException as error:  # an unknown option or command, or one that lacks its value
        _exit_with(_usage_error(error), error.exit_code)
    except HoldfastError as error:
        _exit_with(str(error), error.exit_code)
    except BaseException as error:
        if isinstance(error, SystemExit):
            raise
        if isinstance(error, OSError) and error.errno in _NO_ROOM:
            what = f"{error.filename}: " if error.filename else "an output file cannot be written: "
            _exit_with(f"{what}{error.strerror}; make room, or write elsewhere", EXIT_FAILED)
        traceback.print_exc()
        _exit_with("this is a mistake of ours: please report it with the lines above", EXIT_OUR_FAULT)
    raise SystemExit(code)


def _usage_error(error: TyperException) -> str:
    """Return the message for a command line that cannot be used: the problem, the value, and where to look.

    "" if the list of commands was printed instead. Known mistakes, such as a job given as an argument, get a hint.
    """
    message = error.format_message()
    if not message:
        return ""
    cause: Any = error.__cause__
    if details := getattr(cause, "errors", None):  # Typer's message lacks the value, which pydantic's error has.
        message = f"{message.rstrip('.')}, not {str(details()[0]['input'])!r}"
    context: Any = getattr(error, "ctx", None)
    command = context.command_path if context is not None else ""
    parameters: Any = context.command.params if context is not None else ()
    takes_job = any("--job" in parameter.opts for parameter in parameters)
    takes_arguments = any(parameter.param_type_name == "argument" for parameter in parameters)
    extra = re.fullmatch(r"Got unexpected extra argument\(s\) \((\S+)\)\.?", message)
    if extra and takes_job and not takes_arguments:
        return f"`{command}` takes no argument {extra[1]!r}: name a job with -j {extra[1]}; see {command} --help"
    if command == "holdfast scale" and (number := re.fullmatch(r"No such option: (-[0-9]+)", message.rstrip("."))):
        return f"the size is '{number[1]}': to remove nodes, name them: holdfast drain NODE"
    return f"{message} See --help" if message.endswith("?") else f"{message.rstrip('.')}; see --help"


def _exit_with(complaint: str, code: int) -> NoReturn:
    """Print a complaint on stderr, unless it is "", and end the process with this exit code."""
    if complaint:
        warn(f"holdfast: {on_one_line(complaint)}")
    raise SystemExit(code) from None
