"""What becomes of a worker process whose script has ended with an exception: perhaps others need what it has."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import TracebackType

from holdfast.control.link.framing import Crashed
from holdfast.protocol.messages.worker import ScriptError


class LastWords:
    """Python's hook for uncaught exceptions, `sys.excepthook`, while a session trains; it prints as the one before it.

    What runs the script (control.agent.worker_process) looks for it there, and asks it before it lets the process end.

    Args:
        ending: says on the page of progress that the script has ended, so that nobody judges what it was about.
        locate: says at which step, micro-batch and phase the script has raised.
        keep: tells the coordinator, and returns only once the job is over, or False at once where nothing can be kept.
        save: the script has ended by itself before its loop had: saves what that had led to.
    """

    def __init__(
        self,
        ending: Callable[[], None],
        locate: Callable[[ScriptError], ScriptError],
        keep: Callable[[Crashed], bool],
        save: Callable[[], None],
    ) -> None:
        self.ending = ending
        self.locate = locate
        self.keep = keep
        self.save = save
        self._before = sys.excepthook

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        self._before(kind, error, trace)

    @classmethod
    def installed(cls) -> LastWords | None:
        """Return the one that is there, None where no session trains in this process."""
        hook = sys.excepthook
        return hook if isinstance(hook, cls) else None

    def install(self) -> None:
        """Be the process's hook."""
        sys.excepthook = self

    def remove(self) -> None:
        """Leave things as they were; a hook that the script has set meanwhile stays."""
        if sys.excepthook is self:
            sys.excepthook = self._before
