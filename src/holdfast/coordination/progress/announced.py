"""Announces the steps that all members have applied, and what recoveries have cost."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from holdfast.coordination.progress.costs import Cost, MeasuredCosts
from holdfast.coordination.progress.ledger import CommittedStep, StepLedger
from holdfast.coordination.progress.recovery_cost import DRAIN, FAILURE, LAYOUT, MOVE, RecoveryCost, TakenPlace
from holdfast.coordination.transaction import Transaction
from holdfast.protocol.commit import Commit, Wish, describe_too_many_skipped
from holdfast.protocol.events import (
    LossNotFinite,
    MicroBatchSkipped,
    NodeMoved,
    Rebalanced,
    Recovered,
    StepCommitted,
    StepSkipped,
)
from holdfast.protocol.messages.agent import Committed
from holdfast.protocol.names import node_and_index_of
from holdfast.protocol.plan import Decision, DecisionKind, GenerationPlan, Passed
from holdfast.protocol.state import source_kind

#: steps announced in one transaction at the most, thousands after a long outage: a record holds all events of its
#: transaction. Steps that log much count as several.
AT_ONCE = 2048
#: nodes are told what they need not keep every so many heartbeats; where that were more of them in a heartbeat than
#: `TOLD_AT_ONCE`, more seldom
SELDOM, TOLD_AT_ONCE = 4.0, 16


class Progress:
    """Committed steps; continues where the job stands by its events."""

    def __init__(self, transaction: Transaction) -> None:
        self._transaction = transaction
        self.ledger = StepLedger(transaction.position.step, transaction.record.passed)
        if transaction.record.plan is not None:
            self._follow(transaction.record.plan)
        #: the step with which the script's loop ends, as it said last; 0 if it has not
        self.last_step = 0
        self.recovery: RecoveryCost | None = None
        self.costs = MeasuredCosts(transaction)
        #: what was there for the one step alone at whose end another generation took effect, until that is announced
        self._swapped_away: RecoveryCost | None = None
        #: what it has cost those to join that are there for others' places: seconds beside the step's own, and bytes
        self._beside: dict[str, tuple[float, int]] = {}
        #: what a change of layout has cost, until that is told
        self._layout_cost: tuple[float, int] | None = None
        #: committed steps after which a checkpoint was due and none was written
        self._left_out: list[int] = []
        self._told, self._told_at = transaction.position.step, 0.0
        #: when the newest step was committed of which that is known, unix seconds; 0 where it is of none
        self._known_at = 0.0

    def begin(self, now: float, *, first: bool) -> None:
        """This term begins; `first`: the job does."""
        position, decision = self._transaction.position, self._transaction.record.decision
        back = decision is not None and decision.kind in (DecisionKind.START, DecisionKind.ROLLBACK)
        if first:
            self._known_at = now
        elif decision is None or not back or position.step > decision.applied:
            # (the time of a step whose v is unknown is when that was found; and a clock may have been set back)
            known = not math.isnan(position.loss) and position.step_time <= now
            self._known_at = position.step_time if known else 0.0

    def since_known(self, now: float) -> float:
        """Return the seconds since the job was last known to be where the ledger says, infinite where nobody can."""
        return max(0.0, now - self._known_at) if self._known_at else math.inf

    @property
    def samples(self) -> int:
        """Of all committed steps that no roll-back undid."""
        return self._transaction.position.samples

    @property
    def loss(self) -> float:
        """Of the step that was committed last."""
        return self._transaction.position.loss

    @property
    def committed_at(self) -> float:
        """When the step that was committed last was, unix seconds; 0 before the first."""
        return self._transaction.position.step_time

    @property
    def restarting(self) -> bool:
        """True from the begin of a restart until what it has lost is done again."""
        return self.recovery is not None and self.recovery.restart

    def release(self) -> bool:
        """Announce the steps that all members have applied by now, the first `AT_ONCE`; tell whether there were any.

        That a step has passed proves that all had applied the one before. But first everybody is to be heard of: only
        then it is known what the generation's begin has cost, and what FORWARD leads to is here. Of those that have
        left and are owed it proves nothing.
        """
        proven = self.ledger.proven if self._transaction.members.entered(self._transaction.record.plan) else 0
        if owed := self._owed:
            proven = min(proven, self.ledger.slowest(owed))
        return self._announce_all(self.ledger.release(AT_ONCE, up_to=proven))

    def catch_up(self, workers: Collection[str]) -> bool:
        """Announce a portion of the steps that these have applied, where they are more than one record should hold."""
        reached = self.ledger.slowest(workers)
        if not self.ledger.more_than(AT_ONCE, up_to=reached):
            return False
        return self._announce_all(self.ledger.release(AT_ONCE, up_to=reached))

    def finished(self, plan: GenerationPlan) -> bool:
        """Tell whether all members of `plan` have ended (or left) their loops, at the step that is committed."""
        return not self._transaction.members.unfinished(plan) and self.ledger.all_at_committed

    def skipped_too_often(self, at_most: int) -> str:
        """Return why the job must fail if its newest steps were all skipped, or "" if it may go on.

        Args:
            at_most: `--max-skipped-steps`; 0 for no limit.
        """
        position = self._transaction.position
        if not at_most or position.skipped_in_a_row < at_most:
            return ""
        return f"{describe_too_many_skipped(position.skipped_in_a_row, position.step)} (--max-skipped-steps {at_most})"

    def tell(self, every_s: float) -> None:
        """Let the agents forget what is in the journal; not at every step: it takes a record and messages."""
        transaction = self._transaction
        seldom_s = every_s * max(SELDOM, len(transaction.members.nodes) / TOLD_AT_ONCE)
        if self.ledger.committed == self._told or transaction.now < self._told_at + seldom_s:
            return
        self._told, self._told_at = self.ledger.committed, transaction.now
        transaction.change()  # whatever becomes of the journal, the record knows what the agents need not keep any more
        here = (node.connection for node in transaction.members.nodes.values())
        transaction.broadcast(here, Committed(term=transaction.record.term, step=self._told))

    def failed(self, failed_at: float, *, asked: bool = False) -> None:
        """A recovery begins; one that is still under way goes on counting from its first failure.

        Args:
            asked: nothing has failed, somebody leaves in good order.
        """
        if self.recovery is not None and self.recovery.restart:
            self.recovery.regrouped = 0.0  # what the restart has lost is still being done again
        elif self.recovery is None or self.recovery.regrouped:
            taken = self.recovery.taken if self.recovery is not None else {}  # (of which nobody has told yet)
            self.recovery = RecoveryCost(
                failed=failed_at, detected=self._transaction.now, action="shrink", taken=taken, asked=asked
            )

    def restarts(self) -> None:
        """The recovery under way is a restart: it lasts until a step is committed that never was before."""
        recovery = self.recovery
        if recovery is not None:
            recovery.action, recovery.restart, recovery.decided = "restart_all", True, self._transaction.now
            recovery.after_step = max(recovery.after_step, self.ledger.committed)

    def swapped(self, step: int, plan: GenerationPlan, action: str) -> None:
        """A join or a rebalance takes effect after `step`; what it costs counts from the commit before."""
        self._follow(plan)
        since, before = self.committed_at or self._transaction.now, self.recovery
        if before is not None and before.regrouped and before.after_step < step:
            self._swapped_away = before  # (all its members were there for one step)
        self.recovery = RecoveryCost(failed=since, detected=since, action=action, after_step=step, swap=True)
        self.recovery.source = source_kind(next(iter(plan.sources.values()), None))
        self.recovery.nodes = frozenset(member.node for member in plan.members)
        self.recovery.experts_moved = plan.expert_plan.moves if plan.expert_plan else 0

    def decided(
        self,
        plan: GenerationPlan,
        before: GenerationPlan | None,
        decision: Decision,
        salvaged: tuple[int | None, int | None],
    ) -> None:
        """A decision leads to this plan; `salvaged`: micro-batches kept, and computed again."""
        self._follow(plan)
        recovery = self.recovery
        if recovery is None:
            return
        recovery.micro_batches_kept, recovery.micro_batches_redone = salvaged
        recovery.experts_moved = plan.expert_plan.moves if plan.expert_plan else 0
        if recovery.restart:
            recovery.source = source_kind(decision.source)
            return
        recovery.decided = self._transaction.now
        recovery.after_step = decision.applied - (decision.kind is DecisionKind.FORWARD)
        workers = before.workers if before else ()
        recovery.source = source_kind(decision.source or next(iter(plan.sources.values()), None))
        if decision.kind is DecisionKind.ROLLBACK:
            recovery.action = "rollback"
            return
        if len(plan.members) > len(workers):
            recovery.action = "grow"
        elif set(plan.workers) == set(workers):
            recovery.action = "retry"
        else:
            recovery.action = _replaced(plan.workers, workers)

    def replaced(self, moved: Mapping[str, tuple[str, str]], plan: GenerationPlan, why: str, *, whole: bool) -> None:
        """These nodes take others' places in this plan, which are given with the reason why it is they.

        Who was given one before, and has gone through no step since, is told of with them: another failure has come in
        between, or another coordinator, which knows of those that are owed.

        Args:
            why: it is these that are filled, or none.
            whole: all are.
        """
        recovery = self.recovery
        if recovery is None:
            return
        recovery.why = why
        if whole and recovery.action == "shrink":
            recovery.action = "replace"  # (who is there instead has joined before)
        here, before = {member.node for member in plan.members}, recovery.taken
        owed = {one.node: one for one in self._transaction.record.leaving if one.owed}
        given = {one.beside: (one.node, "") for one in owed.values() if one.beside}
        taken: dict[str, TakenPlace] = {}
        for name, (whose, of_it) in {**given, **moved}.items():
            gone = owed.get(whose)
            reason = FAILURE if gone is None else MOVE if gone.stays else DRAIN
            first = before.get(whose)  # (it was lost before it had trained)
            taken[name] = TakenPlace(whose, reason, of_it) if first is None else replace(first, why=of_it)
        merged = {**taken, **before, **{name: taken[name] for name in moved}}
        recovery.taken = {name: place for name, place in merged.items() if name in here and place.whose not in here}

    def puts_away(self, decision: Decision) -> None:
        """The plan that was decided on is to put the state away for another layout: that is what the recovery is."""
        if self.recovery is not None:
            self.recovery.action, self.recovery.restart = LAYOUT, True
            self.recovery.after_step = decision.applied

    def layout_stays(self) -> None:
        """Nothing comes of that."""
        if self.recovery is not None and self.recovery.action == LAYOUT:
            self.recovery.action, self.recovery.restart = "retry", False

    def layout_changes(self) -> None:
        """The state is put away: all workers are replaced."""
        if self.recovery is None:  # (another coordinator has begun it)
            self.failed(self._transaction.now, asked=True)
        self.puts_away(Decision(kind=DecisionKind.ROLLBACK, applied=self.ledger.committed))
        self.costs.forget_steps()

    def layout_cost(self, since: float) -> tuple[float, int]:
        """Return what the last change of layout has cost: for how long no step was committed, and bytes moved."""
        cost, self._layout_cost = self._layout_cost, None
        return cost if cost is not None else (max(0.0, self.committed_at - since), 0)

    @property
    def _owed(self) -> list[str]:
        """The workers that have left, and count still."""
        return [worker for one in self._transaction.record.leaving for worker in one.owed]

    def _follow(self, plan: GenerationPlan) -> None:
        self.ledger.follow(plan.generation, (*plan.workers, *self._owed))

    def _announce_all(self, released: Sequence[CommittedStep]) -> bool:
        for done in released:
            self._note_the_end(done)
            self._note_left_out(done)
            self._announce(done)
            self._recovered(done)
        return bool(released)

    def _note_the_end(self, done: CommittedStep) -> None:
        """Where all are to stop after this step, that outlives their processes."""
        stopped = self._transaction.record.stopped
        if Wish.STOP in done.commit.wishes:
            self._transaction.change(stopped=Passed(step=done.step, commit=done.commit))
        elif stopped is not None and stopped.step == done.step:
            self._transaction.change(stopped=None)

    def _note_left_out(self, done: CommittedStep) -> None:
        """Note a step after which no checkpoint was written although one was due."""
        wishes = done.commit.wishes
        due = Wish.SAVE_IF_FREE in wishes or not self._transaction.record.saves_in_time
        if due and Wish.STILL_SAVING in wishes and Wish.SAVE not in wishes:
            self._left_out.append(done.step)

    def take_left_out(self) -> list[int]:
        """Return the steps, since the last call, after which a checkpoint was due and none was written."""
        steps, self._left_out = self._left_out, []
        return steps

    def _announce(self, done: CommittedStep) -> None:
        commit, before = done.commit, self._transaction.position
        # Nobody knows any more when a step passed whose witnesses are all dead; other machines' clocks may lag.
        time = max(done.time or self._transaction.now, self.committed_at)
        seconds = time - self.committed_at if self.committed_at else 0.0
        paused_s = min(done.paused_s, seconds)
        self.costs.step(seconds - paused_s, time, done.world)
        self._known_at = time if done.time else self._known_at
        if self.recovery is not None:
            self.recovery.swapped_at(done.step, time)
        self._transaction.emit_at(
            time,
            StepCommitted,
            step=done.step,
            loss=commit.mean_loss,
            samples=commit.samples,
            world_size=done.world,
            step_s=seconds,
            paused_s=paused_s,
            skipped=commit.skipped,
            overflow=commit.overflow,
            skipped_samples=commit.skipped_samples,
            last_step=self.last_step,
            sample_hashes=commit.sample_hashes if commit.sample_hashes >= 0 else None,
            metrics={name: value if math.isfinite(value) else None for name, value in commit.metrics.items()},
            grad_norm=math.sqrt(commit.grad_square) if 0 <= commit.grad_square < math.inf else None,
        )
        for skip in commit.skips:
            told = {"micro_batch": skip.micro_batch, "reason": skip.reason}
            self._transaction.emit_at(time, MicroBatchSkipped, step=done.step, **told)
        if commit.failed:
            row = self._transaction.position.skipped_in_a_row
            self._transaction.emit_at(time, StepSkipped, step=done.step, why=commit.why_skipped, in_a_row=row)
            if row == 1:
                self._transaction.change()  # Recorded: a coordinator that dies here must not lose the alert.
        elif _only_loss_is_infinite(commit) and (math.isfinite(before.loss) or not before.step):
            self._transaction.emit_at(time, LossNotFinite, step=done.step, loss=f"{commit.mean_loss:g}")

    def _recovered(self, done: CommittedStep) -> None:
        before, recovery = self._swapped_away, self.recovery
        if before is not None and done.step > before.after_step:
            self._swapped_away = None
            self._tell_cost(done, before)
        if recovery is not None and recovery.regrouped and done.step > recovery.after_step:
            self.recovery = None
            self._tell_cost(done, recovery)

    def _tell_cost(self, done: CommittedStep, recovery: RecoveryCost) -> None:
        """What began before this step is over with it: say what it has cost."""
        self.costs.switched(recovery, self.committed_at)
        costs = recovery.costs(self.committed_at)
        if recovery.action == LAYOUT:
            down_s = max(0.0, self.committed_at - recovery.failed)
            self._layout_cost = down_s, recovery.moved_bytes
            self.costs.measured(Cost.LAYOUT, max(0.0, down_s - self.costs.step_s))
        if recovery.action == "rebalance":
            told = {name: costs[name] for name in ("moved_bytes", "experts_moved", "transfer_s", "down_s")}
            self._transaction.emit(Rebalanced, step=done.step, **told)
        else:
            self._transaction.emit(Recovered, **costs)
            self._moved(recovery)

    def _moved(self, recovery: RecoveryCost) -> None:
        """Tell who has taken whose place, and what that has cost; of those that joined first, both parts of it."""
        down_s, joined = max(0.0, self.committed_at - recovery.failed), dict(self._beside)
        if recovery.swap:
            cost = max(0.0, down_s - self.costs.step_s), recovery.moved_bytes
            self._beside = dict.fromkeys(self._transaction.record.replacements_among(recovery.nodes), cost)
        for name, place in recovery.taken.items():
            before_s, bytes_before = joined.get(name, (0.0, 0))
            self._transaction.emit(
                NodeMoved,
                from_node=place.whose,
                to_node=name,
                reason=place.reason,
                down_s=before_s + down_s,
                moved_bytes=bytes_before + recovery.moved_bytes,
                detail=place.why,
            )


def _replaced(workers: Sequence[str], before: Sequence[str]) -> str:
    """Return what became of a plan of other members: other processes, other nodes, or fewer."""
    if set(map(node_and_index_of, workers)) == set(map(node_and_index_of, before)):
        return "restart"
    return "replace" if len(workers) == len(before) else "shrink"


def _only_loss_is_infinite(commit: Commit) -> bool:
    """Return whether a known step has a loss that is not finite, and gradients that are."""
    return commit.sample_hashes >= 0 and not commit.skipped and not math.isfinite(commit.mean_loss)
