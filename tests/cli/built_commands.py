"""Commands built once and run many times in this process, because building them takes longer than most runs."""

from __future__ import annotations

import typer
from typer.testing import CliRunner

from holdfast.errors import HoldfastError


class BuiltCommands:
    """The commands of a Typer application."""

    def __init__(self, app: typer.Typer) -> None:
        self._command = typer.main.get_command(app)

    def run(self, *words: str) -> tuple[object, str, str]:
        """Return the exit code, stdout, and the line that `holdfast.cli.main` prints for a holdfast error, or ""."""
        code, complaint = None, ""
        with CliRunner().isolation() as (out, _, _):
            try:
                self._command.main(args=list(words), prog_name="holdfast")
            except HoldfastError as error:
                code, complaint = error.exit_code, str(error)
            except SystemExit as end:
                code = end.code
            return code, out.getvalue().decode(), complaint
