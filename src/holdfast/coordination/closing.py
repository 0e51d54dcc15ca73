"""A job that is to end with a checkpoint, by its user's will or because its script cannot go on."""

from __future__ import annotations

from holdfast.coordination.config import CoordinatorConfig
from holdfast.coordination.ending import Ending
from holdfast.coordination.generations.stopping import Stopping
from holdfast.coordination.inputs import Shutdown
from holdfast.coordination.turn import Turn
from holdfast.errors import EXIT_INTERRUPTED

#: what the coordinator before this one was asked for, as far as the record says
_ASKED_BEFORE = Shutdown(EXIT_INTERRUPTED, "shut down on request", save=True)


class Closing:
    """`under_way` once somebody wants the job to end with a checkpoint.

    The generation in force is left as after a failure. The next one is the last: nothing is computed in it, its
    members save what they have and finish. A failure meanwhile leads to another last one; all in all it
    may take `save_timeout_s`.
    """

    def __init__(self, turn: Turn, config: CoordinatorConfig, stopping: Stopping, ending: Ending) -> None:
        self.under_way = False
        self._will = _ASKED_BEFORE
        #: why the job has failed, "" where it is only its user who wants the end
        self._cause = ""
        self._since = 0.0
        self._turn = turn
        self._config = config
        self._stopping = stopping
        self._ending = ending

    def ask(self, request: Shutdown) -> None:
        """End the job as it is asked for; asking for a checkpoint once more gives it no more time."""
        self._will = request
        self._begin(save=request.save)

    def fail(self, why: str) -> None:
        """The script cannot go on, but the state is whole: the job ends with this cause, and fails."""
        self._cause = self._cause or why
        self._begin(save=True)

    def taken_over(self) -> None:
        """The coordinator before this one was asked, and died before the job had ended."""
        plan = self._turn.record.plan
        if plan is not None and plan.last:
            self.under_way, self._since = True, self._turn.now

    def tick(self) -> None:
        """Give up what takes too long."""
        if self.under_way and self._turn.now - self._since > self._config.save_timeout_s:
            self.end()

    def end(self) -> None:
        """All is saved that can be, or nothing can be: end the job. Unless it has failed, it can be taken up again."""
        if self._cause:
            self._ending.failed(self._cause)
        else:
            self._ending.by_will(self._will.exit_code, self._will.why)

    def _begin(self, *, save: bool) -> None:
        record = self._turn.record
        if self._ending.over is not None:
            return
        if not (save and record.saves and record.plan):
            self.end()
        elif not self.under_way:
            self.under_way, self._since = True, self._turn.now
            if not record.plan.last:
                self._stopping.begin(self._turn.now)
