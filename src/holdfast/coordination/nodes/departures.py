"""Nodes that leave in good order: asked to go, they train on to a step's end, and go once nothing is lost with them.

A standby that takes the place joins beside the node first, while all train: by a swap, like any newcomer. Nobody waits
for its state, and where it is lost on the way nothing is: the node is a member still. Once it is there, the node goes.

Leaving is no failure. The others are stopped and go on without them as after a loss (DESIGN.md 3), but all have
reported: whoever leaves counts until it is decided that what it has is with others, too. From that decision on it is
owed: it keeps what it has, its report counts where the others fail, and it is taken back where it is needed. Only where
a step has passed without it after the decided one has everybody the state that it leads to (whoever took its place,
too): then it goes, or is a standby from there on. So a failure beside it is no worse than it would have been before.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence

import msgspec

from holdfast.coordination.config import CoordinatorConfig
from holdfast.coordination.failures.ladder import LEFT_AS
from holdfast.coordination.generations.planner import lacks_slots, only_with, shortage, slots_of
from holdfast.coordination.generations.stopping import Stopping
from holdfast.coordination.inputs import Failure
from holdfast.coordination.membership import Node
from holdfast.coordination.nodes.absences import Absences
from holdfast.coordination.nodes.replacing import Replacing, named
from holdfast.coordination.nodes.standbys import Standbys
from holdfast.coordination.progress.costs import Cost, MeasuredCosts
from holdfast.coordination.progress.ledger import StepLedger
from holdfast.coordination.progress.recovery_cost import DRAIN, MOVE
from holdfast.coordination.turn import Transaction
from holdfast.errors import EXIT_DONE, EXIT_FAILED, BadInputError, RefusedError, UnreachableError
from holdfast.protocol.events import NodeLeft, NodeStayed
from holdfast.protocol.failures import FailureKind
from holdfast.protocol.messages.agent import EndNode, Refused
from holdfast.protocol.names import node_of
from holdfast.protocol.plan import GenerationPlan
from holdfast.protocol.record import MAX_NODES_KEPT, Departure

DRAINED, MOVED = "drained", "moved"
#: where a node could not go, although it was stopped for that, it is tried again after so many steps
RETRY_STEPS = 10
#: of those that have left, so many are remembered
_KEPT = MAX_NODES_KEPT


class Departures:
    """Who is to go, who goes now, and who has gone."""

    def __init__(
        self,
        transaction: Transaction,
        config: CoordinatorConfig,
        ledger: StepLedger,
        stopping: Stopping,
        absences: Absences,
        standbys: Standbys,
        replacing: Replacing,
        costs: MeasuredCosts,
    ) -> None:
        self._transaction = transaction
        self._config = config
        self._ledger = ledger
        self._stopping = stopping
        self._absences = absences
        self._standbys = standbys
        self._replacing = replacing
        self._costs = costs
        #: what is told of those that were given a time, once they have left, by node
        self._noted: dict[str, str] = {}
        #: the step before which nobody is stopped again for a node that could not go
        self._not_before = 0

    # ---- what users ask for ----

    def ask(self, names: Sequence[str], to: Sequence[str] = (), *, stays: bool = False) -> None:
        """Have these nodes leave; those that leave already, or have left, are asked in vain.

        Args:
            stays: each gives its place to a standby, once one is warm, and is a standby itself from then on.
            to: to these, in order; the others to any.

        Raises:
            BadInputError, UnreachableError, RefusedError: as `check`.
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
        """Return those of these nodes that do not leave already, and have not left; the arguments are those of `ask`.

        Raises:
            BadInputError: a node is named twice, or none is; or a target is none.
            UnreachableError: there is no such node.
            RefusedError: the job is over, or could not go on as it is without them; the message says what would do.
        """
        transaction, record = self._transaction, self._transaction.record
        if not names:
            raise BadInputError("no node is named: say which is to leave")
        for given in (names, to):
            twice = next((name for place, name in enumerate(given) if name in given[:place]), None)
            if twice is not None:
                raise BadInputError(f"node {twice!r} is named twice")
        if record.plan is None and self._absences.replacing:
            raise RefusedError("all workers are being replaced: ask again once they are here")
        if stays:
            self._replacing.check_targets(names, to)
        gone = {one.node for one in record.drained}
        for name in names:
            if name not in transaction.members.nodes and name not in gone and not transaction.planned_on(name):
                known = ", ".join(sorted(transaction.members.nodes)) or "none"
                raise UnreachableError(f"there is no node {name!r}: the nodes are {known}")
        if record.outcome:
            raise RefusedError(f"the job is {record.outcome}: nobody need leave it")
        before = {one.node for one in record.leaving if stays or not one.stays}
        new = [name for name in names if name not in before and name not in gone]
        if new and stays:
            self._replacing.check_room(new)
        elif new and (why := self._why_not({one.node for one in record.leaving if not one.stays} | set(new))):
            raise RefusedError(f"{named(new)} cannot leave: {why}")
        return new

    def noticed(self, name: str, grace_s: float) -> str:
        """A node ends in so many seconds, whatever the others do: have it leave before.

        Returns:
            Why that cannot be, "" where it can: then it stays to its end, and is lost.
        """
        transaction, record = self._transaction, self._transaction.record
        others = tuple(one for one in record.leaving if one.node != name)
        known = next((one for one in record.leaving if one.node == name), Departure(node=name, since=transaction.now))
        if record.outcome or known.owed or known.until:
            return ""
        if why := self._why_not({one.node for one in others if not one.stays} | {name}):
            return why
        until = transaction.now + grace_s
        told = Departure(node=name, since=transaction.now, until=until, beside=known.beside, closes=known.closes)
        transaction.change(leaving=(*others, told))
        self._not_before = 0
        plan = record.plan
        if plan is not None and not plan.last and record.pending is None and grace_s < self._costs.step_s:
            self.begin(plan)  # (at the end of the step it would be gone)
        return ""

    def recalled(self, name: str) -> str:
        """The pool wants a node back: have it leave in good order, although the others may keep fewer copies then.

        Returns:
            Why that cannot be now, "" where it can.
        """
        record, now = self._transaction.record, self._transaction.now
        others = tuple(one for one in record.leaving if one.node != name)
        known = next((one for one in record.leaving if one.node == name), Departure(node=name, since=now))
        gone = {one.node for one in others if not one.stays} | {name}
        if why := self._cannot(self._rest(gone, without={name})):
            return why
        self._transaction.change(
            leaving=(*others, Departure(node=name, since=known.since, until=known.until, closes=True))
        )
        self._not_before = 0
        return ""

    def readmit(self, name: str) -> bool:
        """A node may come again; return whether it had left for good."""
        drained = self._transaction.record.drained
        rest = tuple(one for one in drained if one.node != name)
        if len(rest) < len(drained):
            self._transaction.change(drained=rest)
        return len(rest) < len(drained)

    def undrain(self, name: str) -> bool:
        """Let a node come back that has left; return whether it had been drained.

        Raises:
            RefusedError: it has not left yet.
        """
        if any(one.node == name for one in self._transaction.record.leaving):
            raise RefusedError(f"node {name} is still about to leave: ask again once it has left")
        return self.readmit(name)

    def bars(self, name: str) -> bool:
        """Tell whether a node has left for good, as far as anybody has said."""
        return any(one.node == name for one in self._transaction.record.drained)

    # ---- leaving ----

    def going(self, workers: Iterable[str], plan: GenerationPlan | None = None) -> list[str]:
        """Return those of these workers whose nodes leave once they can, or have left and are owed.

        A node that is to give its place to a standby waits for one that is warm, and for that to have joined.

        Args:
            plan: in force, and to be left for them alone; None: it is left anyway, so whoever is about to join does.
        """
        if not (leaving := self._transaction.record.leaving):
            return []
        here = {one.node for one in leaving if one.owed or self._replacing.is_beside(one, plan)}
        waiting = [one for one in leaving if not one.owed and not self._replacing.is_beside(one)]
        found = self._replacing.targets(waiting)
        for one in waiting:
            if (not self._replacing.goes_beside(one)) if one.node in found else not (one.stays or self.in_time(one)):
                here.add(one.node)
        return [worker for worker in workers if node_of(worker) in here]

    def enter_beside(self, *, whoever: bool = False) -> None:
        """Let standbys join that are warm and are to take the places of nodes, which go once these are there.

        Args:
            whoever: also where there is little time for that.
        """
        waiting = [
            one for one in self._transaction.record.leaving if not one.owed and not self._replacing.is_beside(one)
        ]
        waiting = [one for one in waiting if whoever or self._replacing.goes_beside(one)]
        for name, (standby, _) in self._replacing.targets(waiting).items():
            self._replacing.promote(standby)
            entry = next(one for one in waiting if one.node == name)
            self._write(msgspec.structs.replace(entry, beside=standby))
            self._not_before = 0

    def followed(self) -> None:
        """Of those that were to leave and are lost instead, the standbys that were to take the places do."""
        for one in self._transaction.record.leaving:
            if one.node not in self._transaction.members.nodes and self._replacing.is_beside(one):
                self._replacing.has_come(one)

    def in_time(self, one: Departure) -> bool:
        """Tell whether a node that ends at a given time can wait until a standby is warm that takes its place."""
        return bool(one.until) and not one.closes and self._replaced_in_s() <= one.until - self._transaction.now

    def _replaced_in_s(self) -> float:
        """Return in how many seconds a standby that is cold can have taken a place, as far as is known."""
        if not self._config.spec.recovery.uses_standbys:
            return math.inf
        warm_s = (self._standbys.warm_in_s(name) for name in self._transaction.members.standbys)
        cold_s = min((seconds for seconds in warm_s if seconds > 0), default=math.inf)
        return cold_s + self._costs.step_s + self._costs.of(Cost.DECISION)

    def _note(self, one: Departure, *, replaced: bool) -> None:
        """A node that ends at a given time leaves: keep what is told of it."""
        grace_s, left_s = one.until - one.since, one.until - self._transaction.now
        how = f"told to end with a grace of {grace_s:g} s, of which {max(left_s, 0.0):.1f} s were left"
        cold_s = self._replaced_in_s()
        if not replaced:
            late = f"one could have in {cold_s:.1f} s" if math.isfinite(cold_s) else "there is none"
            how += f"; no standby has taken its place: {late}"
        self._noted[one.node] = how

    def let_go(self) -> None:
        """Let those go that are members of nothing, and have nothing that others are about to read."""
        for one in self._transaction.record.leaving:
            if not (self._transaction.planned_on(one.node) or one.node in self._transaction.record.stash_nodes):
                self._settle(one)

    def look(self, plan: GenerationPlan, written: int) -> None:
        """Release the draining nodes whose retained state is no longer needed, while the others train by this plan.

        A retained worker that has not applied the newest step keeps that step from being committed. If it is the last
        step, no later one proves that all members have it, and members that save wait for the commit before they
        finish. So a checkpoint of the step that is written in full releases the node, too.

        Args:
            written: the newest step of which all parts of a checkpoint are written.
        """
        for one in self._transaction.record.leaving:
            safe = max(self._ledger.proven, written) >= one.step
            if one.owed and (safe or not self._transaction.members.unfinished(plan)):
                self._settle(one)
            elif one.stays and not self._replacing.is_beside(one) and (why := self._replacing.in_vain(one)):
                transaction, record = self._transaction, self._transaction.record
                transaction.change(leaving=tuple(other for other in record.leaving if other.node != one.node))
                transaction.emit(NodeStayed, node=one.node, reason="no_standby", detail=why)

    def begin(self, plan: GenerationPlan) -> None:
        """A step was committed just now, so that least is done twice: stop the members where some of them can go.

        Args:
            plan: in force; nothing is about to change it.
        """
        if (decision := self._transaction.record.decision) is not None and self._ledger.committed <= decision.applied:
            return  # (that all have the state which the plan begins with was heard of in the midst of the next step)
        if leavers := self.go_next(plan):
            staying = {one.node for one in self._transaction.record.leaving if one.stays}
            only_moves = staying >= set(map(node_of, leavers))
            self._stopping.begin(self._transaction.now, reason=MOVE if only_moves else DRAIN)

    def go_next(self, plan: GenerationPlan) -> list[str]:
        """Return the members of the plan in force that can go, and do at the end of the step."""
        if self._ledger.committed < self._not_before:
            return []
        leavers = self.going(plan.workers, plan)
        if not leavers or only_with(self._transaction.record, plan, leavers):
            return []
        here = [info.id for info in self._transaction.members.workers()]
        return leavers if self.can_go(leavers, here) else []

    def can_go(self, leavers: Collection[str], workers: Iterable[str]) -> bool:
        """Tell whether those of these workers that stay, and standbys that follow the leavers, have room for all."""
        rest = [worker for worker in (*workers, *self._replacing.heirs(leavers)) if worker not in leavers]
        return bool(rest) and not lacks_slots(self._transaction, self._config, rest)

    def stay(self) -> None:
        """Those that are to leave have what nobody else has: they stay for now."""
        self._not_before = self._ledger.committed + RETRY_STEPS

    def go(self, leavers: Collection[str], step: int) -> list[str]:
        """The plan to come, which begins with the state of `step`, does without these workers: they are owed.

        Returns:
            The workers of standbys that take their places in it.
        """
        transaction, names = self._transaction, set(map(node_of, leavers))
        leaving = [one for one in transaction.record.leaving if one.node in names]
        places = self._replacing.unfollowed(names)
        followed = [one for one in leaving if not one.owed and self._replacing.is_beside(one)]
        found = {name: standby for name, (standby, _) in self._replacing.targets(places).items()}
        found |= {one.node: one.beside for one in followed}
        self._replacing.pass_on(found)
        for one in followed:
            self._replacing.has_come(one)
        taking = self._replacing.stand_in_for(places)
        for one in leaving:
            owed = tuple(worker for worker in leavers if node_of(worker) == one.node)
            transaction.members.owe(one.node)
            if one.until and not (one.owed or one.closes):
                self._note(one, replaced=one.node in found)
            if not (one.owed or one.stays or one.until or one.node in found):
                transaction.change(wanted=max(0, transaction.record.wanted - 1))
            beside = found.get(one.node, one.beside)
            self._write(msgspec.structs.replace(one, owed=owed, step=step, beside=beside))
        return taking

    def taken_back(self, workers: Iterable[str]) -> None:
        """These are the members of the plan to come: those of them that were owed are members like any others."""
        names = set(map(node_of, workers))
        for one in self._transaction.record.leaving:
            if one.owed and one.node in names:
                self._transaction.members.promote(one.node)
                self._write(msgspec.structs.replace(one, owed=(), step=0))

    def all_over(self) -> None:
        """Nobody needs the state that anybody has."""
        for one in self._transaction.record.leaving:
            if one.owed:
                self._settle(one)

    def owes(self, name: str) -> bool:
        """Tell whether a node has left, and counts still."""
        return any(one.owed and one.node == name for one in self._transaction.record.leaving)

    def failed(self, failure: Failure) -> bool:
        """Take in a failure of a node that is owed: it is not needed, as it seems; False: it is of another."""
        transaction, found = (
            self._transaction,
            [one for one in self._transaction.record.leaving if one.node == failure.node and one.owed],
        )
        if not found:
            return False
        node, why = transaction.members.nodes.get(failure.node), failure.evidence.detail or str(failure.kind)
        if node is not None and not failure.worker:
            if failure.kind is FailureKind.HANG:
                transaction.send(node.connection, Refused(why=why, exit_code=EXIT_FAILED, retry=True))
            if failure.kind is not FailureKind.CONNECTION_LOST:
                transaction.close(node.connection)
            transaction.members.remove(node.name)
        self._absences.lost(failure.node)
        self._settle(found[0], f"it was lost as it left: {why}")
        return True

    def _write(self, entry: Departure) -> None:
        leaving = self._transaction.record.leaving
        self._transaction.change(leaving=tuple(entry if one.node == entry.node else one for one in leaving))

    def _settle(self, one: Departure, why: str = "") -> None:
        """A node goes for good, or is a standby from here on."""
        transaction, node, record = (
            self._transaction,
            self._transaction.members.nodes.get(one.node),
            self._transaction.record,
        )
        was_standby = node is not None and node.standby
        followed = self._replacing.is_beside(one) and not was_standby
        transaction.change(leaving=tuple(other for other in record.leaving if other.node != one.node))
        self._ledger.without(one.owed)
        for worker in one.owed:
            self._stopping.forget(worker)
        if one.stays:
            if one.owed or (node is not None and followed):
                transaction.emit(NodeLeft, node=one.node, reason=MOVED, detail=why)
            if node is not None and (one.owed or followed):
                self._standbys.returned(node, warm=bool(one.owed))
            return
        gone, places = Departure(node=one.node, since=one.since), not (was_standby or one.owed or followed)
        why = why or self._noted.pop(one.node, "")
        if not one.until:  # (else it may come again, and its place is one to fill)
            transaction.change(drained=(*record.drained, gone)[-_KEPT:], wanted=max(0, record.wanted - places))
        if node is not None:
            left = "has left" if one.until else "is drained"
            transaction.send(node.connection, EndNode(exit_code=EXIT_DONE, why=f"node {one.node} {left}", alone=True))
            self.forget(node)
        else:  # (it left while nobody coordinated, and need not come back)
            self._absences.lost(one.node)
        if not was_standby and (one.owed or node is not None):
            transaction.emit(NodeLeft, node=one.node, reason=DRAINED, detail=why)

    def depart(self, node: Node, reason: str, detail: str = "") -> tuple[str, ...]:
        """A node goes: forget it, and say so; return the workers that are gone with it."""
        workers = self.forget(node)
        owed = next((one for one in self._transaction.record.leaving if one.owed and one.node == node.name), None)
        if owed is not None:
            self._settle(owed, detail or f"it has left: {reason}")
        elif not node.standby:  # (else it was never of the job)
            self._transaction.emit(NodeLeft, node=node.name, reason=LEFT_AS.get(reason, reason), detail=detail)
        return workers

    def forget(self, node: Node) -> tuple[str, ...]:
        """A node is there no more; return its workers."""
        self._absences.lost(node.name)
        for worker in (workers := self._transaction.members.remove(node.name)):
            self._ledger.forget(worker)
            self._stopping.forget(worker)
        return workers

    def set_aside(self, name: str) -> None:
        """Make a node that has no place a standby, because another node has the place for which it came."""
        node = self._transaction.members.nodes[name]
        self._absences.lost(name)
        if node.told or node.returning:
            self._transaction.emit(NodeLeft, node=name, reason=MOVED, detail="another node has taken its place")
        self._standbys.returned(node, warm=False)

    # ---- whether it can be ----

    def _rest(self, names: Collection[str], without: Collection[str] = ()) -> list[str]:
        """Return the workers that there are once these nodes have left; `without`: those whose places nobody takes."""
        workers = (info.id for info in self._transaction.members.workers())
        taking = self._taking([name for name in names if name not in without])
        return [worker for worker in workers if node_of(worker) not in names] + taking

    def _cannot(self, rest: list[str]) -> str:
        """Return why the job could not go on with these workers alone; "" where it could."""
        transaction, record, config = self._transaction, self._transaction.record, self._config
        if not rest:
            return "no node would be left; add some first (holdfast scale +1), or end the job (holdfast stop)"
        if lacks_slots(transaction, config, rest):
            found = shortage(record, transaction.members, rest)
            return str(found) if found is not None else "the others are too few for a replica of all experts"
        return ""

    def _why_not(self, names: Collection[str]) -> str:
        """Return why the job could not go on, as it is, without these nodes; "" where it could."""
        transaction, record, config, rest = self._transaction, self._transaction.record, self._config, self._rest(names)
        if why := self._cannot(rest):
            return why
        plan, shape = record.plan, record.expert_shape
        if shape is None or plan is None or plan.expert_plan is None or config.spec.experiments.static_experts:
            return ""
        asked, nodes = plan.expert_plan.asked, len({node_of(worker) for worker in rest})
        if plan.expert_plan.given < asked:
            return ""  # (no worse than it is)
        slots = slots_of(transaction.members, rest, shape)
        if nodes < asked or slots < asked * shape.experts:
            lacking = asked * shape.experts - slots
            more = max(asked - nodes, -(-lacking // shape.slots))
            return (
                f"each expert would live on fewer than {asked} nodes (--fault-threshold); "
                f"add nodes first (holdfast scale +{more})"
            )
        return ""

    def _taking(self, names: Collection[str]) -> list[str]:
        """Return the workers of the standbys that would take these nodes' places now."""
        known, since = {one.node: one for one in self._transaction.record.leaving}, self._transaction.now
        found = self._replacing.targets([known.get(name, Departure(node=name, since=since)) for name in names])
        nodes = self._transaction.members.nodes
        return [worker for standby, _ in found.values() for worker in nodes[standby].workers]
