"""Printing: results on stdout, everything else on stderr."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import math
import os
import queue
import sys
import threading
from collections.abc import Callable, Generator, Sequence
from typing import Annotated, Any, TextIO, cast

import typer

from holdfast.cli.options import OUTPUT
from holdfast.environment import log_level

#: A longer duration, or one that is not a number, is not printed.
_LONGEST_S = 1e13
#: For lines that another thread prints: most of them that wait, and how long they have at the end, in seconds.
_MOST_LINES, _LAST_LINES_S = 10_000, 1.0

AsJson = Annotated[
    bool, typer.Option("--json", help="Print JSON on stdout, and all else on stderr.", rich_help_panel=OUTPUT)
]


def open_standard_streams() -> None:
    """Open those of stdin, stdout and stderr that are closed to /dev/null, and make stdout accept any text.

    Otherwise the next file that is opened gets the number of the closed one, with everything that is printed. And a
    character that the terminal's encoding lacks would end the job; it is printed as a question mark.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            nowhere = os.open(os.devnull, os.O_RDWR)  # It gets the lowest free number, which is this one.
            os.set_inheritable(nowhere, True)
            setattr(sys, name, os.fdopen(nowhere, "w" if number else "r"))
    stdout: object = sys.stdout
    if isinstance(stdout, io.TextIOWrapper):
        stdout.reconfigure(errors="replace")


def print_line(line: str) -> None:
    """Print one line now."""
    _print(sys.stdout, line)


def warn(line: str) -> None:
    """Print one line on stderr now. The line is lost if the disk is full or the reader has closed the pipe."""
    _print_if_possible(sys.stderr, line)


@contextlib.contextmanager
def lasting_output() -> Generator[Callable[[str], None]]:
    """Yield a `print_line` that does not fail on a full disk or a pipe without a reader.

    The first line that cannot be written is reported on stderr. At the end, unwritten output is dropped.
    """
    failed = False

    def print_if_possible(line: str) -> None:
        """Print a line on stdout. Warn at the first one that cannot be written."""
        nonlocal failed
        why = _print_if_possible(sys.stdout, line)
        if why and not failed:
            failed = True
            warn(f"holdfast: the output cannot be written: {why}; the job goes on")

    try:
        yield print_if_possible
    finally:
        for number, stream in ((1, sys.stdout), (2, sys.stderr)):
            _drop_unwritten(number, stream)


def _print(stream: TextIO, line: str) -> None:
    """Print one line with one write: other processes write to the same terminal."""
    stream.write(f"{line}\n")
    stream.flush()


@contextlib.contextmanager
def called_in_a_thread(call: Callable[[str], None]) -> Generator[Callable[[str], None]]:
    """Yield a function that has `call` called in another thread, in the same order.

    A terminal that is stopped (Ctrl-S) or a full pipe must not stop a coordinator. If very many lines wait, further
    ones are dropped. At the end the thread has a second for the rest.
    """
    lines: queue.Queue[str | None] = queue.Queue(_MOST_LINES)

    def work() -> None:
        """Call `call` with each line, until None comes."""
        while (line := lines.get()) is not None:
            call(line)

    def put(line: str | None) -> None:
        """Add a line for the thread, or drop it if `_MOST_LINES` wait already."""
        with contextlib.suppress(queue.Full):
            lines.put_nowait(line)

    thread = threading.Thread(target=work, name="holdfast-output", daemon=True)
    thread.start()
    try:
        yield put
    finally:
        put(None)
        thread.join(_LAST_LINES_S)


def _print_if_possible(stream: TextIO, line: str) -> str:
    """Print one line; return why it cannot be written, or "" if it was."""
    try:
        _print(stream, line)
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _drop_unwritten(number: int, stream: TextIO) -> None:
    """Drop the output that could not be written. Otherwise Python writes it at exit, and the process fails."""
    try:
        stream.flush()
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, number)
        os.close(nowhere)


def on_one_line(text: str) -> str:
    """Return text on one line: what would end it, or order a terminal about, is written as Python writes it."""
    return "".join(
        character if character.isprintable() else repr(character)[1:-1] for character in " ".join(text.splitlines())
    )


def print_json(value: object) -> None:
    """Print a document. NaN and infinity become null."""
    print_line(json.dumps(_finite(value), indent=2, allow_nan=False))


def print_json_line(value: object) -> None:
    """Print one document of a stream, on a line of its own."""
    print_line(json.dumps(_finite(value), allow_nan=False))


def _finite(value: Any) -> Any:
    """Return a value with None in place of NaN and infinity, in lists and dictionaries, too."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in cast(dict[str, Any], value).items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in cast(Sequence[Any], value)]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def start_log(default: str) -> None:
    """Log to stderr with the time of day, at the level of the user's environment variable, or else at `default`.

    httpx logs warnings only.

    Raises:
        BadInputError: the variable names no level.
    """
    formatter = logging.Formatter("%(asctime)s %(message)s")
    formatter.default_time_format, formatter.default_msec_format = "%H:%M:%S", "%s.%03d"
    handler = logging.StreamHandler()
    handler.setFormatter(formatter)
    logging.basicConfig(level=log_level(os.environ, default).upper(), handlers=[handler])
    logging.getLogger("httpx").setLevel(logging.WARNING)  # else it logs every request, such as those to etcd


def seconds_in_words(seconds: float) -> str:
    """Return a duration with one or two units, such as "0.2 s", "75 s" or "2 h 5 min"; "-" if it is not a number."""
    if not abs(seconds) < _LONGEST_S:
        return "-"
    if seconds < 120:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    hours, days = minutes // 60, minutes // (24 * 60)
    if days >= 2:
        return f"{days} days"
    return f"{hours} h {minutes % 60} min" if hours else f"{minutes} min"
