"""Changes of the generation at a step boundary: new workers join, experts move, or slow nodes get smaller shares.

The pending group is built next to the current one, then all members swap:

Prepare -> all Prepared -> Arm -> every swap flag up in one commit operation -> the pending plan is in force.

If a joining worker is lost, the others need not stop. Before Arm, the plan is cancelled (Void). After Arm, members are
ordered to lower their flags (Disarm). As soon as one member reports that its flag is down from the current step on, no
step can swap, and Void follows. If all flags were already up, the plan is in force, and the loss is an ordinary
failure.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import msgspec

from holdfast.coordination.config import CoordinatorConfig
from holdfast.coordination.experts.static_experts import choose_ep_size, count_usable
from holdfast.coordination.generations.announcing import Newcomers, announce_generation, warn_of_one_replica
from holdfast.coordination.generations.assignment import slowest_time
from holdfast.coordination.generations.configuration_check import wanted_places
from holdfast.coordination.generations.plan_distribution import PlanDistribution
from holdfast.coordination.generations.planner import factors_of, plan_generation, plan_with
from holdfast.coordination.progress.announced import Progress
from holdfast.coordination.progress.loads import LoadBook
from holdfast.coordination.roles import only_whole
from holdfast.coordination.transaction import Transaction
from holdfast.planning import Shortage
from holdfast.protocol.messages.orders import Arm, Disarm, Void
from holdfast.protocol.messages.worker import Disarmed
from holdfast.protocol.names import node_of
from holdfast.protocol.plan import Decision, DecisionKind, ExpertPlan, GenerationPlan

#: A newcomer that cannot be reached is tried again at least this often.
LONGEST_RETRY_S = 60.0

#: A member that receives Arm during a step raises its flag at the end of that step. If no swap follows within this many
#: steps, a member has not received it.
_STEPS_TO_SWAP = 3


class PendingGeneration:
    """The pending generation, until it is in force or cancelled."""

    def __init__(
        self,
        transaction: Transaction,
        config: CoordinatorConfig,
        loads: LoadBook,
        telling: PlanDistribution,
        newcomers: Newcomers,
    ) -> None:
        self._transaction = transaction
        self._newcomers = newcomers
        self._plan_distribution = telling
        self._loads = loads
        self._config = config
        # The previous coordinator may have armed the pending group. Then only Stop can cancel it safely.
        self.armed = transaction.record.pending is not None
        #: The pending generation for which this coordinator has sent Arm.
        self._told = 0
        self._armed_after = 0
        #: The pending generation for which Disarm was sent.
        self._disarming = 0
        #: When the worker was lost for which Disarm was sent.
        self._lost_at = 0.0
        self._since = 0.0
        self._not_before = 0.0
        #: Newcomers with failed groups: the number of failures, and until when they are left out.
        self._left_out: dict[str, tuple[int, float]] = {}
        #: The generation and slow nodes for which the division of micro-batches was last checked.
        self._divided: tuple[int, Mapping[str, float]] | None = None

    def on_worker_attached(self) -> None:
        """Wait for more workers after a new one has attached: for the join window, before a plan is proposed."""
        self._not_before = max(self._not_before, self._transaction.now + self._config.spec.recovery.join_window)

    def restart_timeout(self) -> None:
        """Restart the time limit of the pending group."""
        self._since = self._transaction.now

    @property
    def overdue(self) -> bool:
        """Whether the pending group takes too long to build, or steps pass without a swap although all are armed.

        Long steps are allowed: flags go up at the end of a step.
        """
        pending, transaction = self._transaction.record.pending, self._transaction
        if pending is None or transaction.now - self._since <= self._config.prepare_timeout_s:
            return False
        armed = self._told == pending.generation != self._disarming
        return not armed or transaction.position.step >= self._armed_after + _STEPS_TO_SWAP

    def newcomers(self, plan: GenerationPlan) -> list[str]:
        """Return the new workers of complete nodes, in complete replica groups, that can join now and are useful.

        [] while nodes are still connecting, shortly after a failed join, or if they are too few for static experts.
        Workers with which a group failed are left out for some time.
        """
        transaction, config = self._transaction, self._config
        if transaction.now < self._not_before or self._newcomers.gathering:
            return []
        fresh = [worker for worker in transaction.members.outside(plan) if not self._is_left_out(worker)]
        fresh = only_whole(fresh, plan.places)
        if config.spec.experiments.static_experts:
            size = choose_ep_size(transaction.record.expert_shape, config.spec.experiments.ep_size)
            world = len(plan.members)
            return fresh if not isinstance(size, Shortage) and count_usable(world + len(fresh), size) > world else []
        return fresh

    def prepare(self, plan: GenerationPlan) -> None:
        """Propose a plan with the newcomers, or without newcomers a better division of micro-batches.

        Nothing is proposed if there is neither. With experts, nodes that replace others join before all other
        newcomers.
        """
        transaction = self._transaction
        fresh = self.newcomers(plan)
        if not fresh:
            self._divide(plan)
            return
        members = list(plan.workers)
        if plan.expert_plan is not None and (
            beside := transaction.record.replacements_among(set(map(node_of, [*members, *fresh])))
        ):
            # Replacements get the experts of the nodes that they replace. With other newcomers, all experts would be
            # placed again.
            fresh = [worker for worker in fresh if node_of(worker) in beside] or fresh
        held = dict(zip(members, plan.expert_plan.placement, strict=True)) if plan.expert_plan else {}
        workers, loads = [*members, *fresh], self._loads.tokens
        pending = plan_generation(transaction.record, transaction.members, workers, members, held, self._config, loads)
        assert not isinstance(pending, Shortage), "more nodes have more slots"
        self._propose(pending)

    def rearrange(self, plan: GenerationPlan, experts: ExpertPlan) -> None:
        """Propose a plan of the same members with another placement; experts move during its first step."""
        transaction, workers = self._transaction, plan.workers
        experts = msgspec.structs.replace(experts, beside=experts.moves > 0)
        roles = {member.worker: member.role for member in plan.members}
        self._propose(plan_with(transaction.record, transaction.members, roles, workers, experts, self._config))

    def _divide(self, plan: GenerationPlan) -> None:
        """Propose a plan of the same members if it shortens the compute time of a step's slowest rank.

        Checked once for each generation and change of the known speeds; not with experts.
        """
        record = self._transaction.record
        seen = plan.generation, record.relieved
        if self._divided == seen or self._transaction.now < self._not_before or plan.expert_plan is not None:
            return
        self._divided = seen
        if not (plan.counts or record.relieved):
            return
        roles = {member.worker: member.role for member in plan.members}
        pending = plan_with(record, self._transaction.members, roles, plan.workers, None, self._config)
        each, factors = record.micro_batches, factors_of(record, plan.unit_heads, self._config)
        if slowest_time(each, factors, pending.counts) < slowest_time(each, factors, plan.counts):
            self._propose(pending)

    def _propose(self, pending: GenerationPlan) -> None:
        """Record a pending plan, and send it to its members, which build its group next to the current one."""
        transaction = self._transaction
        self._newcomers.on_plan_made()
        transaction.change(pending=pending, generation=pending.generation)
        self.armed, self._since = False, transaction.now
        self._plan_distribution.send_prepare(pending, transaction.record.plan)

    def promote(self, step: int, progress: Progress) -> None:
        """Put the pending plan in force, if there is one: `step` passed with every swap flag up.

        Records and emits the new generation. Its members have swapped on their own.
        """
        transaction = self._transaction
        before, pending = transaction.record.plan, transaction.record.pending
        if pending is None:
            return
        joins = before is None or set(pending.workers) != set(before.workers)
        progress.start_swap(step, pending, "grow" if joins else "rebalance")
        decision = Decision(kind=DecisionKind.REDO, applied=step)
        transaction.change(plan=pending, pending=None, decision=decision, **wanted_places(transaction, pending))
        announce_generation(transaction, pending, "join" if joins else "rebalance")
        warn_of_one_replica(transaction, before, snapshots=self._config.spec.checkpoint.snapshot_every > 0)

    def arm(self) -> None:
        """Order all members to raise their swap flags, once for each pending plan, when all have built its group."""
        transaction = self._transaction
        pending = transaction.record.pending
        if pending is None or self._told == pending.generation:
            return
        if not transaction.members.prepared(pending):
            return
        self.armed, self._told, self._armed_after = True, pending.generation, transaction.position.step
        transaction.order_all(pending.workers, Arm(term=transaction.record.term, generation=pending.generation))

    def disarm(self, lost_at: float) -> bool:
        """Order the members to lower their swap flags after the loss of a joining worker; once for each pending plan.

        Args:
            lost_at: when it was lost, in Unix seconds.

        Returns:
            Whether a member is connected that can answer.
        """
        transaction = self._transaction
        plan, pending = transaction.record.plan, transaction.record.pending
        if plan is None or pending is None or not transaction.members.live(plan.workers):
            return False
        if self._disarming == pending.generation:
            return True
        # Arm is not sent again, even to members that reconnect: their answers would not be final.
        self._disarming = self._told = pending.generation
        self._lost_at = lost_at
        self.restart_timeout()
        transaction.order_all(plan.workers, Disarm(term=transaction.record.term, generation=pending.generation))
        return True

    def on_disarmed(self, told: Disarmed) -> None:
        """Cancel the pending plan, because a member's flag stays down. Answers to another order are ignored."""
        pending = self._transaction.record.pending
        asked = pending is not None and told.generation == pending.generation == self._disarming
        if asked and told.term == self._transaction.record.term:
            self.armed = False
            self.cancel()

    @property
    def lost_at(self) -> float | None:
        """When a worker of the pending plan was lost although the plan may still come into force, or None."""
        pending = self._transaction.record.pending
        return self._lost_at if pending is not None and pending.generation == self._disarming else None

    def cancel(self, suspects: Collection[str] | None = None) -> None:
        """Cancel a pending plan that cannot come into force: tell its members, and retry a little later. It must not be
        armed.

        Args:
            suspects: the workers with which the group could not be built, as far as known; None without suspects. They
                are left out for a time that doubles with each failure, so that one unreachable worker cannot block
                others. If no newcomer is among them, it is the newcomers that have not built the group.
        """
        transaction = self._transaction
        plan, pending = transaction.record.plan, transaction.record.pending
        assert pending is not None
        assert not self.armed
        transaction.change(pending=None)
        self._divided = None
        self._not_before = transaction.now + self._config.join_retry_s
        joiners = [worker for worker in pending.workers if plan is None or plan.rank(worker) is None]
        if suspects is not None:
            self._leave_out([w for w in joiners if w in suspects] or self._unprepared(joiners, pending))
        transaction.order_all(pending.workers, Void(term=transaction.record.term, generation=pending.generation))

    def _unprepared(self, joiners: list[str], pending: GenerationPlan) -> list[str]:
        """Return which of these live workers have not built the pending group."""
        infos = [self._transaction.members.worker(worker) for worker in joiners]
        return [info.id for info in infos if info is not None and info.prepared < pending.generation]

    def _leave_out(self, workers: list[str]) -> None:
        """Leave these workers out of pending plans: for twice as long after each failure, at most a minute."""
        now, retry_s = self._transaction.now, self._config.join_retry_s
        members = self._transaction.members
        self._left_out = {w: entry for w, entry in self._left_out.items() if members.worker(w) is not None}
        for worker in workers:
            tries = 1 + self._left_out.get(worker, (0, 0.0))[0]
            self._left_out[worker] = tries, now + min(LONGEST_RETRY_S, retry_s * 2**tries)

    def _is_left_out(self, worker: str) -> bool:
        return self._transaction.now < self._left_out.get(worker, (0, 0.0))[1]
