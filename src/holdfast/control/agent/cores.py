"""For how long a worker process's threads had no core, as Linux tells of it."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from holdfast.coordination.lateness.cores import CoreWaits, ThreadClock
from holdfast.coordination.lateness.reading import Reading

_PROC = Path("/proc")


class CoreMeter:
    """Of one process.

    Args:
        pid: the process. proc: where that file system is mounted.
    """

    def __init__(self, pid: int, *, proc: Path = _PROC) -> None:
        self._pid = pid
        self._folder = str(proc / str(pid))
        self._waits = CoreWaits()

    def add_to(self, reading: Reading, now: float, *, closely: bool) -> Reading:
        """Say in a reading for how long its main thread had no core, though it was ready; `closely`: and each other."""
        threads = {self._pid: thread_clock(self._folder)}
        if closely:
            tasks = f"{self._folder}/task"
            threads |= {int(name): thread_clock(f"{tasks}/{name}") for name in _names(tasks) if int(name) != self._pid}
        clocks = {thread: clock for thread, clock in threads.items() if clock is not None}
        self._waits.forget_but(clocks)
        others_s = self._waits.look(now, clocks)
        return replace(reading, starved_s=others_s.pop(self._pid, 0.0), others_starved_s=others_s)


def thread_clock(folder: str) -> ThreadClock | None:
    """Read what the kernel tells in a thread's folder of /proc; None where it is gone, or nobody counts that."""
    try:
        with open(f"{folder}/schedstat", "rb") as counters, open(f"{folder}/stat", "rb") as stat:
            ran, waited = counters.read().split()[:2]
            text = stat.read()
            return ThreadClock(text[text.rindex(b")") + 2 :][:1] == b"R", int(ran) / 1e9, int(waited) / 1e9)
    except (OSError, ValueError):
        return None


def _names(tasks: str) -> list[str]:
    try:
        return os.listdir(tasks)
    except OSError:
        return []
