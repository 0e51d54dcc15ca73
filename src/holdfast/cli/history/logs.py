"""`holdfast logs`: show the output of a job's workers, from the files in `--log-dir`."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated

import typer

from holdfast.cli.connection import Server
from holdfast.cli.options import with_option_groups
from holdfast.cli.output import AsJson, on_one_line, print_json_line, print_line
from holdfast.errors import BadInputError, RefusedError, UnreachableError
from holdfast.protocol.names import NAME_PATTERN

_LOOK_AGAIN_S = 0.2
_CHUNK = 1 << 20


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    app.command("logs")(with_option_groups(logs))


def logs(
    folder: Annotated[
        Path | None, typer.Argument(metavar="DIR", help="A job's --log-dir.", show_default="that of the job that runs")
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Print new output until Ctrl-C.")] = False,
    node: Annotated[
        list[str] | None, typer.Option(metavar="NODE", help="Only this node; repeatable.", show_default="all")
    ] = None,
    as_json: AsJson = False,
    *,
    server: Server,
) -> None:
    """Show the output of workers.

    The files must be on this machine, or on a file system that it shares with the nodes.
    """
    place = folder or _find_log_folder(server)
    if not place.is_dir():
        if folder is not None and re.fullmatch(NAME_PATTERN, str(folder)):
            raise BadInputError(
                f"there is no folder {folder}: give the job's --log-dir; if {folder} is a node, give --node {folder}"
            )
        raise BadInputError(
            f"there is no folder {place} on this machine: the workers' output is on the machines on which they run"
        )
    tails = Tails(place, node or (), _print_line_as_json if as_json else _print_line)
    if not tails.print_new_lines() and not follow:
        raise UnreachableError(f"no worker{_name_nodes(node)} has printed anything into {place}")
    while follow:
        time.sleep(_LOOK_AGAIN_S)
        tails.print_new_lines()
    tails.print_rest()


def _print_line(node: str, place: int, line: str) -> None:
    print_line(f"[{node}{f'.{place}' if place else ''}] {on_one_line(line)}")


def _print_line_as_json(node: str, place: int, line: str) -> None:
    print_json_line({"node": node, "place": place, "line": line})


def _name_nodes(nodes: Iterable[str] | None) -> str:
    return f" of {', '.join(nodes)}" if nodes else ""


def _find_log_folder(server: Server) -> Path:
    """Return the folder with the output of the job's workers, as its pool or coordinator reports it.

    Raises:
        RefusedError: the job writes no files.
    """
    if (pool := server.find_pool_of_job()) is not None:
        with pool as client:
            folder = client.job(server.job or "")["log_dir"]  # A job that has ended is included.
    else:
        with server.client() as client:
            folder = client.status()["log_dir"]
    if not folder:
        raise RefusedError("the job's workers print into no files: start it with --log-dir DIR")
    return Path(folder)


class Tails:
    """Prints the files of a folder, and later the lines that were added to them."""

    def __init__(self, folder: Path, nodes: Iterable[str], print_line: Callable[[str, int, str], None]) -> None:
        """Read nothing yet.

        Args:
            nodes: only the files of these nodes; () for all.
            print_line: called with the node, the local rank and the line.
        """
        self._folder, self._nodes, self._print = folder, frozenset(nodes), print_line
        self._read: dict[Path, int] = {}
        self._rest: dict[Path, bytes] = {}

    def print_new_lines(self) -> int:
        """Print the complete lines that were added to the files since the last call.

        Return the number of matching files.

        A file that became shorter is printed again from its start.
        """
        files = [path for path in sorted(self._folder.glob("*.*.log")) if self._is_wanted(path)]
        for path in files:
            with path.open("rb") as file:
                if path.stat().st_size < self._read.get(path, 0):
                    self._read[path] = 0  # The file was written again from its start.
                file.seek(self._read.get(path, 0))
                while data := file.read(_CHUNK):
                    self._add(path, data)
                self._read[path] = file.tell()
        return len(files)

    def print_rest(self) -> None:
        """Print the last lines that do not end with a newline."""
        for path, rest in self._rest.items():
            if rest:
                self._print_line(path, rest)

    def _is_wanted(self, path: Path) -> bool:
        node, _, place = path.stem.rpartition(".")
        return place.isdecimal() and (not self._nodes or node in self._nodes)

    def _add(self, path: Path, data: bytes) -> None:
        """Print the complete lines of new data, and keep the incomplete rest."""
        *lines, self._rest[path] = (self._rest.get(path, b"") + data).split(b"\n")
        for line in lines:
            self._print_line(path, line)

    def _print_line(self, path: Path, line: bytes) -> None:
        node, _, place = path.stem.rpartition(".")
        self._print(node, int(place), line.decode(errors="replace"))
