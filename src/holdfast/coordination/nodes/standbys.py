"""Standbys: warm nodes that wait to replace another one. Until then they are in no world.

They do not count at a job's start either. Their warm-up begins once the others train, because only then the script is
known to work. Problems of a standby are reported, but do not count as failures of the job.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from holdfast.coordination.config import CoordinatorConfig
from holdfast.coordination.generations.configuration_check import check_configuration
from holdfast.coordination.inputs import Failure
from holdfast.coordination.membership import Node
from holdfast.coordination.progress.costs import Cost, MeasuredCosts
from holdfast.coordination.transaction import Transaction
from holdfast.errors import EXIT_BAD_INPUT, EXIT_FAILED
from holdfast.protocol.events import StandbyFailed, StandbyReady
from holdfast.protocol.failures import FailureKind
from holdfast.protocol.messages.agent import AgentMessage, EndNode, Hello, Leave, Refused, Replace, WorkerDown
from holdfast.protocol.messages.orders import BecomeStandby, Warm
from holdfast.protocol.messages.worker import Warmed
from holdfast.protocol.plan import GenerationPlan
from holdfast.protocol.record import MAX_NODES_KEPT, Standby

#: A standby is ordered to warm up at most this many times, for each start of its agent.
MAX_TRIES = 3
#: At most this many standbys are remembered.
_KEPT = MAX_NODES_KEPT
#: At most this many of their workers are remembered.
_KEPT_WORKERS = 16 * _KEPT


@dataclass(slots=True)
class _WarmUp:
    """The progress of one standby's workers, as reported to this coordinator."""

    #: The seconds that each warm worker needed.
    warm: dict[str, float] = field(default_factory=dict[str, float])
    #: Workers that were ordered to warm up and have not answered.
    asked: set[str] = field(default_factory=set[str])
    #: When the current try began.
    since: float = 0.0
    #: Whether the failure of the current try was reported.
    told: bool = False
    #: The earliest time of the next try; 0 for now. After a script error, the process is about to end.
    not_before: float = 0.0
    #: Whether it does not match the job and was ordered to end.
    refused: bool = False


class StandbyNodes:
    """The standbys: which are warm, and why the others are not."""

    def __init__(self, transaction: Transaction, config: CoordinatorConfig, costs: MeasuredCosts) -> None:
        self._transaction = transaction
        self._config = config
        self._costs = costs
        self._warm_ups: dict[str, _WarmUp] = {}
        #: Workers that have possibly begun to warm up, which destroys their initial state.
        self._void: dict[str, None] = {}
        #: Standbys that an earlier coordinator knew and that have not connected yet; for a lease from the first tick.
        self._awaited = {one.node for one in transaction.record.standbys if not one.promoted}
        self._awaited_since: float | None = None

    # ---- arrivals ----

    def is_standby(self, hello: Hello) -> bool:
        """Return whether a connecting agent is a standby: it was started as one and has not replaced a node yet.

        The record decides for a known agent process, the agent's own setting for a new one; a planned node is not a
        standby.
        """
        known = self._entry(hello.node)
        is_known = known is not None and known.agent_pid == hello.agent_pid
        waits = not known.promoted if known is not None and is_known else hello.standby
        return waits and not self._transaction.planned_on(hello.node)

    def on_admitted(self, node: Node) -> None:
        """Record a standby that was admitted, as not warm. One that reconnects keeps its number of tries."""
        self._warm_ups[node.name] = _WarmUp()
        self._awaited.discard(node.name)
        known = self._entry(node.name)
        if known is None or known.promoted or known.agent_pid != node.agent_pid:
            self._write(Standby(node=node.name, agent_pid=node.agent_pid))

    def ready(self, name: str) -> bool:
        """Return whether a node is a standby and all its workers are warm."""
        node = self._transaction.members.standbys.get(name)
        return node is not None and node.complete and self._warm_ups[name].warm.keys() >= node.workers.keys()

    def warm_in_s(self, name: str) -> float:
        """Return the estimated seconds until a standby is warm; 0 if it is, infinite if it never will be or is not
        connected.
        """
        node, entry = self._transaction.members.standbys.get(name), self._entry(name)
        if node is None or self.ready(name):
            return 0.0 if node is not None else math.inf
        warm_up, warm_s = self._warm_ups[name], self._costs.of(Cost.WARM_UP)
        if warm_up.refused or (not warm_up.asked and entry is not None and entry.tries >= MAX_TRIES):
            return math.inf
        start_s = 0.0 if node.complete else max(0.0, self._costs.of(Cost.START) - (self._transaction.now - node.came))
        return max(start_s + warm_s - (self._transaction.now - warm_up.since if warm_up.asked else 0.0), 0.0)

    def explain_never_warm(self, name: str) -> str:
        """Return why a connected standby will never be warm, or "": it does not fit, or has failed 3 times."""
        node, entry = self._transaction.members.standbys[name], self._entry(name)
        warm_up = self._warm_ups[name]
        if warm_up.refused:
            return f"standby {name} does not fit the job"
        if entry is None or entry.tries < MAX_TRIES or warm_up.asked or self.ready(name):
            return ""
        return f"standby {node.name} has failed to warm up {entry.tries} times (holdfast logs --node {node.name})"

    def may_come(self, name: str) -> bool:
        """Return whether a standby is warm, may become warm, or may still reconnect to this coordinator."""
        return (
            not self.explain_never_warm(name) if name in self._transaction.members.standbys else name in self._awaited
        )

    @property
    def awaited(self) -> bool:
        """Whether standbys may still reconnect to this coordinator."""
        return bool(self._awaited)

    def fresh(self, workers: Iterable[str]) -> list[str]:
        """Return the workers with an intact initial state, of workers that were in no generation."""
        return [worker for worker in workers if worker not in self._void]

    def promote(self, name: str) -> Node:
        """Make a standby a regular node, in the record, too, and return it. Its warm-up is forgotten."""
        entry = self._entry(name)
        if entry is not None:
            self._write(msgspec.structs.replace(entry, promoted=True, ready=False))
        self._warm_ups.pop(name)
        return self._transaction.members.promote(name)

    def make_standby(self, node: Node, *, warm: bool = True) -> None:
        """Make a node that has left the world a standby, and order its trained workers to be standbys.

        Their initial state is void. Workers with script errors are replaced. The node is ready, which is emitted, if
        `warm` and no worker is missing or was replaced.

        Args:
            warm: whether the workers have trained; otherwise they are new processes.
        """
        transaction, raised = self._transaction, [info.id for info in node.workers.values() if info.raised]
        trained = {worker: 0.0 for worker in node.workers if warm and worker not in raised}
        transaction.members.demote(node.name)
        for worker in raised:
            self._replace(node, worker)
        self._warm_ups[node.name] = _WarmUp(warm=trained)
        self._void_initial_states(trained)
        for worker in trained:
            transaction.order(
                worker, BecomeStandby(term=transaction.record.term, generation=transaction.record.generation)
            )
        ready = warm and node.complete
        self._write(Standby(node=node.name, agent_pid=node.agent_pid, ready=ready))
        if ready:
            transaction.emit(StandbyReady, node=node.name, roles=len(trained), warm_s=0.0)

    # ---- warming up ----

    def order_warm_ups(self, plan: GenerationPlan) -> None:
        """Order the cold workers of complete standbys to warm up while the others train, at most 3 times for each node.

        Standbys with a warm-up in progress or a recent failure are skipped. One that does not fit the job is reported
        instead.
        """
        transaction = self._transaction
        for node in list(transaction.members.standbys.values()):
            warm_up, entry = self._warm_ups[node.name], self._entry(node.name)
            waits = warm_up.asked or warm_up.refused or warm_up.not_before or not node.complete
            if waits or entry is None or entry.tries >= MAX_TRIES:
                continue
            cold = [worker for worker in node.workers if worker not in warm_up.warm]
            if not cold or not self.fits(node):
                continue
            self._write(msgspec.structs.replace(entry, tries=entry.tries + 1))
            warm_up.asked, warm_up.since, warm_up.told = set(cold), transaction.now, False
            self._void_initial_states(cold)
            for worker in cold:
                transaction.order(worker, Warm(term=transaction.record.term))

    def fits(self, node: Node) -> bool:
        """Return whether a standby matches the job; report it as unfit if not. When it came, the job may have had no
        settings.
        """
        found = (check_configuration(self._transaction, node, info.attach) for info in node.workers.values())
        if why := next(filter(None, found), ""):
            self.report_unfit(node, why)
        return not why

    def tick(self) -> None:
        """Make standbys with overdue warm-ups reconnect with fresh workers, and allow the next tries of others.

        A lease after the first tick, standbys of an earlier coordinator are no longer awaited.
        """
        now, limit_s = self._transaction.now, self._config.warm_timeout_s
        if self._awaited_since is None:
            self._awaited_since = now
        elif now - self._awaited_since > self._config.lease_s:
            self._awaited.clear()
        for node in list(self._transaction.members.standbys.values()):
            warm_up = self._warm_ups[node.name]
            if now >= warm_up.not_before:
                warm_up.not_before = 0.0
            if warm_up.asked and now - warm_up.since > limit_s:
                self._expel(node, f"its warm-up has taken longer than {limit_s:g} s")

    def on_warmed(self, node: Node, message: Warmed) -> None:
        """Handle the end of a worker's warm-up, if its node is still a standby.

        When all workers of the node are warm, record and emit that it is ready. An error is reported, and tried again
        later.
        """
        self._void_initial_states([message.worker])
        if not node.standby:
            return
        warm_up, worker = self._warm_ups[node.name], message.worker
        if message.error:
            warm_up.warm.pop(worker, None)
            self._on_warm_up_failed(node, worker, message.error)
            return
        warm_up.asked.discard(worker)
        warm_up.warm[worker] = message.seconds
        entry = self._entry(node.name)
        if entry is not None and not entry.ready and self.ready(node.name):
            self._write(msgspec.structs.replace(entry, ready=True))
            warm_s = max(warm_up.warm.values(), default=0.0)
            self._costs.add_measurement(Cost.WARM_UP, warm_s)
            self._transaction.emit(StandbyReady, node=node.name, roles=len(warm_up.warm), warm_s=warm_s)

    # ---- failures ----

    def on_ended(self, node: Node, message: AgentMessage) -> bool:
        """Handle the end of a standby or of its worker, as reported by its agent.

        A standby that leaves is removed, and gets the order to end if it waits for an answer. A worker with bad input
        or a final error makes the standby unfit; after any other end its warm-up is tried again later.

        Returns:
            False for any other message, for a node that is not a standby, and once the job has an outcome: nothing was
                done.
        """
        if not node.standby or self._transaction.record.outcome:
            return False
        if isinstance(message, WorkerDown):
            if message.worker in node.broken:
                return True
            self._transaction.members.drop(node, message.worker)
            self._forget_warm_ups(node, message.worker)
            if message.exit_code == EXIT_BAD_INPUT or message.final:
                self._refuse(node, message.detail)
            else:
                self._on_warm_up_failed(node, message.worker, message.detail)
            return True
        if isinstance(message, Leave):
            if message.awaits_answer:
                self._transaction.send(node.connection, EndNode(exit_code=EXIT_FAILED, why=message.detail, alone=True))
            self._remove(node, message.detail or f"it has left: {message.reason}")
            return True
        return False

    def on_raised(self, node: Node, worker: str, why: str) -> None:
        """Replace a standby's process that reports a script error, for example one of its time as a member.

        The node is no longer warm, and warms up again later.
        """
        self._replace(node, worker)
        self._forget_warm_ups(node, worker)
        self._on_warm_up_failed(node, worker, why)

    def _forget_warm_ups(self, node: Node, worker: str) -> None:
        """Forget the warm-ups of a lost process and of the others in its replica group, which are removed from the
        node.
        """
        for one in (worker, *self._transaction.drop_group_of(worker)):
            self._void.pop(one, None)
            self._warm_ups[node.name].warm.pop(one, None)

    def _replace(self, node: Node, worker: str) -> None:
        """Remove a worker, and order the agent to replace its process."""
        self._transaction.members.drop(node, worker)
        self._transaction.send(node.connection, Replace(worker=worker))

    def on_failure(self, failure: Failure) -> bool:
        """Handle the failure of a standby; return False for any other node.

        A node with an implausible report is refused, one that hangs reconnects with fresh workers, and any other is
        removed.
        """
        node = self._transaction.members.standbys.get(failure.node)
        if node is None:
            return False
        why = failure.evidence.detail or str(failure.kind)
        if failure.kind is FailureKind.EXCEPTION and not failure.worker:
            # It sent an implausible report, and would send it again.
            self._refuse(node, why)
        elif failure.kind is FailureKind.HANG:
            self._expel(node, why)
        else:
            if failure.kind is not FailureKind.CONNECTION_LOST:
                self._transaction.close(node.connection)
            self._remove(node, why)
        return True

    def _refuse(self, node: Node, why: str) -> None:
        """Order a useless standby to end, and report it."""
        self._transaction.send(node.connection, EndNode(exit_code=EXIT_BAD_INPUT, why=why, alone=True))
        self.report_unfit(node, why)

    def report_unfit(self, node: Node, why: str) -> None:
        """Report once that a standby does not match the job and was ordered to end. It is not warmed up again."""
        warm_up = self._warm_ups[node.name]
        if not warm_up.refused:
            warm_up.refused = warm_up.told = True
            self._emit_failed(node, why, again=False)

    def _expel(self, node: Node, why: str) -> None:
        """Make a standby reconnect with fresh workers, and remove it until then."""
        self._transaction.send(node.connection, Refused(why=why, exit_code=EXIT_FAILED, retry=True))
        self._transaction.close(node.connection)
        self._remove(node, why)

    def _remove(self, node: Node, why: str) -> None:
        """Remove a standby, and emit why unless this try's failure was reported; it may connect again."""
        for worker in self._transaction.members.remove(node.name):
            self._void.pop(worker, None)
        warm_up = self._warm_ups.pop(node.name)
        if not warm_up.told:
            self._emit_failed(node, why)
        self._unset_ready(node.name)

    def _on_warm_up_failed(self, node: Node, worker: str, why: str) -> None:
        """Record that a standby's worker is not warm, and delay the next try. Emit the failure, once for each try."""
        warm_up = self._warm_ups[node.name]
        told, under_way = warm_up.told, worker in warm_up.asked
        was_ready = self._unset_ready(node.name)
        warm_up.asked.discard(worker)
        warm_up.not_before = self._transaction.now + self._config.join_retry_s
        if was_ready or (under_way and not told):
            warm_up.told = True
            self._emit_failed(node, why)

    def _unset_ready(self, name: str) -> bool:
        """Record that a standby is not ready; return whether it was."""
        entry = self._entry(name)
        if entry is None or not entry.ready:
            return False
        self._write(msgspec.structs.replace(entry, ready=False))
        return True

    def _emit_failed(self, node: Node, why: str, *, again: bool = True) -> None:
        """Emit that a standby has failed, with its tries, unless the job has an outcome.

        Args:
            again: whether it may be tried again, if it has tries left.
        """
        if self._transaction.record.outcome:
            return
        entry = self._entry(node.name)
        tries = entry.tries if entry is not None else 0
        self._transaction.emit(
            StandbyFailed, node=node.name, why=why[:1000], tries=tries, again=again and tries < MAX_TRIES
        )

    def _void_initial_states(self, workers: Iterable[str]) -> None:
        """Record that these workers have no intact initial state: they warm up or have warmed up, or have trained.

        Only the newest entries are kept, up to a maximum number.
        """
        self._void.update(dict.fromkeys(workers))
        for worker in list(itertools.islice(self._void, max(0, len(self._void) - _KEPT_WORKERS))):
            del self._void[worker]

    # ---- the record ----

    def _entry(self, name: str) -> Standby | None:
        return next((one for one in self._transaction.record.standbys if one.node == name), None)

    def _write(self, entry: Standby) -> None:
        others = (one for one in self._transaction.record.standbys if one.node != entry.node)
        self._transaction.change(standbys=(*others, entry)[-_KEPT:])
