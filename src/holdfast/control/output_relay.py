"""Relays the output of workers, line by line: printed with the name of the node, and to a log file for each worker.

Each process writes into two pipes, stdout and stderr. One thread reads all pipes. A slow reader of the output (a paused
terminal) blocks the prints of the workers, but nothing else in the agent.
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
#: bytes after which a line is split
MAX_LINE = 1 << 16
#: most lines of a process that are kept until it is known whether to print them
KEPT_LINES = 200
#: number of last lines to print of a failed process
TAIL_LINES = 20
#: most generations with a known rank 0
_MOST_KNOWN = 8


@dataclass(slots=True)
class _Log:
    """A worker's log file."""

    path: str
    file: int
    #: number of lines that could not be written since it failed
    lost: int = 0
    #: the reason
    why: str = ""


@dataclass(slots=True)
class _WorkerOutput:
    """The output of one process."""

    worker: str
    log: _Log | None
    #: number of its streams that have not ended
    open: int = 2
    #: whether it has failed, or None while it runs
    failed: bool | None = None
    #: lines that may be printed later, with their stream
    kept: deque[tuple[int, bytes]] = field(default_factory=lambda: deque[tuple[int, bytes]](maxlen=KEPT_LINES))


@dataclass(slots=True)
class _Pipe:
    """One stream of a process."""

    printer: _WorkerOutput
    #: 1 for stdout, 2 for stderr, both of the worker and of this process
    number: int
    path: str
    source: int
    #: bytes of an unfinished line
    rest: bytes = b""


class OutputRelay:
    """Reads the output of the workers of one node until `close`.

    The methods only pass commands to its thread, and never wait. The thread does the rest.
    """

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
        """Start the thread, without any worker.

        Args:
            node: name of the node, printed before each line.
            folder: a private folder, for the pipes.
            log_folder: folder for the log file of each worker, or "" without logs. Logs survive restarts of workers and
                jobs.
            which: the lines to print: of all workers; of rank 0; the last ones of failed processes; none.
            places: number of workers of the node.
            on_lost: called once for each log that cannot be written, with its path and the reason. Any thread.
        """
        self._on_lost = on_lost
        self._reported = set[str]()
        self._node, self._folder, self._log_folder = node, folder, log_folder
        self._which: Which = which
        self._shows_index = places > 1
        self._printers: dict[str, _WorkerOutput] = {}
        self._leaders: dict[int, str] = {}
        #: the worker with rank 0, or None before the first generation
        self._leader: str | None = None
        self._selector = selectors.DefaultSelector()
        self._wake, self._waker = os.pipe()
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._commands: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="holdfast-output", daemon=True)
        self._thread.start()

    def open(self, worker: str) -> tuple[str, str]:
        """Create the pipes of a process that is about to start, and return their paths for stdout and stderr.

        The thread reads them from now on. The worker's log is opened as well, if logs are wanted; a log that cannot be
        opened is only reported.

        Raises:
            OSError: the pipes cannot be created.
        """
        printer = _WorkerOutput(worker, self._open_log(worker) if self._log_folder else None)
        out, err = (self._open_pipe(printer, number) for number in (1, 2))
        self._post(partial(self._on_opened, printer, out, err))
        return out.path, err.path

    def _open_log(self, worker: str) -> _Log | None:
        """Open the log of a worker for appending. If that fails, report it and return None."""
        path = log_path(self._log_folder, self._node, index_of(worker))
        try:
            return _Log(path, os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600))
        except OSError as error:
            self._report(path, error)
            return None

    def _report(self, path: str, error: OSError) -> None:
        """Call `on_lost` for a log that cannot be written, unless it was called for this path before."""
        if path not in self._reported:
            self._reported.add(path)
            self._on_lost(path, error.strerror or str(error))

    def on_plan(self, generation: int, leader: str) -> None:
        """Handle the plan of a generation, in which `leader` has rank 0."""
        self._post(partial(self._on_plan, generation, leader))

    def on_generation(self, generation: int) -> None:
        """Handle that a generation is in force."""
        self._post(partial(self._on_generation, generation))

    def on_ended(self, worker: str, *, failed: bool) -> None:
        """Handle the end of a process. Its last output may still arrive."""
        self._post(partial(self._on_ended, worker, failed))

    def close(self, timeout_s: float) -> None:
        """Wait until all output of the ended processes is read, at most `timeout_s`."""
        self._post(self._on_close)
        self._thread.join(timeout_s)

    def _post(self, command: Callable[[], None]) -> None:
        self._commands.put(command)
        os.write(self._waker, b"!")

    def _open_pipe(self, printer: _WorkerOutput, number: int) -> _Pipe:
        """Create the named pipe for stdout (1) or stderr (2) of a process, and open it for reading without blocking."""
        path = f"{self._folder}/{printer.worker.replace('/', '.')}.{number}"
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        os.mkfifo(path, 0o600)
        return _Pipe(printer, number, path, os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))

    # in the thread

    def _run(self) -> None:
        """Read pipes and execute commands, until `close` was called and all output is read."""
        while not self._closing or self._printers:
            for key, _ in self._selector.select():
                if isinstance(key.data, _Pipe):
                    self._read(key.data)
                else:
                    os.read(self._wake, 1)
                    self._commands.get()()

    def _on_opened(self, printer: _WorkerOutput, *pipes: _Pipe) -> None:
        """Start to read the pipes of a process."""
        self._printers[printer.worker] = printer
        for pipe in pipes:
            self._selector.register(pipe.source, selectors.EVENT_READ, pipe)

    def _on_plan(self, generation: int, leader: str) -> None:
        """Remember the worker with rank 0 of a generation. Only the newest `_MOST_KNOWN` generations are kept."""
        self._leaders[generation] = leader
        while len(self._leaders) > _MOST_KNOWN:
            del self._leaders[min(self._leaders)]

    def _on_generation(self, generation: int) -> None:
        """Learn which worker has rank 0 now. If only its lines are printed, print its kept lines, and drop the others'.

        If the generation's plan is not known, rank 0 stays with the same worker.
        """
        self._leader = self._leaders.get(generation, self._leader)
        if self._which == "rank0" and self._leader is not None:
            for printer in self._printers.values():
                self._show_kept(printer, KEPT_LINES if printer.worker == self._leader else 0)

    def _on_ended(self, worker: str, failed: bool) -> None:
        """Note how a process ended, and finish with it if its output is complete. Ignored for an unknown worker."""
        printer = self._printers.get(worker)
        if printer is not None:
            printer.failed = failed
            self._finish_if_ended(printer)

    def _on_close(self) -> None:
        """Handle `close`: all processes have ended. If the end of one was not reported, it counts as not failed."""
        self._closing = True
        for printer in list(self._printers.values()):
            printer.failed = bool(printer.failed)
            self._finish_if_ended(printer)

    def _read(self, pipe: _Pipe) -> None:
        """Read from a pipe, and write the complete lines to the log of its process, if any.

        Also print them if `which` is "all", or if it is "rank0" and the process has rank 0. Keep them for later if it
        is "failed", or rank 0 is not known yet; else drop them. At the end of the stream, close and remove the pipe.
        """
        printer = pipe.printer
        data = os.read(pipe.source, _CHUNK)
        *lines, pipe.rest = split_lines(pipe.rest + data, at_end=not data)
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
            self._finish_if_ended(printer)

    def _write_log(self, log: _Log, lines: Sequence[bytes]) -> None:
        """Write lines to a log. If that fails, report it once, and count the lines.

        The next successful write begins with a note of the missing lines and the reason.
        """
        mark = f"\n[holdfast: {log.lost} lines are missing here: {log.why}]\n".encode() if log.lost else b""
        try:
            _write_all(log.file, mark + b"".join(lines))
        except OSError as error:
            log.lost, log.why = log.lost + len(lines), error.strerror or str(error)
            self._report(log.path, error)
        else:
            log.lost = 0

    def _finish_if_ended(self, printer: _WorkerOutput) -> None:
        """Close the log of a process and forget it, if it has ended and its output is complete.

        If only failed processes are printed and this one has failed, print its last lines.
        """
        if printer.failed is None or printer.open > 0:
            return
        if self._which == "failed":
            self._show_kept(printer, TAIL_LINES if printer.failed else 0)
        if printer.log is not None:
            os.close(printer.log.file)
        self._printers.pop(printer.worker, None)

    def _show_kept(self, printer: _WorkerOutput, most: int) -> None:
        """Print the last `most` kept lines of a process, and forget all its kept lines."""
        for number, line in list(printer.kept)[-most:] if most else ():
            self._print(printer, number, [line])
        printer.kept.clear()

    def _print(self, printer: _WorkerOutput, number: int, lines: Iterable[bytes]) -> None:
        """Print lines on stdout (1) or stderr (2), each with the node's name; with several workers, the index too."""
        index = f".{index_of(printer.worker)}" if self._shows_index else ""
        head = f"[{self._node}{index}] ".encode()
        _write(number, b"".join(head + line for line in lines))


def log_path(folder: str, node: str, place: int) -> str:
    """Return the path of the log of a worker."""
    return f"{folder}/{node}.{place}.log"


def split_lines(data: bytes, *, at_end: bool) -> list[bytes]:
    """Cut data into lines that end with a newline. The last item is the unfinished line, or b"".

    A carriage return ends a line too, because progress bars write it, and becomes a newline; alone, it is dropped. An
    unfinished line of `MAX_LINE` bytes counts as finished.

    Args:
        data: the bytes.
        at_end: whether the stream has ended, so that the last line is complete.
    """
    lines = data.splitlines(keepends=True)
    rest = b""
    if lines and not at_end and not lines[-1].endswith(b"\n") and len(lines[-1]) < MAX_LINE:
        rest = lines.pop()
    return [*(line.rstrip(b"\r\n") + b"\n" for line in lines if line != b"\r"), rest]


def _write(number: int, data: bytes) -> None:
    """Write all data. If the reader has hung up or the disk is full, the rest is dropped."""
    with contextlib.suppress(OSError):
        _write_all(number, data)


def _write_all(number: int, data: bytes) -> None:
    """Write all data to a descriptor, with as many writes as that takes."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(number, rest) :]
