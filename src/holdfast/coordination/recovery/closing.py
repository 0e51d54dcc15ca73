"""The end of a job with a checkpoint, on request or because its script cannot continue."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from holdfast.coordination.config import CoordinatorConfig
from holdfast.coordination.generations.interruption import Interruption
from holdfast.coordination.inputs import Shutdown
from holdfast.coordination.recovery.ending import JobEnd
from holdfast.coordination.transaction import Transaction
from holdfast.errors import EXIT_BAD_INPUT, EXIT_ENDED, EXIT_FAILED, EXIT_INTERRUPTED
from holdfast.protocol.record import LastWill

#: For a coordinator that ended before it had written a reason.
_ASKED_BEFORE = LastWill(why="shut down on request", exit_code=EXIT_INTERRUPTED)


class Closing:
    """Ends a job after a last checkpoint.

    The generation in force is interrupted as after a failure. The next one is the last: its members compute nothing,
    save their state and finish. After a failure another last generation follows. All of them together may take
    `save_timeout_s`. The reason is in the record, for the coordinator that sees the end.

    While all workers are replaced for another layout, the state is only in the nodes' memory. Then the new workers form
    the last generation.
    """

    def __init__(
        self,
        transaction: Transaction,
        config: CoordinatorConfig,
        stopping: Interruption,
        ending: JobEnd,
        goes_back: Callable[[str], bool],
    ) -> None:
        """`goes_back`: tries to undo the cause of a failure, a layout change; returns whether it could."""
        self._goes_back = goes_back
        #: Whether a last generation was requested.
        self.under_way = False
        self._will: LastWill | None = None
        self._since = 0.0
        #: Whether the workers that will save are still starting.
        self._awaits = False
        self._transaction = transaction
        self._config = config
        self._interruption = stopping
        self._job_end = ending

    @property
    def renews(self) -> bool:
        """Whether all workers will restart from the checkpoint, and the job continues."""
        return self.under_way and self._will is not None and self._will.renew

    @property
    def _ends(self) -> bool:
        """Whether the job itself will end, not only its workers."""
        return self.under_way and not self.renews

    def request(self, request: Shutdown) -> None:
        """End the job on request, after a checkpoint if `request.save`. A second request does not extend the
        checkpoint's time.

        After a failure, the failure stays the reason.
        """
        self._start(LastWill(why=request.why, exit_code=request.exit_code), save=request.save)

    def fail(self, why: str, exit_code: int = EXIT_FAILED, traceback: str = "") -> bool:
        """Save the intact state and fail the job, because its script cannot continue.

        First it is tried to return to the previous layout, if the failure follows a change of layout.

        Args:
            exit_code: of the job; any other than `EXIT_BAD_INPUT` becomes `EXIT_FAILED`.

        Returns:
            Whether the job ends: not if it returns to a layout that works.
        """
        if self._goes_back(why):
            return False
        code = EXIT_BAD_INPUT if exit_code == EXIT_BAD_INPUT else EXIT_FAILED
        self._start(LastWill(why=why, exit_code=code, failed=True, traceback=traceback), save=True)
        return True

    def amend(self, before: str, why: str) -> None:
        """Replace the reason of a failure by a more detailed one, unless the job is over or has another reason.

        Args:
            before: the reason that is replaced.
        """
        if self._will is not None and self._will.why == before and self._job_end.over is None:
            self._will = msgspec.structs.replace(self._will, why=why)
            self._transaction.change(will=self._will)

    def renew(self, why: str) -> None:
        """Save the newest state, which only workers with script errors have, then restart all workers.

        A job that saves nothing fails with this reason.
        """
        self._start(
            LastWill(why=why, exit_code=EXIT_FAILED, failed=True, renew=self._transaction.record.saves), save=True
        )

    def on_renewed(self) -> None:
        """Record that the job no longer closes, because the state is saved and all workers are being restarted."""
        self.under_way, self._will = False, None
        self._transaction.change(will=None)

    def resume_closing(self, *, again: bool) -> None:
        """Resume the closing that an earlier coordinator of this run began; forget the request if it had not begun.

        Args:
            again: whether this is another run: then it trains on.
        """
        record = self._transaction.record
        if again and record.will is not None:
            self._transaction.change(will=None)
        elif not again and self._had_begun:
            self.under_way, self._will, self._since = True, record.will, self._transaction.now
        elif record.will is not None:
            # All members continue: the end must be requested again.
            self._transaction.change(will=None)

    @property
    def _had_begun(self) -> bool:
        """Whether the last plan is in force, or waits for workers that save."""
        record = self._transaction.record
        return record.plan.last if record.plan is not None else bool(record.will and record.stashed_step)

    def tick(self) -> None:
        """Close the job at its time limit. End it if saving takes too long.

        While the workers that will save are starting, they have `layout_timeout_s` instead. If they do not start in
        time, the job first returns to the previous layout.
        """
        limit_s = self._config.spec.time_limit
        if limit_s and self._transaction.now - self._transaction.record.run_since >= limit_s and not self._ends:
            why = f"its time limit of {limit_s:g} s is over"
            self._start(LastWill(why=why, exit_code=EXIT_ENDED, reason="time_limit"), save=True)
        record = self._transaction.record
        awaited, self._awaits = self._awaits, record.plan is None and record.stashed_step > 0
        if awaited and not self._awaits:
            # The workers are complete: the time for saving begins.
            self._since = self._transaction.now
        limit_s = self._config.layout_timeout_s if self._awaits else self._config.save_timeout_s
        if not self.under_way or self._transaction.now - self._since <= limit_s:
            return
        here = self._awaits and any(self._transaction.members.regular)
        if here and self._goes_back(f"its workers did not come within {limit_s:g} s, and the job must end"):
            # The previous layout's workers get the same time.
            self._since = self._transaction.now
        else:
            self.end(self._unsaved)

    def end(self, unsaved: str = "") -> None:
        """End the job now, without waiting for further saving. If the reason is a failure, the job fails; else it is
        stopped, and can be resumed.

        Args:
            unsaved: the progress that is lost, in words; "" for none.
        """
        will = self._will or _ASKED_BEFORE
        why = f"{will.why}; {unsaved}" if unsaved else will.why
        if will.failed:
            self._job_end.fail_job(why, will.exit_code, will.traceback)
        else:
            self._job_end.stop_job(will.exit_code, will.reason, why)

    @property
    def _unsaved(self) -> str:
        """The loss of a layout change's stash if the nodes end now, in words; "" if none waits to be loaded."""
        record = self._transaction.record
        if record.plan is not None or not record.stashed_step:
            return ""
        names = ", ".join(record.stash_nodes)
        return f"nothing could be saved: step {record.stashed_step} was in the memory of {names} alone"

    def _start(self, will: LastWill, *, save: bool) -> None:
        """Interrupt the generation for a last one that saves. End the job at once if nothing must or can be saved.

        The first failure stays the reason; a restart of all workers or a request is replaced. Does nothing once the job
        is over.
        """
        record, before = self._transaction.record, self._will
        if self._job_end.over is not None:
            return
        # The first failure is the reason. A restart of all workers is not an end, so any later reason replaces it.
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
                self._interruption.start(self._transaction.now)
