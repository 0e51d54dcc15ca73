"""The user's will that the job ends: at once, or once its members have saved what it has led to."""

from __future__ import annotations

from holdfast.coordination.ending import Ending
from holdfast.coordination.inputs import CoordinatorConfig, Shutdown
from holdfast.coordination.stopping import Stopping
from holdfast.coordination.turn import Turn
from holdfast.errors import EXIT_INTERRUPTED

#: what the coordinator before this one was asked for, as far as the record says
_ASKED_BEFORE = Shutdown(EXIT_INTERRUPTED, "shut down on request", save=True)


class Closing:
    """`will` is None until somebody wants the job to end with a checkpoint.

    The epoch in force is left as after a failure. The next one is the last: nothing is computed in it, its members save
    what they have and finish. A failure meanwhile leads to another last one; all in all it may take `save_timeout_s`.
    """

    def __init__(self, turn: Turn, config: CoordinatorConfig, stopping: Stopping, ending: Ending) -> None:
        self.will: Shutdown | None = None
        self._since = 0.0
        self._turn = turn
        self._config = config
        self._stopping = stopping
        self._ending = ending

    def ask(self, request: Shutdown) -> None:
        """End the job as it is asked for; asking for a checkpoint once more gives it no more time."""
        record = self._turn.record
        if not (request.save and record.saves and record.plan):
            self._ending.by_will(request.exit_code, request.why)
            return
        if self.will is None:
            self._since = self._turn.now
            if not record.plan.last:
                self._stopping.begin(self._turn.now)
        self.will = request

    def taken_over(self) -> None:
        """The coordinator before this one was asked, and died before the job had ended."""
        plan = self._turn.record.plan
        if plan is not None and plan.last:
            self.will, self._since = _ASKED_BEFORE, self._turn.now

    def tick(self) -> None:
        """Give up what takes too long."""
        if self.will is not None and self._turn.now - self._since > self._config.save_timeout_s:
            self.end()

    def end(self) -> None:
        """All is saved that can be, or nothing can be: end the job. It can be taken up again."""
        will = self.will or _ASKED_BEFORE
        self._ending.by_will(will.exit_code, will.why)
