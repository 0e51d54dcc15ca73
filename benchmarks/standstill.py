"""Detects whether the machine was suspended during a measurement, which makes the figures unreliable.

The cores of a virtual machine may stop for a second or more while its host has other work. A process with real-time
priority, which our own load cannot delay, wakes every 20 ms and records when it woke late.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Self

WAKE_S = 0.02
#: Seconds of delay that count as a suspension.
GAP_S = 0.1
#: Index of stolen time in the first line of /proc/stat, after the name.
_STEAL = 7


class SuspensionWatch:
    """Detects suspensions of the machine; a context manager."""

    def __init__(self) -> None:
        """Prepare; the detection starts with the `with` statement."""
        self._folder = tempfile.TemporaryDirectory(prefix="holdfast-watch-")
        self._file = Path(self._folder.name) / "gaps"
        self._process: subprocess.Popen[bytes] | None = None
        self._before: list[int] = []

    def __enter__(self) -> Self:
        self._before = _processor_time()
        with self._file.open("wb") as file:
            self._process = subprocess.Popen([sys.executable, __file__], stdout=file)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()
        self._folder.cleanup()

    def gaps(self, since: float = 0.0) -> list[float]:
        """Return the seconds of each suspension since a moment (Unix seconds)."""
        entries = [line.split() for line in self._file.read_text().splitlines()]
        return [float(gap) for at, gap in entries if float(at) >= since]

    def report(self) -> str:
        """Return a summary in one line."""
        spent = [now - before for now, before in zip(_processor_time(), self._before, strict=True)]
        taken = f"the host took {spent[_STEAL] / max(sum(spent), 1):.1%} of the cores"
        gaps = self.gaps()
        if not gaps:
            return f"{taken}; the machine was never suspended for more than {GAP_S} s"
        return (
            f"{taken}; the machine was suspended {len(gaps)} times for more than {GAP_S} s, at most {max(gaps):.2f} s"
        )


def _processor_time() -> list[int]:
    """Return the ticks of all cores by category."""
    first = Path("/proc/stat").read_text().split("\n", 1)[0]
    return [int(ticks) for ticks in first.split()[1:9]]


def _detect_suspensions() -> None:
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(50))
    except PermissionError:
        print("standstill: no real-time priority: delays by our own load count too", file=sys.stderr, flush=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process handles Ctrl-C
    parent, last = os.getppid(), time.monotonic()
    while os.getppid() == parent:
        time.sleep(WAKE_S)
        now = time.monotonic()
        if now - last - WAKE_S > GAP_S:
            print(time.time(), now - last - WAKE_S, flush=True)
        last = now


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    _detect_suspensions()
