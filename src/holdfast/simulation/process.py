"""What can be stopped and killed: a stopped process gets everything late, a dead one nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Process:
    """Base of workers, agents and coordinators."""

    def __init__(self) -> None:
        self.alive = True
        self.stopped = False
        self._backlog: list[tuple[Callable[..., object], tuple[Any, ...]]] = []

    def deliver(self, action: Callable[..., object], *args: Any) -> None:
        """Let something happen in this process: now, at its SIGCONT, or never."""
        if not self.alive:
            return
        if self.stopped:
            self._backlog.append((action, args))
        else:
            action(*args)

    def stop(self) -> None:
        """SIGSTOP: what comes from now on waits."""
        self.stopped = True

    def resume(self) -> None:
        """SIGCONT: all that came meanwhile is handled at once, in order."""
        if not self.alive or not self.stopped:
            return
        self.stopped = False
        backlog, self._backlog = self._backlog, []
        for place, (action, args) in enumerate(backlog):
            if self.stopped:  # stopped again by what it did
                self._backlog = backlog[place:] + self._backlog
                return
            if self.alive:
                action(*args)
