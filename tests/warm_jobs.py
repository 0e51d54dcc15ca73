"""Jobs and commands without cold starts: another process has done their imports once for all tests."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from contextlib import chdir, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import IO, Any

from holdfast.cli import main
from tests.harness.local_job import LocalJob
from tests.harness.local_pool import Command, Ran
from warm_start import WarmProcess

#: `holdfast`, as a script for a zygote's children.
HOLDFAST = Path(__file__).with_name("warm_command.py")


class WarmJob(LocalJob):
    """A job with processes forked after all imports; its commands run in this process."""

    def __init__(self, commands: str, *args: Any, cwd: Path | None = None, **options: Any) -> None:
        """Like LocalJob.

        Args:
            commands: the socket of the zygote of its first process (the fixture `warm_commands`).
            cwd: its working directory; None for this process's own.
        """
        super().__init__(*args, **options)
        self._commands = commands
        self._cwd = cwd

    def started(self, output: IO[bytes]) -> Any:
        words = self.command[3:]
        assert self.command == [sys.executable, "-m", "holdfast", *words]
        return WarmProcess(self._commands, HOLDFAST, words, output=output, environment=self.environment, cwd=self._cwd)

    def call(self, *arguments: str) -> str:
        words = (*arguments, "--address", self.url)
        code, printed, complained = spoken_here(Command(words, self.environment, Path.cwd()))
        if code:
            raise subprocess.CalledProcessError(code, words, printed, complained)
        return printed


def run_here(command: Command) -> Ran:
    """Run a command in this process, because starting one takes a second."""
    code, printed, complained = spoken_here(command)
    return Ran(code, printed + complained)


def spoken_here(command: Command) -> tuple[int, str, str]:
    """Run a command in this process; return its exit code, stdout and stderr."""
    printed, complained, argv, environment, code = io.StringIO(), io.StringIO(), sys.argv, dict(os.environ), 0
    try:
        sys.argv = ["holdfast", *command.words]
        os.environ.update(command.environment)
        with redirect_stdout(printed), redirect_stderr(complained), chdir(command.folder):
            main()
    except SystemExit as end:
        code = int(end.code or 0)
    finally:
        sys.argv = argv
        os.environ.clear()
        os.environ.update(environment)
    return code, printed.getvalue(), complained.getvalue()
