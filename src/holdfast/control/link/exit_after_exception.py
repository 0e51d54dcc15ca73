"""The end of a worker process after an exception in its script: other workers may still need its state."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import TracebackType

from holdfast.control.link.framing import Crashed
from holdfast.protocol.messages.worker import ScriptError


class ScriptErrorHook:
    """The hook for uncaught exceptions (`sys.excepthook`) while a session trains. It calls the hook that it replaces.

    The code that runs the script (control.agent.worker_process) finds it there, and uses it before the process ends.

    Args:
        ending: marks on the progress page that the script has ended, so that hang detection ignores its last activity.
        locate: adds the step, micro-batch and phase at which the script raised.
        keep: reports the error to the coordinator. Returns once the job is over, or False at once without a state to
            keep.
        save: saves the state if the script has ended normally, but before its training loop.
    """

    def __init__(
        self,
        ending: Callable[[], None],
        locate: Callable[[ScriptError], ScriptError],
        keep: Callable[[Crashed], bool],
        save: Callable[[], None],
    ) -> None:
        self.mark_ending = ending
        self.locate = locate
        self.hold_state = keep
        self.save = save
        self._before = sys.excepthook

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        self._before(kind, error, trace)

    @classmethod
    def find_installed(cls) -> ScriptErrorHook | None:
        """Return the installed hook, or None if no session trains in this process or the script has replaced it."""
        hook = sys.excepthook
        return hook if isinstance(hook, cls) else None

    def install(self) -> None:
        """Become the hook of the process."""
        sys.excepthook = self

    def remove(self) -> None:
        """Restore the previous hook. A hook that the script has set meanwhile stays."""
        if sys.excepthook is self:
            sys.excepthook = self._before
