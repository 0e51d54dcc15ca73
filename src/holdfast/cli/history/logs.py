"""`holdfast logs`: what a job's workers have printed, from the files that `--log-dir` keeps."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated

import typer

from holdfast.cli.connection import Server
from holdfast.cli.options import grouped
from holdfast.cli.output import AsJson, on_one_line, print_json_line, say
from holdfast.errors import BadInputError, RefusedError, UnreachableError
from holdfast.protocol.names import NAME_PATTERN

_LOOK_AGAIN_S = 0.2
_CHUNK = 1 << 20


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    app.command("logs")(grouped(logs))


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
    place = folder or _folder_of(server)
    if not place.is_dir():
        if folder is not None and re.fullmatch(NAME_PATTERN, str(folder)):
            raise BadInputError(
                f"there is no folder {folder}: give the job's --log-dir; if {folder} is a node, give --node {folder}"
            )
        raise BadInputError(f"there is no folder {place} on this machine: the workers' output lies where they run")
    tails = Tails(place, node or (), _say_json if as_json else _say)
    if not tails.look() and not follow:
        raise UnreachableError(f"no worker{_of(node)} has printed anything into {place}")
    while follow:
        time.sleep(_LOOK_AGAIN_S)
        tails.look()
    tails.end()


def _say(node: str, place: int, line: str) -> None:
    say(f"[{node}{f'.{place}' if place else ''}] {on_one_line(line)}")


def _say_json(node: str, place: int, line: str) -> None:
    print_json_line({"node": node, "place": place, "line": line})


def _of(nodes: Iterable[str] | None) -> str:
    return f" of {', '.join(nodes)}" if nodes else ""


def _folder_of(server: Server) -> Path:
    if (pool := server.of_pool()) is not None:
        with pool as client:
            folder = client.job(server.job or "")["log_dir"]  # A job that has ended is included.
    else:
        with server.client() as client:
            folder = client.status()["log_dir"]
    if not folder:
        raise RefusedError("the job's workers print into no files: start it with --log-dir DIR")
    return Path(folder)


class Tails:
    """Reads the files of a folder on, each from where it was left."""

    def __init__(self, folder: Path, nodes: Iterable[str], print_line: Callable[[str, int, str], None]) -> None:
        """Read nothing yet. `nodes`: only of these, () for all. `print_line`: called with node, place and line."""
        self._folder, self._nodes, self._print = folder, frozenset(nodes), print_line
        self._read: dict[Path, int] = {}
        self._rest: dict[Path, bytes] = {}

    def look(self) -> int:
        """Print the lines that are new; return how many files there are."""
        files = [path for path in sorted(self._folder.glob("*.*.log")) if self._wanted(path)]
        for path in files:
            with path.open("rb") as file:
                if path.stat().st_size < self._read.get(path, 0):
                    self._read[path] = 0  # it was begun anew
                file.seek(self._read.get(path, 0))
                while data := file.read(_CHUNK):
                    self._take(path, data)
                self._read[path] = file.tell()
        return len(files)

    def end(self) -> None:
        """Print what is no whole line."""
        for path, rest in self._rest.items():
            if rest:
                self._say(path, rest)

    def _wanted(self, path: Path) -> bool:
        node, _, place = path.stem.rpartition(".")
        return place.isdecimal() and (not self._nodes or node in self._nodes)

    def _take(self, path: Path, data: bytes) -> None:
        *lines, self._rest[path] = (self._rest.get(path, b"") + data).split(b"\n")
        for line in lines:
            self._say(path, line)

    def _say(self, path: Path, line: bytes) -> None:
        node, _, place = path.stem.rpartition(".")
        self._print(node, int(place), line.decode(errors="replace"))
