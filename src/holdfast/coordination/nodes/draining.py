"""Draining: nodes leave at a step boundary, once no state is lost with them.

If a standby replaces the node, it joins next to it first, during training, like any newcomer. Its state is transferred
meanwhile, and a failure loses nothing, because the node is still a member. Then the node leaves.

Leaving is not a failure. The others are stopped and continue without the node as after a loss (DESIGN.md 3), but all
have reported. The node counts until a decision says that all its state is also elsewhere. From then on it is retained:
it keeps its state, its report counts after a failure of the others, and it is taken back if it is needed. Once a step
after the decided one has passed without the node, all members have their state, including its replacement. Then the
node is released, or becomes a standby. So a failure during draining costs no more than one before it.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Collection, Iterable, Sequence

import msgspec

from holdfast.coordination.config import CoordinatorConfig
from holdfast.coordination.failures.escalation import EVENT_REASONS
from holdfast.coordination.generations.interruption import Interruption
from holdfast.coordination.generations.planner import hold_only_copy, lacks_slots, shortage, slots_of
from holdfast.coordination.inputs import Failure
from holdfast.coordination.membership import Node
from holdfast.coordination.nodes.disconnected_nodes import DisconnectedNodes
from holdfast.coordination.nodes.replacements import Replacements, named
from holdfast.coordination.nodes.standbys import StandbyNodes
from holdfast.coordination.progress.costs import Cost, MeasuredCosts
from holdfast.coordination.progress.ledger import StepLedger
from holdfast.coordination.progress.recovery_cost import DRAIN, MOVE
from holdfast.coordination.transaction import Transaction
from holdfast.errors import EXIT_DONE, EXIT_FAILED, BadInputError, RefusedError, UnreachableError
from holdfast.protocol.events import NodeLeft, NodeStayed
from holdfast.protocol.failures import FailureKind
from holdfast.protocol.messages.agent import EndNode, Refused
from holdfast.protocol.names import node_of
from holdfast.protocol.plan import GenerationPlan
from holdfast.protocol.record import MAX_NODES_KEPT, Departure

DRAINED, MOVED = "drained", "moved"
#: After a failed try to release a node, the next one follows after this many steps.
RETRY_STEPS = 10
#: At most this many drained nodes are remembered.
_KEPT = MAX_NODES_KEPT


class Draining:
    """Drains and moves nodes: requested, in progress and done."""

    def __init__(
        self,
        transaction: Transaction,
        config: CoordinatorConfig,
        ledger: StepLedger,
        stopping: Interruption,
        absences: DisconnectedNodes,
        standbys: StandbyNodes,
        replacing: Replacements,
        costs: MeasuredCosts,
    ) -> None:
        self._transaction = transaction
        self._config = config
        self._ledger = ledger
        self._interruption = stopping
        self._disconnected = absences
        self._standbys = standbys
        self._replacements = replacing
        self._costs = costs
        #: Details for the event when a node with a deadline has left, by node.
        self._noted: dict[str, str] = {}
        #: Before this step, members are not stopped again for a node that could not leave.
        self._not_before = 0

    # ---- requests of users ----

    def request(self, names: Sequence[str], to: Sequence[str] = (), *, stays: bool = False) -> None:
        """Record that these nodes must leave, which happens at a step boundary; nodes that already leave or have left
        are skipped.

        Args:
            stays: each node waits for a warm standby that takes over its ranks, and becomes a standby itself.
            to: the standbys for the first nodes, in order; the other nodes get any.

        Raises:
            BadInputError, UnreachableError, RefusedError: as in `check`.
        """
        transaction, new = self._transaction, self.check(names, to, stays=stays)
        if not new:
            return
        known, targets = {one.node: one for one in transaction.record.leaving}, dict(zip(names, to, strict=False))
        asked = (known.get(name, Departure(node=name, since=transaction.now)) for name in new)
        asked = (msgspec.structs.replace(one, stays=stays, to=targets.get(one.node, "")) for one in asked)
        transaction.change(leaving=(*(one for one in transaction.record.leaving if one.node not in new), *asked))
        self._not_before = 0

    def check(self, names: Sequence[str], to: Sequence[str] = (), *, stays: bool = False) -> list[str]:
        """Check a request, with the arguments of `request`, without changing anything; return the nodes that are not
        leaving yet.

        A node that moves may still be asked to leave.

        Raises:
            BadInputError: no node is named, or one is named twice, or a target is not a standby.
            UnreachableError: a node does not exist.
            RefusedError: the job is over, or could not continue without the nodes, or its workers are being replaced,
                or there are not enough standbys; the message has the remedy.
        """
        transaction, record = self._transaction, self._transaction.record
        if not names:
            raise BadInputError("no node is named: name the nodes that should leave")
        for list_of_names in (names, to):
            twice = next((name for place, name in enumerate(list_of_names) if name in list_of_names[:place]), None)
            if twice is not None:
                raise BadInputError(f"node {twice!r} is named twice")
        if record.plan is None and self._disconnected.replacing:
            raise RefusedError("all workers are being replaced: ask again once they are here")
        if stays:
            self._replacements.check_targets(names, to)
        drained = {one.node for one in record.drained}
        for name in names:
            if name not in transaction.members.nodes and name not in drained and not transaction.planned_on(name):
                known = ", ".join(sorted(transaction.members.nodes)) or "none"
                raise UnreachableError(f"there is no node {name!r}: the nodes are {known}")
        if record.outcome:
            raise RefusedError(f"the job is {record.outcome}: nodes need not leave it")
        before = {one.node for one in record.leaving if stays or not one.stays}
        new = [name for name in names if name not in before and name not in drained]
        if new and stays:
            self._replacements.check_room(new)
        elif new and (why := self._explain_refusal({one.node for one in record.leaving if not one.stays} | set(new))):
            raise RefusedError(f"{named(new)} cannot leave: {why}")
        return new

    def on_end_notice(self, name: str, grace_s: float) -> str:
        """Drain a node that will end in `grace_s` seconds in any case; interrupt the step at once if its end would be
        too late.

        Ignored if the job is over, or if the node leaves already and is retained or has a deadline.

        Returns:
            Why it cannot leave before, or "" if it drains or the notice is ignored. If it cannot, it stays until its
            end, and is lost.
        """
        transaction, record = self._transaction, self._transaction.record
        others = tuple(one for one in record.leaving if one.node != name)
        known = next((one for one in record.leaving if one.node == name), Departure(node=name, since=transaction.now))
        if record.outcome or known.owed or known.until:
            return ""
        if why := self._explain_refusal({one.node for one in others if not one.stays} | {name}):
            return why
        until = transaction.now + grace_s
        departure = Departure(node=name, since=transaction.now, until=until, beside=known.beside, closes=known.closes)
        transaction.change(leaving=(*others, departure))
        self._not_before = 0
        plan = record.plan
        if plan is not None and not plan.last and record.pending is None and grace_s < self._costs.step_s:
            # The next step boundary would be too late.
            self.start_at_boundary(plan)
        return ""

    def on_recall(self, name: str) -> str:
        """Drain a node that the pool recalls, without a standby for its ranks, and even if fewer copies of the state
        remain.

        Returns:
            Why it cannot leave now, or "".
        """
        record, now = self._transaction.record, self._transaction.now
        others = tuple(one for one in record.leaving if one.node != name)
        known = next((one for one in record.leaving if one.node == name), Departure(node=name, since=now))
        leaving = {one.node for one in others if not one.stays} | {name}
        if why := self._explain_shortage(self._rest(leaving, without={name})):
            return why
        self._transaction.change(
            leaving=(*others, Departure(node=name, since=known.since, until=known.until, closes=True))
        )
        self._not_before = 0
        return ""

    def readmit(self, name: str) -> bool:
        """Remove a node from the drained ones, so that it may join again; return whether it had been drained."""
        drained = self._transaction.record.drained
        rest = tuple(one for one in drained if one.node != name)
        if len(rest) < len(drained):
            self._transaction.change(drained=rest)
        return len(rest) < len(drained)

    def cancel_recall(self, name: str) -> None:
        """Let a node that was recalled and has not left stay: its pool has granted it again.

        It still leaves if it is retained already, or if its replacement has been chosen to join next to it.
        """
        leaving = self._transaction.record.leaving
        kept = tuple(one for one in leaving if one.node != name or not one.closes or one.owed or one.beside)
        if len(kept) < len(leaving):
            self._transaction.change(leaving=kept)

    def undrain(self, name: str) -> bool:
        """Allow a drained node to join again; return whether it had been drained.

        Raises:
            RefusedError: it has not left yet.
        """
        if any(one.node == name for one in self._transaction.record.leaving):
            raise RefusedError(f"node {name} is still about to leave: ask again once it has left")
        return self.readmit(name)

    def is_drained(self, name: str) -> bool:
        """Return whether a node was drained and may not join."""
        return any(one.node == name for one in self._transaction.record.drained)

    # ---- leaving ----

    def find_leaving_workers(self, workers: Iterable[str], plan: GenerationPlan | None = None) -> list[str]:
        """Return which of these workers are on nodes that can leave as soon as possible, or are retained.

        A node that is moved, or has a deadline late enough, waits for a warm standby. If that can join next to it
        first, it waits until then.

        Args:
            plan: the plan in force, if it will be interrupted only for these nodes. None: it is interrupted anyway, so
                a standby that is still joining counts, too.
        """
        if not (leaving := self._transaction.record.leaving):
            return []
        here = {one.node for one in leaving if one.owed or self._replacements.is_beside(one, plan)}
        waiting = [one for one in leaving if not one.owed and not self._replacements.is_beside(one)]
        found = self._replacements.select_standbys(waiting)
        for one in waiting:
            if (not self._replacements.goes_beside(one)) if one.node in found else not (one.stays or self.in_time(one)):
                here.add(one.node)
        return [worker for worker in workers if node_of(worker) in here]

    def promote_replacements(self, *, even_if_late: bool = False) -> None:
        """Promote warm standbys to join next to the draining nodes that they will replace.

        Args:
            even_if_late: also if there is too little time for that, or if nodes otherwise join only by a restart.
        """
        waiting = [
            one for one in self._transaction.record.leaving if not one.owed and not self._replacements.is_beside(one)
        ]
        waiting = [one for one in waiting if even_if_late or self._replacements.goes_beside(one)]
        for name, (standby, _) in self._replacements.select_standbys(waiting).items():
            self._replacements.promote(standby)
            entry = next(one for one in waiting if one.node == name)
            self._write(msgspec.structs.replace(entry, beside=standby))
            self._not_before = 0

    def assign_lost_ranks(self) -> None:
        """Give lost draining nodes' ranks to the standbys that had joined to replace them."""
        for one in self._transaction.record.leaving:
            if one.node not in self._transaction.members.nodes and self._replacements.is_beside(one):
                self._replacements.assign_joined_standby(one)

    def in_time(self, one: Departure) -> bool:
        """Return whether a node with a deadline can wait until a standby has warmed up to replace it.

        False without a deadline, and for a node that the pool recalls.
        """
        return bool(one.until) and not one.closes and self._replaced_in_s() <= one.until - self._transaction.now

    def _replaced_in_s(self) -> float:
        """Return the estimated seconds until the first cold standby is warm and can replace a node; infinite without
        one.
        """
        if not self._config.spec.recovery.uses_standbys:
            return math.inf
        warm_s = (self._standbys.warm_in_s(name) for name in self._transaction.members.standbys)
        cold_s = min((seconds for seconds in warm_s if seconds > 0), default=math.inf)
        return cold_s + self._costs.step_s + self._costs.of(Cost.DECISION)

    def _keep_details(self, one: Departure, *, replaced: bool) -> None:
        """Note for the event of a node's leaving how much of its grace was left, and, unless `replaced`, that it has no
        standby.

        Args:
            one: the departure of a node with a deadline.
            replaced: whether a standby takes over its ranks.
        """
        grace_s, left_s = one.until - one.since, one.until - self._transaction.now
        how = f"told to end with a grace of {grace_s:g} s, of which {max(left_s, 0.0):.1f} s were left"
        cold_s = self._replaced_in_s()
        if not replaced:
            late = f"one could have in {cold_s:.1f} s" if math.isfinite(cold_s) else "there is none"
            how += f"; no standby has taken its place: {late}"
        self._noted[one.node] = how

    def release_unplanned(self) -> None:
        """Release the draining nodes that are in no plan and hold no stashed state."""
        for one in self._transaction.record.leaving:
            if not (self._transaction.planned_on(one.node) or one.node in self._transaction.record.stash_nodes):
                self._complete(one)

    def release_proven(self, plan: GenerationPlan, written: int) -> None:
        """Release the draining nodes if their retained state is unneeded, while the others train by this plan.

        A retained worker that has not applied the newest step keeps that step from being committed. If it is the last
        step, no later one proves that all members have it, and members that save wait for the commit before they
        finish. So a fully written checkpoint of the step releases the node, too. Moves for which no standby can ever
        come are cancelled, with an event.

        Args:
            written: the newest step of which all parts of a checkpoint are written.
        """
        for one in self._transaction.record.leaving:
            safe = max(self._ledger.proven, written) >= one.step
            if one.owed and (safe or not self._transaction.members.unfinished(plan)):
                self._complete(one)
            elif (
                one.stays
                and not self._replacements.is_beside(one)
                and (why := self._replacements.explain_no_standby(one))
            ):
                transaction, record = self._transaction, self._transaction.record
                transaction.change(leaving=tuple(other for other in record.leaving if other.node != one.node))
                transaction.emit(NodeStayed, node=one.node, reason="no_standby", detail=why)

    def start_at_boundary(self, plan: GenerationPlan) -> None:
        """Interrupt the generation at a step boundary if some nodes can leave, so that little work is repeated.

        Not before a step of this plan is committed.

        Args:
            plan: the plan in force, which nothing is about to change.
        """
        if (decision := self._transaction.record.decision) is not None and self._ledger.committed <= decision.applied:
            # The commit belongs to the plan's initial state. Members are already in the midst of the next step.
            return
        if leavers := self.find_next_leavers(plan):
            staying = {one.node for one in self._transaction.record.leaving if one.stays}
            only_moves = staying >= set(map(node_of, leavers))
            self._interruption.start(self._transaction.now, reason=MOVE if only_moves else DRAIN)

    def find_next_leavers(self, plan: GenerationPlan) -> list[str]:
        """Return the members of the plan in force that can leave at the end of the step.

        Members that the others need for all experts are left out. [] if none can leave yet, if they have the only copy
        of some experts, or within 10 steps of a failed try.
        """
        if self._ledger.committed < self._not_before:
            return []
        if not (leavers := self.find_leaving_workers(plan.workers, plan)):
            return []
        leavers = self.select_dispensable(leavers, [info.id for info in self._transaction.members.workers()])
        return [] if not leavers or hold_only_copy(self._transaction.record, plan, leavers) else leavers

    def select_dispensable(self, leavers: Collection[str], workers: Collection[str]) -> list[str]:
        """Return the leavers if they can all go together (`can_go`), else those of the first nodes that can; [] if none
        can.

        Args:
            leavers: the workers that should leave.
            workers: all workers that may take part.
        """
        if self.can_go(leavers, workers):
            return list(leavers)
        names = list(dict.fromkeys(map(node_of, leavers)))

        def first(nodes: int) -> list[str]:
            chosen = set(names[:nodes])
            return [worker for worker in leavers if node_of(worker) in chosen]

        # Normally, if some nodes can go, fewer of them can go, too.
        return first(bisect_left(range(1, len(names)), True, key=lambda nodes: not self.can_go(first(nodes), workers)))

    def can_go(self, leavers: Collection[str], workers: Iterable[str]) -> bool:
        """Return whether the remaining workers and the replacing standbys have slots for all experts; False if none
        remain.

        Args:
            leavers: the workers that leave.
            workers: all workers that may take part.
        """
        gone = set(leavers)
        candidates = (*workers, *self._replacements.find_replacing_workers(leavers))
        rest = [worker for worker in candidates if worker not in gone]
        return bool(rest) and not lacks_slots(self._transaction, self._config, rest)

    def postpone(self) -> None:
        """Postpone the next try to release nodes by 10 steps, because they have the only copy of some state."""
        self._not_before = self._ledger.committed + RETRY_STEPS

    def retain(self, leavers: Collection[str], step: int) -> list[str]:
        """Retain these workers, because the next plan begins without them from the state of `step`.

        Their ranks go to standbys that have joined next to them, or else to warm ones, which are promoted. If no
        standby replaces a node, the job wants one node less, unless the node has a deadline or only moves.

        Returns:
            The workers of standbys that take over their ranks.
        """
        transaction, names = self._transaction, set(map(node_of, leavers))
        leaving = [one for one in transaction.record.leaving if one.node in names]
        places = self._replacements.unfollowed(names)
        followed = [one for one in leaving if not one.owed and self._replacements.is_beside(one)]
        found = {name: standby for name, (standby, _) in self._replacements.select_standbys(places).items()}
        found |= {one.node: one.beside for one in followed}
        self._replacements.reassign_draining_nodes(found)
        for one in followed:
            self._replacements.assign_joined_standby(one)
        taking = self._replacements.stand_in_for(places)
        for one in leaving:
            retained = tuple(worker for worker in leavers if node_of(worker) == one.node)
            transaction.members.owe(one.node)
            if one.until and not (one.owed or one.closes):
                self._keep_details(one, replaced=one.node in found)
            if not (one.owed or one.stays or one.until or one.node in found):
                transaction.change(wanted=max(0, transaction.record.wanted - 1))
            beside = found.get(one.node, one.beside)
            self._write(msgspec.structs.replace(one, owed=retained, step=step, beside=beside))
        return taking

    def restore_retained(self, workers: Iterable[str]) -> None:
        """Make retained workers regular members again if they are in the next plan."""
        names = set(map(node_of, workers))
        for one in self._transaction.record.leaving:
            if one.owed and one.node in names:
                self._transaction.members.promote(one.node)
                self._write(msgspec.structs.replace(one, owed=(), step=0))

    def release_all(self) -> None:
        """Release all retained nodes without waiting: their state is unneeded."""
        for one in self._transaction.record.leaving:
            if one.owed:
                self._complete(one)

    def is_retained(self, name: str) -> bool:
        """Return whether a node is retained."""
        return any(one.owed and one.node == name for one in self._transaction.record.leaving)

    def on_failure(self, failure: Failure) -> bool:
        """Complete the leaving of a retained node if it, or one of its workers, fails.

        If the node itself fails, it is removed from the members, and its connection closed; one that hangs is told to
        reconnect.

        Returns:
            False for any other node, which is not handled.
        """
        transaction = self._transaction
        found = [one for one in transaction.record.leaving if one.node == failure.node and one.owed]
        if not found:
            return False
        node, why = transaction.members.nodes.get(failure.node), failure.evidence.detail or str(failure.kind)
        if node is not None and not failure.worker:
            if failure.kind is FailureKind.HANG:
                transaction.send(node.connection, Refused(why=why, exit_code=EXIT_FAILED, retry=True))
            if failure.kind is not FailureKind.CONNECTION_LOST:
                transaction.close(node.connection)
            transaction.members.remove(node.name)
        self._disconnected.stop_expecting(failure.node)
        self._complete(found[0], f"it was lost as it left: {why}")
        return True

    def _write(self, entry: Departure) -> None:
        """Replace the entry of a leaving node in the record."""
        leaving = self._transaction.record.leaving
        self._transaction.change(leaving=tuple(entry if one.node == entry.node else one for one in leaving))

    def _complete(self, one: Departure, why: str = "") -> None:
        """Complete a departure: the node is told to end, or becomes a standby if it stays; emit that it has left.

        A node without a deadline is recorded as drained, so that it cannot join again, and may reduce the wanted number
        of nodes.

        Args:
            why: details for the event.
        """
        transaction, record = self._transaction, self._transaction.record
        node = transaction.members.nodes.get(one.node)
        was_standby = node is not None and node.standby
        followed = self._replacements.is_beside(one) and not was_standby
        transaction.change(leaving=tuple(other for other in record.leaving if other.node != one.node))
        self._ledger.without(one.owed)
        for worker in one.owed:
            self._ledger.forget(worker)  # As a standby it has no state from now on.
            self._interruption.forget(worker)
        if one.stays:
            if one.owed or (node is not None and followed):
                transaction.emit(NodeLeft, node=one.node, reason=MOVED, detail=why)
            if node is not None and (one.owed or followed):
                self._standbys.make_standby(node, warm=bool(one.owed))
            return
        departure, places = Departure(node=one.node, since=one.since), not (was_standby or one.owed or followed)
        why = why or self._noted.pop(one.node, "")
        # A node with a deadline may come back, and its ranks may be filled.
        if not one.until:
            transaction.change(drained=(*record.drained, departure)[-_KEPT:], wanted=max(0, record.wanted - places))
        if node is not None:
            left = "has left" if one.until else "is drained"
            transaction.send(node.connection, EndNode(exit_code=EXIT_DONE, why=f"node {one.node} {left}", alone=True))
            self.forget(node)
        else:
            # It left while no coordinator ran, and need not come back.
            self._disconnected.stop_expecting(one.node)
        if not was_standby and (one.owed or node is not None):
            transaction.emit(NodeLeft, node=one.node, reason=DRAINED, detail=why)

    def depart(self, node: Node, reason: str, detail: str = "") -> tuple[str, ...]:
        """Remove a node that leaves on its own, and emit that unless it is a standby; return its workers.

        The draining of a retained node is completed.
        """
        workers = self.forget(node)
        retained = next((one for one in self._transaction.record.leaving if one.owed and one.node == node.name), None)
        if retained is not None:
            self._complete(retained, detail or f"it has left: {reason}")
        elif not node.standby:
            # A standby was never part of the job.
            self._transaction.emit(NodeLeft, node=node.name, reason=EVENT_REASONS.get(reason, reason), detail=detail)
        return workers

    def forget(self, node: Node) -> tuple[str, ...]:
        """Remove a node and the reports of its workers, without an event; return its workers."""
        self._disconnected.stop_expecting(node.name)
        for worker in (workers := self._transaction.members.remove(node.name)):
            self._ledger.forget(worker)
            self._interruption.forget(worker)
        return workers

    def set_aside(self, name: str) -> None:
        """Make a node without ranks a cold standby, because another node has the ranks for which it came.

        If its joining was reported, emit that it has left.
        """
        node = self._transaction.members.nodes[name]
        self._disconnected.stop_expecting(name)
        if node.told or node.returning:
            self._transaction.emit(NodeLeft, node=name, reason=MOVED, detail="another node has taken its place")
        self._standbys.make_standby(node, warm=False)

    # ---- checks ----

    def _rest(self, names: Collection[str], without: Collection[str] = ()) -> list[str]:
        """Return the workers that remain after these nodes have left, with the workers of standbys that would replace
        them.

        Args:
            names: the nodes that leave.
            without: the nodes among them that are not replaced.
        """
        workers = (info.id for info in self._transaction.members.workers())
        taking = self._find_replacing_workers([name for name in names if name not in without])
        return [worker for worker in workers if node_of(worker) not in names] + taking

    def _explain_shortage(self, rest: list[str]) -> str:
        """Return why the job could not continue with only these workers, with the remedy, or "".

        It needs at least one worker, and slots for all experts.
        """
        transaction, record, config = self._transaction, self._transaction.record, self._config
        if not rest:
            return "no node would be left; add some first (holdfast scale +1), or end the job (holdfast stop)"
        if lacks_slots(transaction, config, rest):
            found = shortage(record, transaction.members, rest)
            return str(found) if found is not None else "the others are too few for a replica of all experts"
        return ""

    def _explain_refusal(self, names: Collection[str]) -> str:
        """Return why the job could not continue with its guarantees if these nodes left, or "".

        Besides `_explain_shortage`, each expert must stay on as many nodes as the fault threshold asks for, unless it
        already is not.
        """
        transaction, record, config, rest = self._transaction, self._transaction.record, self._config, self._rest(names)
        if why := self._explain_shortage(rest):
            return why
        plan, shape = record.plan, record.expert_shape
        if shape is None or plan is None or plan.expert_plan is None or config.spec.experiments.static_experts:
            return ""
        asked, nodes = plan.expert_plan.asked, len({node_of(worker) for worker in rest})
        if plan.expert_plan.given < asked:
            # The guarantee is already broken.
            return ""
        slots = slots_of(transaction.members, rest, shape)
        if nodes < asked or slots < asked * shape.experts:
            lacking = asked * shape.experts - slots
            more = max(asked - nodes, -(-lacking // shape.slots))
            return (
                f"each expert would live on fewer than {asked} nodes (--fault-threshold); "
                f"add nodes first (holdfast scale +{more})"
            )
        return ""

    def _find_replacing_workers(self, names: Collection[str]) -> list[str]:
        """Return the workers of the warm standbys that would replace these nodes now; nodes without one are skipped."""
        known, since = {one.node: one for one in self._transaction.record.leaving}, self._transaction.now
        found = self._replacements.select_standbys(
            [known.get(name, Departure(node=name, since=since)) for name in names]
        )
        nodes = self._transaction.members.nodes
        return [worker for standby, _ in found.values() for worker in nodes[standby].workers]
