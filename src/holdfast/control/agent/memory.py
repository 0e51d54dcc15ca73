"""Memory as Linux tells of it: what is left of it, and how often it has killed a process for want of it."""

from __future__ import annotations

from pathlib import Path

_PROC, _CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")
#: where control groups of version 2 and 1 count what was killed, and how the files are read: `oom_kill 3`
_EVENTS = ("memory.events", "memory.oom_control")


class OomCounter:
    """Counts the kills for want of memory where a process lives: in its control group, else on the whole machine.

    Args:
        pid: the process; it must live. proc, groups: where those file systems are mounted.
    """

    def __init__(self, pid: int, *, proc: Path = _PROC, groups: Path = _CGROUPS) -> None:
        places = [folder / name for folder in _folders(pid, proc, groups) for name in _EVENTS]
        self._file = next((place for place in (*places, proc / "vmstat") if _kills(place) is not None), None)
        self._before = self._kills

    @property
    def _kills(self) -> int:
        return (_kills(self._file) or 0) if self._file is not None else 0

    def has_struck(self) -> bool:
        """Tell whether somebody was killed for want of memory since this counter was made."""
        return self._kills > self._before


def available_bytes(*, proc: Path = _PROC, groups: Path = _CGROUPS) -> int | None:
    """Return how much memory a new process could have, of the machine and of this process's group; None: not known."""
    found = [
        value for value in (_available(proc / "meminfo"), *map(_left, _folders(0, proc, groups))) if value is not None
    ]
    return min(found, default=None)


def _folders(pid: int, proc: Path, groups: Path) -> list[Path]:
    """Return the folders of a process's control group, as far as it has any with a controller for memory."""
    try:
        lines = (proc / (str(pid) if pid else "self") / "cgroup").read_text().splitlines()
    except OSError:
        return []
    found: list[Path] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "" or "memory" in controllers.split(","):
            base = groups / "memory" if controllers else groups
            found += [base / path.lstrip("/"), base]  # (in a container the group's own path may not be mounted)
    return found


def _kills(file: Path) -> int | None:
    return _number(file, "oom_kill")


def _available(meminfo: Path) -> int | None:
    kilobytes = _number(meminfo, "MemAvailable:")
    return kilobytes << 10 if kilobytes is not None else None


def _left(folder: Path) -> int | None:
    """Return what a control group of version 2 may still take; None: no limit, or not known."""
    try:
        limit, used = ((folder / name).read_text().strip() for name in ("memory.max", "memory.current"))
    except OSError:
        return None
    return int(limit) - int(used) if limit.isdigit() and used.isdigit() else None


def _number(file: Path, name: str) -> int | None:
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return None
    words = (line.split() for line in lines)
    return next((int(line[1]) for line in words if len(line) > 1 and line[0] == name and line[1].isdigit()), None)
