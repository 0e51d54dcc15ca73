"""A job that is to end with a checkpoint, by its user's will or because its script cannot go on."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from holdfast.coordination.config import CoordinatorConfig
from holdfast.coordination.generations.stopping import Stopping
from holdfast.coordination.inputs import Shutdown
from holdfast.coordination.recovery.ending import Ending
from holdfast.coordination.turn import Transaction
from holdfast.errors import EXIT_BAD_INPUT, EXIT_ENDED, EXIT_FAILED, EXIT_INTERRUPTED
from holdfast.protocol.record import LastWill

#: of a coordinator that ended before it had written any
_ASKED_BEFORE = LastWill(why="shut down on request", exit_code=EXIT_INTERRUPTED)


class Closing:
    """`under_way` once somebody wants the job to end with a checkpoint.

    The generation in force is left as after a failure. The next one is the last: nothing is computed in it, its
    members save what they have and finish. A failure meanwhile leads to another last one; all in all it
    may take `save_timeout_s`. What is to follow is in the record, for whichever coordinator sees the end.
    Where all workers are being replaced for another layout the last generation is that of those who come: until then
    the state is in the memory of the nodes alone.
    """

    def __init__(
        self,
        transaction: Transaction,
        config: CoordinatorConfig,
        stopping: Stopping,
        ending: Ending,
        goes_back: Callable[[str], bool],
    ) -> None:
        """`goes_back`: told why the job is to fail, undoes what has led to that, or tells that it cannot."""
        self._goes_back = goes_back
        self.under_way = False
        self._will: LastWill | None = None
        self._since = 0.0
        #: workers are still to come that can save
        self._awaits = False
        self._transaction = transaction
        self._config = config
        self._stopping = stopping
        self._ending = ending

    @property
    def renews(self) -> bool:
        """True where the job is not to end: all workers are started again from what is being saved."""
        return self.under_way and self._will is not None and self._will.renew

    @property
    def _ends(self) -> bool:
        """True where the end is under way, and not only all workers' restart."""
        return self.under_way and not self.renews

    def ask(self, request: Shutdown) -> None:
        """End the job as it is asked for; asking for a checkpoint once more gives it no more time."""
        self._begin(LastWill(why=request.why, exit_code=request.exit_code), save=request.save)

    def fail(self, why: str, exit_code: int = EXIT_FAILED, traceback: str = "") -> bool:
        """The script cannot go on, but the state is whole: the job ends with this cause, and fails.

        Returns:
            Whether it does: not where it goes back to a layout under which it could go on.
        """
        if self._goes_back(why):
            return False
        code = EXIT_BAD_INPUT if exit_code == EXIT_BAD_INPUT else EXIT_FAILED
        self._begin(LastWill(why=why, exit_code=code, failed=True, traceback=traceback), save=True)
        return True

    def amend(self, before: str, why: str) -> None:
        """The cause is what it was, but more is known of it."""
        if self._will is not None and self._will.why == before and self._ending.over is None:
            self._will = msgspec.structs.replace(self._will, why=why)
            self._transaction.change(will=self._will)

    def renew(self, why: str) -> None:
        """Only workers that cannot go on have the newest state: it is saved, then all are started again.

        Where nothing is kept the job fails with this cause.
        """
        self._begin(
            LastWill(why=why, exit_code=EXIT_FAILED, failed=True, renew=self._transaction.record.saves), save=True
        )

    def renewed(self) -> None:
        """The workers are being started again."""
        self.under_way, self._will = False, None
        self._transaction.change(will=None)

    def taken_over(self, *, again: bool) -> None:
        """The coordinator before this one was asked, and died before the job had ended; or another run is to go on."""
        record = self._transaction.record
        if again and record.will is not None:
            self._transaction.change(will=None)
        elif not again and self._had_begun:
            self.under_way, self._will, self._since = True, record.will, self._transaction.now
        elif record.will is not None:  # (all go on: whoever wants an end asks again)
            self._transaction.change(will=None)

    @property
    def _had_begun(self) -> bool:
        """Tell whether the last plan is in force, or awaited: workers are to come that save."""
        record = self._transaction.record
        return record.plan.last if record.plan is not None else bool(record.will and record.stashed_step)

    def tick(self) -> None:
        """End the job whose time is up; give up what takes too long."""
        limit_s = self._config.spec.time_limit
        if limit_s and self._transaction.now - self._transaction.record.run_since >= limit_s and not self._ends:
            why = f"its time limit of {limit_s:g} s is over"
            self._begin(LastWill(why=why, exit_code=EXIT_ENDED, reason="time_limit"), save=True)
        record = self._transaction.record
        awaited, self._awaits = self._awaits, record.plan is None and record.stashed_step > 0
        if awaited and not self._awaits:
            self._since = self._transaction.now  # (they are here: the time for saving begins)
        limit_s = self._config.layout_timeout_s if self._awaits else self._config.save_timeout_s
        if not self.under_way or self._transaction.now - self._since <= limit_s:
            return
        here = self._awaits and any(self._transaction.members.regular)
        if here and self._goes_back(f"its workers did not come within {limit_s:g} s, and the job is to end"):
            self._since = self._transaction.now  # (those of the layout before are given as long)
        else:
            self.end(self._unsaved)

    def end(self, unsaved: str = "") -> None:
        """All is saved that can be, or nothing can be: end the job. Unless it has failed, it can be taken up again.

        Args:
            unsaved: what is lost, where something is.
        """
        will = self._will or _ASKED_BEFORE
        why = f"{will.why}; {unsaved}" if unsaved else will.why
        if will.failed:
            self._ending.failed(why, will.exit_code, will.traceback)
        else:
            self._ending.by_will(will.exit_code, will.reason, why)

    @property
    def _unsaved(self) -> str:
        """What of a change of layout was in memory alone, and is there no more once the nodes have ended."""
        record = self._transaction.record
        if record.plan is not None or not record.stashed_step:
            return ""
        names = ", ".join(record.stash_nodes)
        return f"nothing could be saved: step {record.stashed_step} was in the memory of {names} alone"

    def _begin(self, will: LastWill, *, save: bool) -> None:
        record, before = self._transaction.record, self._will
        if self._ending.over is not None:
            return
        # The first failure is the cause; but that all are started again is no end, and whoever wants one has it.
        if before is None or before.renew or not before.failed:
            self._will = will
        can = record.plan is not None or (record.stashed_step and will.exit_code != EXIT_BAD_INPUT)
        if not (save and record.saves and can):
            self.end(self._unsaved)
            return
        if self._will != record.will:
            self._transaction.change(will=self._will)
        if not self.under_way:
            self.under_way, self._since = True, self._transaction.now
            if record.plan is not None and not record.plan.last:
                self._stopping.begin(self._transaction.now)
