"""What workers print, line by line: with their node's name before it, and into a file for each of them.

Each process writes into two pipes of its own, stdout and stderr. One thread reads all of them: whoever is slow to take
the lines (a terminal that is held) slows down the workers' prints, and nothing else of the agent.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import Literal

from holdfast.protocol.names import index_of

Which = Literal["all", "rank0", "failed", "none"]

_CHUNK = 1 << 16
#: a line that is longer is cut
MAX_LINE = 1 << 16
#: lines of a process that are kept, until it is known whether they are to be shown
KEPT_LINES = 200
#: shown of one that has failed
TAIL_LINES = 20
#: generations whose first members are known
_MOST_KNOWN = 8


@dataclass(slots=True)
class _Log:
    """A worker's log file. `lost`: lines that could not be written since it failed, and why."""

    path: str
    file: int
    lost: int = 0
    why: str = ""


@dataclass(slots=True)
class _Printer:
    """One process. `open`: how many of its streams have not ended; `failed`: None until it has ended itself."""

    worker: str
    log: _Log | None
    open: int = 2
    failed: bool | None = None
    kept: deque[tuple[int, bytes]] = field(default_factory=lambda: deque[tuple[int, bytes]](maxlen=KEPT_LINES))


@dataclass(slots=True)
class _Pipe:
    """One stream of a process. `number`: 1 for stdout, 2 for stderr, theirs as ours. `rest`: no whole line yet."""

    printer: _Printer
    number: int
    path: str
    source: int
    rest: bytes = b""


class OutputRelay:
    """Reads what the workers of one node print until `close`. Its methods only pass on to its thread what they are
    told, and never wait; all else is the thread's."""

    def __init__(
        self,
        node: str,
        folder: str,
        *,
        log_folder: str = "",
        which: Which = "all",
        places: int = 1,
        on_lost: Callable[[str, str], object] = lambda _file, _why: None,
    ) -> None:
        """Read nothing yet.

        Args:
            folder: a private one, for the pipes. log_folder: for a file of each place, "" for none; kept across
                restarts of its processes, and of jobs.
            which: whose lines are printed: everybody's; those of rank 0; the last ones of processes that fail; none.
            places: how many workers the node has.
            on_lost: called once for each log that cannot be written, with its path and the reason. Any thread.
        """
        self._on_lost = on_lost
        self._reported = set[str]()
        self._node, self._folder, self._log_folder = node, folder, log_folder
        self._which: Which = which
        self._named_places = places > 1
        self._printers: dict[str, _Printer] = {}
        self._leaders: dict[int, str] = {}
        #: whose rank is 0 as far as is known here; None before the first generation
        self._leader: str | None = None
        self._selector = selectors.DefaultSelector()
        self._wake, self._waker = os.pipe()
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._told: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="holdfast-output", daemon=True)
        self._thread.start()

    def open(self, worker: str) -> tuple[str, str]:
        """Make the pipes of a process that is about to start; return where it is to write stdout and stderr.

        Raises:
            OSError: they cannot be made.
        """
        printer = _Printer(worker, self._open_log(worker) if self._log_folder else None)
        out, err = (self._pipe(printer, number) for number in (1, 2))
        self._tell(partial(self._opened, printer, out, err))
        return out.path, err.path

    def _open_log(self, worker: str) -> _Log | None:
        """Open a worker's log; without one, the worker is started all the same."""
        path = log_path(self._log_folder, self._node, index_of(worker))
        try:
            return _Log(path, os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600))
        except OSError as error:
            self._report(path, error)
            return None

    def _report(self, path: str, error: OSError) -> None:
        if path not in self._reported:
            self._reported.add(path)
            self._on_lost(path, error.strerror or str(error))

    def knows(self, generation: int, leader: str) -> None:
        """The plan of a generation names this worker first."""
        self._tell(partial(self._known, generation, leader))

    def entered(self, generation: int) -> None:
        """A generation is in force."""
        self._tell(partial(self._leads, generation))

    def ended(self, worker: str, *, failed: bool) -> None:
        """A process has ended; what it has printed last may still be on its way."""
        self._tell(partial(self._ended, worker, failed))

    def close(self, timeout_s: float) -> None:
        """Wait until all is read of the processes, which have ended; no longer than this time."""
        self._tell(self._close)
        self._thread.join(timeout_s)

    def _tell(self, what: Callable[[], None]) -> None:
        self._told.put(what)
        os.write(self._waker, b"!")

    def _pipe(self, printer: _Printer, number: int) -> _Pipe:
        path = f"{self._folder}/{printer.worker.replace('/', '.')}.{number}"
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        os.mkfifo(path, 0o600)
        return _Pipe(printer, number, path, os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))

    # ---- the thread ----

    def _run(self) -> None:
        while not self._closing or self._printers:
            for key, _ in self._selector.select():
                if isinstance(key.data, _Pipe):
                    self._read(key.data)
                else:
                    os.read(self._wake, 1)
                    self._told.get()()

    def _opened(self, printer: _Printer, *pipes: _Pipe) -> None:
        self._printers[printer.worker] = printer
        for pipe in pipes:
            self._selector.register(pipe.source, selectors.EVENT_READ, pipe)

    def _known(self, generation: int, leader: str) -> None:
        self._leaders[generation] = leader
        while len(self._leaders) > _MOST_KNOWN:
            del self._leaders[min(self._leaders)]

    def _leads(self, generation: int) -> None:
        self._leader = self._leaders.get(generation, self._leader)
        if self._which == "rank0" and self._leader is not None:
            for printer in self._printers.values():
                self._show_kept(printer, KEPT_LINES if printer.worker == self._leader else 0)

    def _ended(self, worker: str, failed: bool) -> None:
        printer = self._printers.get(worker)
        if printer is not None:
            printer.failed = failed
            self._settle(printer)

    def _close(self) -> None:
        """All processes have ended, those too of which nobody has said so."""
        self._closing = True
        for printer in list(self._printers.values()):
            printer.failed = bool(printer.failed)
            self._settle(printer)

    def _read(self, pipe: _Pipe) -> None:
        printer = pipe.printer
        data = os.read(pipe.source, _CHUNK)
        *lines, pipe.rest = cut(pipe.rest + data, at_end=not data)
        if printer.log is not None:
            self._write_log(printer.log, lines)
        if self._which == "all" or (self._which == "rank0" and self._leader == printer.worker):
            self._print(printer, pipe.number, lines)
        elif self._which == "failed" or self._leader is None:
            printer.kept.extend((pipe.number, line) for line in lines)
        if not data:
            self._selector.unregister(pipe.source)
            os.close(pipe.source)
            os.unlink(pipe.path)
            printer.open -= 1
            self._settle(printer)

    def _write_log(self, log: _Log, lines: Sequence[bytes]) -> None:
        """Write lines; if that fails, count them, and say in the log how many are missing once it can be written."""
        mark = f"\n[holdfast: {log.lost} lines are missing here: {log.why}]\n".encode() if log.lost else b""
        try:
            _write_all(log.file, mark + b"".join(lines))
        except OSError as error:
            log.lost, log.why = log.lost + len(lines), error.strerror or str(error)
            self._report(log.path, error)
        else:
            log.lost = 0

    def _settle(self, printer: _Printer) -> None:
        """Forget a process that has ended and has nothing more to say; show the end of it, where it has failed."""
        if printer.failed is None or printer.open > 0:
            return
        if self._which == "failed":
            self._show_kept(printer, TAIL_LINES if printer.failed else 0)
        if printer.log is not None:
            os.close(printer.log.file)
        self._printers.pop(printer.worker, None)

    def _show_kept(self, printer: _Printer, most: int) -> None:
        for number, line in list(printer.kept)[-most:] if most else ():
            self._print(printer, number, [line])
        printer.kept.clear()

    def _print(self, printer: _Printer, number: int, lines: Iterable[bytes]) -> None:
        place = f".{index_of(printer.worker)}" if self._named_places else ""
        head = f"[{self._node}{place}] ".encode()
        _write(number, b"".join(head + line for line in lines))


def log_path(folder: str, node: str, place: int) -> str:
    """Return the file of a worker, by its place on the node."""
    return f"{folder}/{node}.{place}.log"


def cut(data: bytes, *, at_end: bool) -> list[bytes]:
    """Cut data into lines, each with its end; the last of them is what is no whole line yet (b"" `at_end` of all).

    A carriage return ends a line too, as a progress bar writes it.
    """
    lines = data.splitlines(keepends=True)
    rest = b""
    if lines and not at_end and not lines[-1].endswith(b"\n") and len(lines[-1]) < MAX_LINE:
        rest = lines.pop()
    return [*(line.rstrip(b"\r\n") + b"\n" for line in lines if line != b"\r"), rest]


def _write(number: int, data: bytes) -> None:
    """Write all; a reader who has hung up, or a full disk, gets nothing more of it."""
    with contextlib.suppress(OSError):
        _write_all(number, data)


def _write_all(number: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(number, left) :]
