"""How a script that trains alone ends where it raises something: as under an agent, as far as that can be."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import TracebackType

from holdfast.errors import HoldfastError


class EndAlone:
    """Python's hook for uncaught exceptions, `sys.excepthook`, without an agent; it prints as the one before.

    An error of ours ends the process with its own exit code (Python's would be 1 for all), and what is being saved
    becomes a checkpoint before Python lets go of its threads.
    """

    def __init__(self, await_saved: Callable[[], None]) -> None:
        """Not installed yet. `await_saved`: returns once nothing is being saved any more."""
        self._await_saved = await_saved
        self._before = sys.excepthook

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Print, wait, and end.

        Raises:
            SystemExit: in place of an error of ours; Python ends with its code.
        """
        self._before(kind, error, trace)
        self._await_saved()
        if isinstance(error, HoldfastError):
            raise SystemExit(error.exit_code)

    def install(self) -> None:
        """Be the process's hook, in place of one of an earlier job."""
        if isinstance(self._before, EndAlone):
            self._before = self._before._before
        sys.excepthook = self
