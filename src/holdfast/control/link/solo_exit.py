"""The end of a script that trains without an agent and raised an exception.

It is as close as possible to the end under an agent.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import TracebackType

from holdfast.errors import HoldfastError


class SoloExitHook:
    """The hook for uncaught exceptions (`sys.excepthook`) without an agent. It calls the hook that it replaces.

    An error of holdfast ends the process with the error's own exit code, not with Python's 1. A checkpoint that is
    being saved is finished before Python abandons its threads.
    """

    def __init__(self, await_saved: Callable[[], None]) -> None:
        """Create the hook, and do not install it yet.

        Args:
            await_saved: returns once no save is in progress.
        """
        self._await_saved = await_saved
        self._before = sys.excepthook

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Print the error, wait for the save, and end.

        Raises:
            SystemExit: instead of an error of holdfast, with its exit code.
        """
        self._before(kind, error, trace)
        self._await_saved()
        if isinstance(error, HoldfastError):
            raise SystemExit(error.exit_code)

    def install(self) -> None:
        """Become `sys.excepthook`. Replace the hook of an earlier job, but keep the one that it has replaced."""
        if isinstance(self._before, SoloExitHook):
            self._before = self._before._before
        sys.excepthook = self
