"""Detection of members that leave their training loops earlier than the others.

All ranks must leave their loops after the same step. If one leaves alone (a `break`, a shorter loop), the others wait
for it in their next reduction. Only the members' phases tell that from a slow evaluation. So after a timeout the
coordinator stops the members and collects their reports. A script that ends before its first step fails the job.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from holdfast.coordination.generations.decisions import NothingLeft, Verdict
from holdfast.coordination.job.context import JobContext, JobPhase
from holdfast.coordination.membership import Membership, WorkerInfo
from holdfast.coordination.progress.announced import Progress
from holdfast.coordination.transaction import Transaction
from holdfast.protocol.messages.agent import WorkerDown
from holdfast.protocol.messages.worker import Report
from holdfast.protocol.plan import Decision, DecisionKind, GenerationPlan, Phase
from holdfast.protocol.record import Record

TOGETHER = "all ranks must leave it after the same step"
_BEFORE_REDUCTION = (Phase.IDLE, Phase.ENTERING, Phase.ADOPTING, Phase.FORWARD, Phase.FINISHED, Phase.COMPUTE)


class LoopExits:
    """Interrupts the generation after `report_timeout_s`, then after twice that time, and so on."""

    def __init__(self, context: JobContext) -> None:
        self._context = context
        self._since: float | None = None
        self._wait_s = context.config.report_timeout_s

    def on_loop_left(self, down: WorkerDown, known: WorkerInfo | None) -> None:
        """Handle a script that ended without error.

        If a member, or any worker before the first generation, ended before its first step, the job closes as failed.
        If the others would wait forever for a member or its state, the generation is stopped. Any other end is only
        recorded.

        Args:
            known: the worker, or None if it had not attached.
        """
        transaction = self._context.transaction
        if known is not None:
            self._context.ledger.record_step(down.worker, down.applied)
            transaction.members.left_loop(down.worker, down.applied)
        begun = down.applied or (known is not None and known.entered)
        # The others need nothing from a newcomer that is not in a generation yet.
        if not begun and (transaction.is_member(down.worker) or not transaction.generation):
            why = "the script ended before its first step: train in a loop over job.steps()"
            self._context.closing.fail(f"{transaction.place_of(down.worker)}: {why}")
        elif known is not None and transaction.is_member(down.worker):
            plan = transaction.record.plan
            if known.entered < transaction.generation or (
                plan is not None and find_stateless_members(plan, transaction.members)
            ):
                # The others would wait for it, or for its state, forever.
                self._context.interruption.start(transaction.now)

    def tick(self) -> None:
        """Interrupt the generation if some members ended their loops, and others have not for `report_timeout_s`.

        The wait doubles after each interruption. If the others have applied later steps than a worker that left, the
        job fails. Nothing is checked while the job closes or waits.
        """
        context, now = self._context, self._context.transaction.now
        plan = context.transaction.record.plan
        if plan is None or plan.last or context.phase is not JobPhase.RUNNING:
            self._since = None
            return
        self._check_left_behind()
        if context.members.unfinished(plan) == len(plan.members):
            self._since = None
        elif self._since is None:
            self._since = now
        elif now - self._since > self._wait_s:
            self._wait_s *= 2
            self._since = None
            context.interruption.start(now)

    def _check_left_behind(self) -> None:
        """Close the job as failed if a later step than the last one of a worker that left its loop is committed."""
        transaction = self._context.transaction
        for worker, step in transaction.members.left.items():
            if 0 < step < transaction.position.step:
                why = f"left its loop after step {step}, and the others went on: {TOGETHER}"
                self._context.closing.fail(f"{transaction.place_of(worker)} {why}")
                return


def add_stop_flag(decision: Decision, record: Record) -> Decision:
    """Return a decision, with the commit of the job's last step added if it is a rollback to that step.

    So the members stop there, as they did before. Any other decision is returned unchanged.
    """
    stopped = record.stopped
    if decision.kind is not DecisionKind.ROLLBACK or stopped is None or stopped.step != decision.applied:
        return decision
    return msgspec.structs.replace(decision, commit=stopped.commit)


def find_stateless_members(plan: GenerationPlan, members: Membership) -> list[str]:
    """Return the members that have not left their loops, if some members left and none of the others has ever entered a
    generation.

    Otherwise [], because the state is still with a running member.
    """
    others = [worker for worker in plan.workers if worker not in members.left]
    known = [members.worker(worker) for worker in others]
    alone = len(others) < len(plan.workers) and all(info is not None and not info.entered for info in known)
    return others if alone else []


def completed_without_state(verdict: Verdict | NothingLeft, transaction: Transaction, progress: Progress) -> bool:
    """Return whether no state is left because all members that had it completed the job; announce their steps then.

    Members without state are removed from the ledger. False if the verdict keeps any state, or if a job that saves can
    go back to its last saved state or to the start, so that its end is also saved.
    """
    plan = transaction.record.plan
    anew = isinstance(verdict, Verdict) and verdict.decision.kind is DecisionKind.START and not transaction.record.saves
    if plan is None or not (anew or isinstance(verdict, NothingLeft)):
        return False
    newcomers = find_stateless_members(plan, transaction.members)
    if newcomers:
        progress.ledger.without(newcomers)
        progress.announce_applied_steps()
    return bool(newcomers)


def find_early_leaver(
    workers: Sequence[str], reports: Mapping[str, Report], left: Mapping[str, int]
) -> tuple[str, int, str] | None:
    """Find a member that left its loop while another one waits for it.

    Args:
        left: members that have ended since, with the last step they applied.

    Returns:
        The member that left, its last step, and the member that waits for it; or None.
    """
    known = [reports[worker] for worker in workers if worker in reports]
    finished = {report.worker: report.step - 1 for report in known if report.phase is Phase.FINISHED}
    finished |= {worker: step for worker, step in left.items() if worker in workers}
    for worker, step in finished.items():
        for other in known:
            if other.step > step + 1 or (other.step == step + 1 and other.phase not in _BEFORE_REDUCTION):
                return worker, step, other.worker
    return None
