"""Announces the steps that all members have applied, and the costs of recoveries."""

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
from holdfast.protocol.plan import Decision, DecisionKind, GenerationPlan, PassedStep
from holdfast.protocol.state import source_kind

#: The most steps announced in one transaction, since a record holds all events of its transaction. After a long outage,
#: thousands of steps are due. Steps with large logs count as several.
AT_ONCE = 2048
#: Every `SELDOM` heartbeats, all nodes receive the newest committed step, so that they can drop older ones. In a large
#: job this happens less often: at most `TOLD_AT_ONCE` nodes per heartbeat, on average.
SELDOM, TOLD_AT_ONCE = 4.0, 16


class Progress:
    """The committed steps of a job, and the recovery in progress. It continues from the events of the job."""

    def __init__(self, transaction: Transaction) -> None:
        self._transaction = transaction
        self.ledger = StepLedger(transaction.position.step, transaction.record.passed)
        if transaction.record.plan is not None:
            self._follow(transaction.record.plan)
        #: the last step of the script's loop as the script reported it, or 0 if unknown
        self.last_step = 0
        self.recovery: RecoveryCost | None = None
        self.costs = MeasuredCosts(transaction)
        #: the recovery that a swap ended after a single step, until its costs are announced
        self._swapped_away: RecoveryCost | None = None
        #: the cost of joining of each node that will replace a draining one: seconds without the step, and bytes
        self._beside: dict[str, tuple[float, int]] = {}
        #: the cost of a layout change, until it is announced
        self._layout_cost: tuple[float, int] | None = None
        #: committed steps after which a checkpoint was due but not written
        self._left_out: list[int] = []
        self._sent_step = transaction.position.step
        self._sent_at = 0.0
        #: when the newest step with a known time was committed, in Unix seconds; 0 if no time is known
        self._known_at = 0.0

    def start_term(self, now: float, *, first: bool) -> None:
        """Find out when the job was last known to be at its step, at the start of a coordinator's term: now for a new
        job, else when its last step was committed.

        Unknown after a roll-back or if the step's time is unknown or in the future.

        Args:
            first: Whether the job starts, too.
        """
        position, decision = self._transaction.position, self._transaction.record.decision
        back = decision is not None and decision.kind in (DecisionKind.START, DecisionKind.ROLLBACK)
        if first:
            self._known_at = now
        elif decision is None or not back or position.step > decision.applied:
            # If the result of a step is unknown, its time is only when that was discovered. A clock may also have been
            # set back.
            known = not math.isnan(position.loss) and position.step_time <= now
            self._known_at = position.step_time if known else 0.0

    def since_known(self, now: float) -> float:
        """Return the seconds since the job was known to be at the ledger's step, or infinity if unknown."""
        return max(0.0, now - self._known_at) if self._known_at else math.inf

    @property
    def samples(self) -> int:
        """The samples of all committed steps, without undone ones."""
        return self._transaction.position.samples

    @property
    def loss(self) -> float:
        """The loss of the last committed step."""
        return self._transaction.position.loss

    @property
    def committed_at(self) -> float:
        """When the last step was committed, in Unix seconds; 0 before the first."""
        return self._transaction.position.step_time

    @property
    def restarting(self) -> bool:
        """Whether a restart of all workers is in progress, until the lost steps are repeated."""
        return self.recovery is not None and self.recovery.restart

    def announce_applied_steps(self) -> bool:
        """Announce the steps that all members have applied, at most `AT_ONCE`; return whether there were any.

        That a step has passed proves that all members had applied the previous one. But first all members must have
        entered the generation: only then is the cost of its start known, and the result of a FORWARD is here. For
        draining workers that have already left, it proves nothing.
        """
        proven = self.ledger.proven if self._transaction.members.entered(self._transaction.record.plan) else 0
        if retained := self._retained_workers:
            proven = min(proven, self.ledger.slowest(retained))
        return self._announce_all(self.ledger.release(AT_ONCE, up_to=proven))

    def catch_up(self, workers: Collection[str]) -> bool:
        """Announce up to `AT_ONCE` of the steps that all these workers have applied, but only if there are more than
        one record can take.

        Returns:
            Whether any were announced.
        """
        reached = self.ledger.slowest(workers)
        if not self.ledger.more_than(AT_ONCE, up_to=reached):
            return False
        return self._announce_all(self.ledger.release(AT_ONCE, up_to=reached))

    def finished(self, plan: GenerationPlan) -> bool:
        """Return whether all members of `plan` have finished or left their loops at the committed step."""
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

    def send_committed_step(self, every_s: float) -> None:
        """Send the newest committed step to all agents, so that they drop the steps that are in the journal.

        The record is written first. Does nothing if the step is unchanged, or too soon: this is done seldom, and more
        seldom with many nodes.

        Args:
            every_s: The interval of heartbeats in seconds.
        """
        transaction = self._transaction
        seldom_s = every_s * max(SELDOM, len(transaction.members.nodes) / TOLD_AT_ONCE)
        if self.ledger.committed == self._sent_step or transaction.now < self._sent_at + seldom_s:
            return
        self._sent_step, self._sent_at = self.ledger.committed, transaction.now
        # Write the record first: it must know the steps that the agents drop, even if the journal is lost.
        transaction.change()
        here = (node.connection for node in transaction.members.nodes.values())
        transaction.broadcast(here, Committed(term=transaction.record.term, step=self._sent_step))

    def start_recovery(self, failed_at: float, *, asked: bool = False) -> None:
        """Start to measure a recovery.

        One that is still in progress keeps the time of its first failure, one that has regrouped is replaced; a restart
        goes on, but must regroup again.

        Args:
            failed_at: When the failure happened.
            asked: Whether nothing has failed: a node drains.
        """
        if self.recovery is not None and self.recovery.restart:
            # The steps lost by the restart are still being repeated.
            self.recovery.regrouped = 0.0
        elif self.recovery is None or self.recovery.regrouped:
            # These replaced ranks were not announced yet.
            taken = self.recovery.taken if self.recovery is not None else {}
            self.recovery = RecoveryCost(
                failed=failed_at, detected=self._transaction.now, action="shrink", taken=taken, asked=asked
            )

    def mark_restart(self) -> None:
        """Mark the recovery, if any, as a restart of all workers, which lasts until a step after the committed one is
        committed.
        """
        recovery = self.recovery
        if recovery is not None:
            recovery.action = "restart_all"
            recovery.restart = True
            recovery.decided = self._transaction.now
            recovery.after_step = max(recovery.after_step, self.ledger.committed)

    def start_swap(self, step: int, plan: GenerationPlan, action: str) -> None:
        """Start to measure a join or a rebalance that took effect after `step`, from the commit before it.

        A recovery that has regrouped, but committed only that step, is still announced later.

        Args:
            plan: The plan after the swap.
            action: The kind of change, such as "grow" or "rebalance".
        """
        self._follow(plan)
        since = self.committed_at or self._transaction.now
        before = self.recovery
        if before is not None and before.regrouped and before.after_step < step:
            # Its members were complete for one step.
            self._swapped_away = before
        self.recovery = RecoveryCost(failed=since, detected=since, action=action, after_step=step, swap=True)
        self.recovery.source = source_kind(next(iter(plan.sources.values()), None))
        self.recovery.nodes = frozenset(member.node for member in plan.members)
        self.recovery.experts_moved = plan.expert_plan.moves if plan.expert_plan else 0

    def record_decision(
        self,
        plan: GenerationPlan,
        before: GenerationPlan | None,
        decision: Decision,
        salvaged: tuple[int | None, int | None],
    ) -> None:
        """Count the members of this plan from now on, and record how the recovery in progress goes on: by rollback,
        growing, retrying, restarting, replacing or shrinking, from which source, and what is repeated.

        Args:
            before: The previous plan, if any.
            salvaged: The number of micro-batches that were kept, and the number that are repeated; None if unknown.
        """
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

    def record_replacements(
        self, moved: Mapping[str, tuple[str, str]], plan: GenerationPlan, why: str, *, all_replaced: bool
    ) -> None:
        """Record which nodes take over others' ranks in this plan. Ignored if no recovery is in progress.

        Nodes that have taken over a rank before, and have trained no step since, are announced together with them. This
        happens after another failure, or under a new coordinator, which knows the draining nodes from the record.

        Args:
            moved: For each such node, the node that it replaces and the reason for choosing it.
            why: Why this recovery replaces nodes, or not.
            all_replaced: Whether all lost nodes are replaced.
        """
        recovery = self.recovery
        if recovery is None:
            return
        recovery.why = why
        if all_replaced and recovery.action == "shrink":
            # The replacements had joined earlier.
            recovery.action = "replace"
        planned = {member.node for member in plan.members}
        before = recovery.taken
        draining = {one.node: one for one in self._transaction.record.leaving if one.owed}
        given = {one.beside: (one.node, "") for one in draining.values() if one.beside}
        taken: dict[str, TakenPlace] = {}
        for name, (from_node, choice) in {**given, **moved}.items():
            drained = draining.get(from_node)
            reason = FAILURE if drained is None else MOVE if drained.stays else DRAIN
            # The first replacement failed before it had trained.
            first = before.get(from_node)
            taken[name] = TakenPlace(from_node, reason, choice) if first is None else replace(first, why=choice)
        merged = {**taken, **before, **{name: taken[name] for name in moved}}
        recovery.taken = {
            name: place for name, place in merged.items() if name in planned and place.from_node not in planned
        }

    def mark_layout_change(self, decision: Decision) -> None:
        """Mark the recovery, if there is one, as a layout change: the decided plan stashes the state."""
        if self.recovery is not None:
            self.recovery.action, self.recovery.restart = LAYOUT, True
            self.recovery.after_step = decision.applied

    def layout_stays(self) -> None:
        """Undo `puts_away`: the layout stays."""
        if self.recovery is not None and self.recovery.action == LAYOUT:
            self.recovery.action, self.recovery.restart = "retry", False

    def on_state_stashed(self) -> None:
        """Mark the recovery as a layout change, as the state is stashed and all workers will be replaced.

        Start one if an earlier coordinator began the change. Step times are forgotten.
        """
        # An earlier coordinator began the change.
        if self.recovery is None:
            self.start_recovery(self._transaction.now, asked=True)
        self.mark_layout_change(Decision(kind=DecisionKind.ROLLBACK, applied=self.ledger.committed))
        self.costs.forget_steps()

    def layout_cost(self, since: float) -> tuple[float, int]:
        """Return the cost of the last layout change: the seconds without a committed step, and the bytes moved.

        Args:
            since: When the change began, if its cost was not measured.
        """
        cost, self._layout_cost = self._layout_cost, None
        return cost if cost is not None else (max(0.0, self.committed_at - since), 0)

    @property
    def _retained_workers(self) -> list[str]:
        """The workers of draining nodes that have left the plan but must still apply steps."""
        return [worker for one in self._transaction.record.leaving for worker in one.owed]

    def _follow(self, plan: GenerationPlan) -> None:
        self.ledger.follow(plan.generation, (*plan.workers, *self._retained_workers))

    def _announce_all(self, released: Sequence[CommittedStep]) -> bool:
        """Announce committed steps, and the cost of recoveries that they complete.

        Store a requested stop, and note checkpoints that were left out. Return whether there were any steps.
        """
        for done in released:
            self._note_the_end(done)
            self._note_left_out(done)
            self._announce(done)
            self._announce_recoveries(done)
        return bool(released)

    def _note_the_end(self, done: CommittedStep) -> None:
        """If a script has requested the end in this step, store in the record that all workers stop after it, so that
        this outlives their processes.

        Remove that if the same step was repeated without the request.
        """
        stopped = self._transaction.record.stopped
        if Wish.STOP in done.commit.wishes:
            self._transaction.change(stopped=PassedStep(step=done.step, commit=done.commit))
        elif stopped is not None and stopped.step == done.step:
            self._transaction.change(stopped=None)

    def _note_left_out(self, done: CommittedStep) -> None:
        """Note a step after which a checkpoint was due and not written, because a worker was still saving. Other steps
        change nothing.
        """
        wishes = done.commit.wishes
        due = Wish.SAVE_IF_FREE in wishes or not self._transaction.record.saves_in_time
        if due and Wish.STILL_SAVING in wishes and Wish.SAVE not in wishes:
            self._left_out.append(done.step)

    def take_left_out(self) -> list[int]:
        """Return the steps since the last call after which a checkpoint was due but not written."""
        steps, self._left_out = self._left_out, []
        return steps

    def _announce(self, done: CommittedStep) -> None:
        """Emit a committed step with its duration and result, and each micro-batch skipped in it.

        Also emit an event if the whole step was skipped, or if the loss is no longer finite. Measure its duration.
        """
        commit = done.commit
        before = self._transaction.position
        # If all witnesses of a step are dead, its time is unknown. Clocks of other machines may also lag.
        time = max(done.time or self._transaction.now, self.committed_at)
        seconds = time - self.committed_at if self.committed_at else 0.0
        paused_s = min(done.paused_s, seconds)
        self.costs.add_step(seconds - paused_s, time, done.world)
        self._known_at = time if done.time else self._known_at
        if self.recovery is not None:
            self.recovery.restart_clock(done.step, time)
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
            fields = {"micro_batch": skip.micro_batch, "reason": skip.reason}
            self._transaction.emit_at(time, MicroBatchSkipped, step=done.step, **fields)
        if commit.failed:
            row = self._transaction.position.skipped_in_a_row
            self._transaction.emit_at(time, StepSkipped, step=done.step, why=commit.why_skipped, in_a_row=row)
            if row == 1:
                self._transaction.change()  # Write the record: a coordinator that fails here must not lose the alert.
        elif _only_loss_is_infinite(commit) and (math.isfinite(before.loss) or not before.step):
            self._transaction.emit_at(time, LossNotFinite, step=done.step, loss=f"{commit.mean_loss:g}")

    def _announce_recoveries(self, done: CommittedStep) -> None:
        """Announce the cost of the recovery, and of the one before it, if this is their first committed step."""
        before, recovery = self._swapped_away, self.recovery
        if before is not None and done.step > before.after_step:
            self._swapped_away = None
            self._announce_cost(done, before)
        if recovery is not None and recovery.regrouped and done.step > recovery.after_step:
            self.recovery = None
            self._announce_cost(done, recovery)

    def _announce_cost(self, done: CommittedStep, recovery: RecoveryCost) -> None:
        """Record and emit the cost of a recovery that this step completes, as a rebalance or a recovery; then emit
        which nodes took over ranks.

        A layout change also keeps its cost for later.
        """
        self.costs.record_switch(recovery, self.committed_at)
        costs = recovery.costs(self.committed_at)
        if recovery.action == LAYOUT:
            down_s = max(0.0, self.committed_at - recovery.failed)
            self._layout_cost = down_s, recovery.moved_bytes
            self.costs.add_measurement(Cost.LAYOUT, max(0.0, down_s - self.costs.step_s))
        if recovery.action == "rebalance":
            fields = {name: costs[name] for name in ("moved_bytes", "experts_moved", "transfer_s", "down_s")}
            self._transaction.emit(Rebalanced, step=done.step, **fields)
        else:
            self._transaction.emit(Recovered, **costs)
            self._announce_moved_nodes(recovery)

    def _announce_moved_nodes(self, recovery: RecoveryCost) -> None:
        """Emit which nodes have taken over ranks, with the seconds and the bytes that it cost.

        If a node first joined next to the draining one that it replaces, the cost includes that of joining, which is
        remembered from the join.
        """
        down_s, joined = max(0.0, self.committed_at - recovery.failed), dict(self._beside)
        if recovery.swap:
            cost = max(0.0, down_s - self.costs.step_s), recovery.moved_bytes
            self._beside = dict.fromkeys(self._transaction.record.replacements_among(recovery.nodes), cost)
        for name, place in recovery.taken.items():
            before_s, bytes_before = joined.get(name, (0.0, 0))
            self._transaction.emit(
                NodeMoved,
                from_node=place.from_node,
                to_node=name,
                reason=place.reason,
                down_s=before_s + down_s,
                moved_bytes=bytes_before + recovery.moved_bytes,
                detail=place.why,
            )


def _replaced(workers: Sequence[str], before: Sequence[str]) -> str:
    """Return the action that leads from the workers before to the present ones, which are not more: "restart" for new
    processes in the same local ranks, else "replace" for equal numbers, else "shrink".
    """
    if set(map(node_and_index_of, workers)) == set(map(node_and_index_of, before)):
        return "restart"
    return "replace" if len(workers) == len(before) else "shrink"


def _only_loss_is_infinite(commit: Commit) -> bool:
    """Return whether a step with a known result has finite gradients but a loss that is not finite."""
    return commit.sample_hashes >= 0 and not commit.skipped and not math.isfinite(commit.mean_loss)
