"""Memory as Linux reports it: available memory, memory of processes, and kills for lack of memory."""

from __future__ import annotations

import os
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from holdfast.protocol.messages.memory import MAX_MEMORY_SAMPLES, MemorySample

_PROC, _CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")
#: Files in which control groups of version 2 and 1 count kills, as `oom_kill 3`.
_EVENTS = ("memory.events", "memory.oom_control")
#: how often an agent looks what its workers hold, seconds, and how many such looks it remembers: 12.8 s
LOOK_S = 0.05
_REMEMBERED = 256


class OomCounter:
    """Counts the kills for want of memory where a process lives: in its control group, else on the whole machine.

    Args:
        pid: the process; it must live. proc, groups: where those file systems are mounted.
    """

    def __init__(self, pid: int, *, proc: Path = _PROC, groups: Path = _CGROUPS) -> None:
        places = [folder / name for folder in _cgroup_folders(pid, proc, groups) for name in _EVENTS]
        self._file = next((place for place in (*places, proc / "vmstat") if _count_kills(place) is not None), None)
        self._before = self._kills

    @property
    def _kills(self) -> int:
        return (_count_kills(self._file) or 0) if self._file is not None else 0

    def has_struck(self) -> bool:
        """Return whether a process was killed for lack of memory since this counter was made."""
        return self._kills > self._before


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryReading:
    """What a node's workers hold, and what state they have sent and received in their lives, in bytes."""

    memory: int = 0
    sent: int = 0
    received: int = 0


class MemoryRing:
    """What a node's workers held lately, and no more of that than fits."""

    def __init__(self) -> None:
        self._looks: deque[tuple[float, MemoryReading]] = deque(maxlen=_REMEMBERED)

    def add(self, now: float, held: MemoryReading) -> None:
        """Store the present memory. `now`: seconds of any monotonic clock."""
        self._looks.append((now, held))

    def samples_since(self, now: float, seconds: float) -> tuple[MemorySample, ...]:
        """Return the samples of the `seconds` up to `now`, oldest first, with their age in seconds.

        A sample that equals both its neighbours is left out. At most `MAX_MEMORY_SAMPLES` are returned, the newest.
        """
        looks = [look for look in self._looks if now - look[0] <= seconds]
        last = len(looks) - 1
        told = [
            MemorySample(ago_s=round(max(0.0, now - at), 3), memory=held.memory, sent=held.sent, received=held.received)
            for place, (at, held) in enumerate(looks)
            if place in (0, last) or not held == looks[place - 1][1] == looks[place + 1][1]
        ]
        return tuple(told[-MAX_MEMORY_SAMPLES:])


def resident_bytes(pid: int, *, proc: Path = _PROC) -> int:
    """Return the resident memory of a process, including shared pages, or 0 if it has ended."""
    try:
        return int((proc / str(pid) / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError, ValueError):
        return 0


def available_bytes(*, proc: Path = _PROC, groups: Path = _CGROUPS) -> int | None:
    """Return how much memory a new process could use, limited by the machine and by this process's control group.

    Return None if neither is known.
    """
    found = [
        value
        for value in (_read_available(proc / "meminfo"), *map(_read_cgroup_left, _cgroup_folders(0, proc, groups)))
        if value is not None
    ]
    return min(found, default=None)


def _cgroup_folders(pid: int, proc: Path, groups: Path) -> list[Path]:
    """Return the folders that may contain the memory files of a process's control groups, or [] if they are not known.

    For each group of version 2, or with the memory controller of version 1, these are its own folder and the root: in a
    container, the own folder may not be mounted.

    Args:
        pid: of the process; 0 for this one.
        proc: the mounted /proc.
        groups: the folder where the control groups are mounted.
    """
    try:
        lines = (proc / (str(pid) if pid else "self") / "cgroup").read_text().splitlines()
    except OSError:
        return []
    found: list[Path] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "" or "memory" in controllers.split(","):
            base = groups / "memory" if controllers else groups
            found += [base / path.lstrip("/"), base]  # In a container, the group's own path may not be mounted.
    return found


def _count_kills(file: Path) -> int | None:
    return _read_number(file, "oom_kill")


def _read_available(meminfo: Path) -> int | None:
    kilobytes = _read_number(meminfo, "MemAvailable:")
    return kilobytes << 10 if kilobytes is not None else None


def _read_cgroup_left(folder: Path) -> int | None:
    """Return the bytes that a control group of version 2 may still use, or None without a known limit."""
    try:
        limit, used = ((folder / name).read_text().strip() for name in ("memory.max", "memory.current"))
    except OSError:
        return None
    return int(limit) - int(used) if limit.isdigit() and used.isdigit() else None


def _read_number(file: Path, name: str) -> int | None:
    """Return the second word of the first line whose first word is `name`, as a number.

    Return None if there is no such line with a number, or the file cannot be read.
    """
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return None
    words = (line.split() for line in lines)
    return next((int(line[1]) for line in words if len(line) > 1 and line[0] == name and line[1].isdigit()), None)
