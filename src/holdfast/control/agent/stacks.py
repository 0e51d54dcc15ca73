"""Reads where the threads of a node's workers stand in their programs, and for how long they had no core."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from holdfast.control.link.stacks import STACKS_SIGNAL
from holdfast.control.processes import ProcessHandle, is_stopped
from holdfast.coordination.timing.reading import CoreWaits, ProgressAccount, Reading, ThreadClock
from holdfast.protocol.messages.progress import Collective, Stacks, WorkerStack

#: an answer takes a millisecond where the process gets a core
_PATIENCE_S = 0.1
_LOOK_S = 0.002
_CHARACTERS = 8000
#: what differs from one process to the next, and says nothing
_ADDRESS = re.compile(r"0x[0-9a-f]+ ")
_PROC = Path("/proc")


class StackReader:
    """Asks some processes for their stacks, each by its worker's id, at once."""

    def __init__(self, processes: Mapping[str, tuple[ProcessHandle, str]]) -> None:
        """Send each process the signal to write its stacks, except stopped ones and those without a file.

        Args:
            processes: by worker, each with the file to which it writes.
        """
        self._asked = {
            worker: path
            for worker, (handle, path) in processes.items()
            if path and os.path.exists(path) and not is_stopped(handle.pid)
        }
        self._begin = {worker: os.path.getsize(path) for worker, path in self._asked.items()}
        for worker in self._asked:
            processes[worker][0].send_signal(STACKS_SIGNAL)

    async def read(self) -> dict[str, str]:
        """Wait up to 0.1 s, and return the stacks that were requested from the workers, by worker.

        Workers without a timely answer are left out.
        """
        waiting = dict(self._asked)
        loop, sizes, found = asyncio.get_running_loop(), dict(self._begin), dict[str, str]()
        until = loop.time() + _PATIENCE_S
        while waiting and loop.time() < until:
            await asyncio.sleep(_LOOK_S)
            for worker, path in list(waiting.items()):
                size = os.path.getsize(path)
                if size == sizes[worker] > self._begin[worker]:  # It has stopped growing.
                    found[worker] = self._read_text(worker, path)
                    del waiting[worker]
                sizes[worker] = size
        return found

    def _read_text(self, worker: str, path: str) -> str:
        """Return the text that a worker has added to its file: at most `_CHARACTERS`, without addresses."""
        with open(path, encoding="utf-8", errors="replace") as file:
            file.seek(self._begin[worker])
            return _ADDRESS.sub("", file.read(4 * _CHARACTERS))[:_CHARACTERS]


def make_worker_stacks(
    number: int, texts: Mapping[str, str], accounts: Mapping[str, ProgressAccount], now: float
) -> Stacks:
    """Return the message with the stacks and the newest collectives of all workers, 64 at most.

    Args:
        number: of the request.
        texts: stacks by worker; "" is reported for workers without.
        accounts: progress of the workers, with their waits in collectives.
        now: time of the accounts, on the machine's monotonic clock.
    """
    told: list[WorkerStack] = []
    for worker in list(dict.fromkeys((*accounts, *texts)))[:64]:
        waits = accounts[worker].waits if worker in accounts else ()
        collectives = tuple(
            Collective(
                what=wait.what,
                size=wait.size,
                bytes=wait.bytes,
                began_s=max(0.0, now - wait.since),
                took_s=None if wait.until is None else max(0.0, wait.until - wait.since),
            )
            for wait in waits
        )
        told.append(WorkerStack(worker=worker, stack=texts.get(worker, ""), collectives=collectives))
    return Stacks(number=number, workers=tuple(told))


class CoreMeter:
    """Measures how long the main thread of a process waits for a core.

    Args:
        pid: the process.
        proc: where the proc file system is mounted.
    """

    def __init__(self, pid: int, *, proc: Path = _PROC) -> None:
        self._pid = pid
        self._folder = str(proc / str(pid))
        self._waits = CoreWaits()

    def add_to(self, reading: Reading, now: float, *, closely: bool) -> Reading:
        """Return a reading with the total seconds for which the main thread was ready to run but had no core.

        The seconds are 0 if the kernel does not count them.

        Args:
            reading: progress of this process.
            now: on the machine's monotonic clock.
            closely: whether to add these seconds for all other threads, too.
        """
        threads = {self._pid: thread_clock(self._folder)}
        if closely:
            tasks = f"{self._folder}/task"
            threads |= {int(name): thread_clock(f"{tasks}/{name}") for name in _names(tasks) if int(name) != self._pid}
        clocks = {thread: clock for thread, clock in threads.items() if clock is not None}
        self._waits.forget_but(clocks)
        others_s = self._waits.measure(now, clocks)
        return replace(reading, starved_s=others_s.pop(self._pid, 0.0), others_starved_s=others_s)


def thread_clock(folder: str) -> ThreadClock | None:
    """Read a thread's clock from /proc, or None if the thread is gone or the kernel does not count."""
    try:
        with open(f"{folder}/schedstat", "rb") as counters, open(f"{folder}/stat", "rb") as stat:
            ran, waited = counters.read().split()[:2]
            text = stat.read()
            return ThreadClock(text[text.rindex(b")") + 2 :][:1] == b"R", int(ran) / 1e9, int(waited) / 1e9)
    except (OSError, ValueError):
        return None


def _names(tasks: str) -> list[str]:
    """Return the ids of a process's threads, as text, or [] if it is gone."""
    try:
        return os.listdir(tasks)
    except OSError:
        return []
