"""Decides which checkpoints count: they have all parts, all members have applied their step, and it is on the lineage.

Each member writes a part, which its agent reports even if the member has died. Parts with the same name form one
checkpoint. A member writes its part only after it has applied the step, so a checkpoint with all parts proves that all
members of its generation had applied it. A failure during writing leaves a checkpoint without all parts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from holdfast.coordination.config import CoordinatorConfig
from holdfast.coordination.progress.costs import Cost, MeasuredCosts
from holdfast.coordination.progress.saving_period import PRIOR_S, add_loss, add_save, prior_s, saving_period_s
from holdfast.coordination.snapshots.book import on_lineage
from holdfast.coordination.transaction import Transaction
from holdfast.errors import BadInputError
from holdfast.protocol.checkpoints.names import CheckpointName, parse_name
from holdfast.protocol.events import CheckpointDelayed, CheckpointFailed, CheckpointRejected, CheckpointSaved
from holdfast.protocol.messages.orders import MAX_PRUNED, AcceptCheckpoint, AskCheckpoint, PruneCheckpoints
from holdfast.protocol.messages.worker import CheckpointDamaged, CheckpointKept, CheckpointUnwritten, CheckpointWritten
from holdfast.protocol.names import node_of
from holdfast.protocol.plan import GenerationPlan
from holdfast.protocol.record import KnownCheckpoint

#: the number of kept checkpoints: the newest, and one more in case the newest gets damaged
KEPT = 2
#: the most unsealed checkpoints at the same time
_OPEN = 8
#: the most nodes that an event names
_NAMED_NODES = 16
#: a delay is reported after this many checkpoints in a row were left out
_REPORTED_FROM = 3


def retained(checkpoints: Iterable[KnownCheckpoint]) -> tuple[tuple[KnownCheckpoint, ...], tuple[str, ...]]:
    """Return the checkpoints to keep, oldest first, and the names of the superseded ones."""
    ordered = sorted(checkpoints, key=lambda known: (known.term, known.generation, known.step))
    return tuple(ordered[-KEPT:]), tuple(known.name for known in ordered[:-KEPT])


@dataclass(slots=True)
class _Open:
    """A checkpoint with only some of its parts, or not sealed yet."""

    #: the number of its parts
    count: int
    parts: dict[int, CheckpointWritten] = field(default_factory=dict[int, CheckpointWritten])
    #: the node that was ordered to seal it, or ""
    sealer: str = ""

    @property
    def complete(self) -> bool:
        return len(self.parts) == self.count

    @property
    def nodes(self) -> list[str]:
        """The nodes on which a part was written."""
        return list(dict.fromkeys(node_of(part.worker) for part in self.parts.values()))


class CheckpointBook:
    """Accepts complete checkpoints, and decides when to save."""

    def __init__(self, transaction: Transaction, config: CoordinatorConfig, costs: MeasuredCosts) -> None:
        self._transaction = transaction
        self._config = config
        self._costs = costs
        self._open: dict[CheckpointName, _Open] = {}
        #: names of checkpoints that never count, whatever is still reported about them
        self._void: list[str] = []
        #: the oldest open checkpoint, which is never dropped to make room for newer ones
        self._first: CheckpointName | None = None
        #: the number of due checkpoints left out since the last one was kept, and when the first was
        self._left_out, self._left_out_since = 0, 0.0
        #: the number of left out checkpoints from which the delay is reported
        self._reported_from = _REPORTED_FROM
        #: the number of checkpoints in a row that could not be written
        self._failed = 0
        #: a checkpoint of a step after this one was requested; None: no request
        self._wanted: int | None = None
        #: the generation in which the first member received the request
        self._asked = 0
        #: when a save was last requested because the period had passed
        self._asked_at = 0.0
        #: the value of `_prior_s`, and the generation and failure rate for which it was computed
        self._prior, self._prior_of = PRIOR_S, (0, 0.0)

    def on_report(
        self,
        message: CheckpointWritten | CheckpointKept | CheckpointUnwritten | CheckpointDamaged,
        committed: int,
    ) -> bool:
        """Handle a worker's report about a checkpoint, and seal those that are complete up to step `committed`.

        Return True if the generation cannot continue, because its checkpoint is damaged.
        """
        match message:
            case CheckpointDamaged():
                return self._on_damaged(message)
            case CheckpointKept():
                self._on_sealed(message)
            case CheckpointUnwritten():
                self._on_unwritten(message)
            case CheckpointWritten():
                self._on_written(message)
        self.update(committed)
        return False

    @property
    def newest_written(self) -> int:
        """The newest step with all parts of a checkpoint written, whether it counts yet or not; 0 for none."""
        return max((name.step for name, one in self._open.items() if one.complete), default=0)

    def update(self, committed: int) -> None:
        """Order complete checkpoints of steps up to `committed` to be sealed, and drop those that will never be
        complete.

        Also send a user's request once per generation, and request a save if one is due by time.
        """
        for name, one in sorted(self._open.items(), key=lambda item: item[0]):
            if one.complete and name.step <= committed:
                self._seal(name, one)
            elif self._is_abandoned(name, one):
                self._drop(name)
        plan = self._transaction.record.plan
        if self._wanted is not None and plan is not None and plan.generation != self._asked:
            self._asked = plan.generation
            self._transaction.order(plan.workers[0], AskCheckpoint())
        self._ask_in_time(committed)

    @property
    def period_s(self) -> float | None:
        """The seconds between checkpoints, or None if the period is in steps or none are kept."""
        record = self._transaction.record
        if not (record.saves and record.saves_in_time):
            return None
        return saving_period_s(
            record.saving, self._transaction.now - record.run_since, self._config.period, self._prior_s
        )

    @property
    def _prior_s(self) -> float:
        """The seconds in which one save is expected to be needed, from the failure rate that the pool has sent and the
        exposed time after a failure.

        `PRIOR_S` without a plan or a rate. Cached for each plan and rate.
        """
        record = self._transaction.record
        plan, rate = record.plan, record.held.failure_rate if record.held is not None else 0.0
        if plan is None or not rate:
            return PRIOR_S
        if self._prior_of != (plan.generation, rate):
            exposed_s = sum(map(self._costs.of, (Cost.DECISION, Cost.BUILD, Cost.TRANSFER)))
            nodes, shape = len({member.node for member in plan.members}), record.expert_shape
            experts = shape.experts if shape is not None else 0
            self._prior = prior_s(nodes, rate, exposed_s, experts=experts, slots=self._config.spec.experts.slots)
            self._prior_of = plan.generation, rate
        return self._prior

    def _ask_in_time(self, committed: int) -> None:
        """Order a save after the next step to pass, by a message to the first worker, if the period since the last save
        or request is over.

        Nothing is due if the period is in steps, or no step was committed since the newest checkpoint.
        """
        record, now, period_s = self._transaction.record, self._transaction.now, self.period_s
        plan = record.plan
        if period_s is None or plan is None or plan.last or committed <= self._newest:
            return
        since = max(record.saving.saved_at, record.run_since, self._asked_at)
        # If a clock was set back, the time since the last save is unknown, so save.
        if since <= now < since + period_s:
            return
        self._asked_at = now
        self._transaction.order(plan.workers[0], AskCheckpoint(if_free=True))

    def note_left_out(self, steps: Sequence[int]) -> None:
        """Count checkpoints that were due after these steps but not begun.

        Once there are several since the last one was kept, emit that checkpoints become less frequent, with the nodes
        that still write; repeat it each time the number has doubled.
        """
        plan = self._transaction.record.plan
        if not steps or plan is None:
            return
        if not self._left_out:
            self._left_out_since = self._transaction.now
        self._left_out += len(steps)
        if self._left_out < self._reported_from:
            return
        self._reported_from = 2 * self._left_out
        self._transaction.emit(
            CheckpointDelayed,
            step=steps[-1],
            nodes=self._writing_nodes(plan)[:_NAMED_NODES],
            left_out=self._left_out,
            waited_s=self._transaction.now - self._left_out_since,
        )

    def _writing_nodes(self, plan: GenerationPlan) -> tuple[str, ...]:
        """Return the nodes that still lack a part of the oldest unfinished checkpoint of this plan's generation, or all
        nodes of the plan if there is none.
        """
        for name, one in sorted(self._open.items(), key=lambda item: item[0]):
            missing = [worker for part, worker in enumerate(plan.workers) if part not in one.parts]
            if missing and name.generation == plan.generation:
                return tuple(dict.fromkeys(map(node_of, missing)))
        return tuple(dict.fromkeys(map(node_of, plan.workers)))

    @property
    def _newest(self) -> int:
        known = self._transaction.record.checkpoints
        return known[-1].step if known else 0

    def _passed_over(self, name: CheckpointName) -> bool:
        """Return whether a checkpoint of this step or a later one already counts."""
        return name.step <= self._newest

    def request_checkpoint(self, committed: int) -> None:
        """Request a checkpoint of a step after this one, for a user. The request is repeated once in each generation.

        Raises:
            BadInputError: The job keeps no checkpoints.
        """
        if not self._transaction.record.saves:
            raise BadInputError("the job keeps no checkpoints: start it with --checkpoint-dir DIR")
        self._wanted, self._asked = committed, 0

    def on_rollback(self, *, to_snapshot: bool) -> None:
        """Drop all unsealed checkpoints after a rollback. Unless a snapshot was restored, also count a loss, which
        shortens the period of saving.

        Args:
            to_snapshot: Whether a snapshot was restored, so that no checkpoint was needed.
        """
        self._left_out = 0
        if not to_snapshot:
            self._transaction.change(saving=add_loss(self._transaction.record.saving))
        for name in list(self._open):
            self._drop(name)

    # ---- parts ----

    def _on_written(self, message: CheckpointWritten) -> None:
        """Record that a part of a checkpoint was written. An invalid message is ignored.

        If the checkpoint counts already, release the writer; if it can never count, order the part's removal. If too
        many checkpoints are unfinished, the oldest are dropped, except the very first.
        """
        name = _name_of(message)
        if name is None or message.part >= message.parts:
            return
        node, known = node_of(message.worker), self._transaction.record.checkpoints
        if any(one.name == name.folder for one in known):
            self._transaction.order_node(node, _settled(name))
            return
        if self._passed_over(name) or name.folder in self._void or not self._on_lineage(message):
            self._prune([node], (name.folder,))
            return
        one = self._open.setdefault(name, _Open(message.parts))
        if self._first not in self._open:
            self._first = name
        if message.parts == one.count:
            one.parts[message.part] = message
        while len(self._open) > _OPEN:
            # The oldest may lack only the part of a slow node. If newer ones replaced it, none would ever be complete.
            self._drop(min(other for other in self._open if other != self._first))

    def _seal(self, name: CheckpointName, one: _Open) -> None:
        """Write the record, then order a connected node, one that wrote a part if possible, to seal a complete
        checkpoint.

        Does nothing while the node that has the order is connected.
        """
        transaction = self._transaction
        connected = transaction.members.nodes
        if one.sealer in connected:
            return
        one.sealer = next((node for node in (*one.nodes, *connected) if node in connected), "")
        parts = [one.parts[number] for number in range(one.count)]
        # A sealed checkpoint proves that its step is committed.
        transaction.change()
        order = AcceptCheckpoint(
            term=name.term,
            generation=name.generation,
            step=name.step,
            name=name.folder,
            files=tuple(file for part in parts for file in part.files),
            seconds=max(part.seconds for part in parts),
            stall_s=max(part.stall_s for part in parts),
        )
        transaction.order_node(one.sealer, order)

    def _is_abandoned(self, name: CheckpointName, one: _Open) -> bool:
        """Return whether a worker of the current plan has left the job or its loop without writing its part, so that
        the checkpoint will never be complete.

        False for older generations.
        """
        plan, members = self._transaction.record.plan, self._transaction.members
        if plan is None or plan.generation != name.generation or members.unfinished(plan) == len(plan.workers):
            return False
        lacking = [worker for part, worker in enumerate(plan.workers) if part not in one.parts]
        infos = [members.worker(worker) for worker in lacking]
        return any(worker in members.left for worker in lacking) or any(info and info.finished for info in infos)

    def _on_unwritten(self, message: CheckpointUnwritten) -> None:
        """Report that a part could not be written, or a checkpoint not sealed, and drop the checkpoint.

        Training goes on. No event for one that is undone or overtaken by a newer one; nothing for one that counts.
        """
        name, node = _name_of(message), node_of(message.worker)
        if name is None or any(one.name == name.folder for one in self._transaction.record.checkpoints):
            return
        if name.folder in self._void:
            # The worker waits for this answer, like all others.
            self._prune([node], (name.folder,))
            return
        if self._is_overtaken(name) or not self._on_lineage(message):
            self._drop(name, node)
            return
        self._failed += 1
        self._left_out = 0
        self._transaction.emit(CheckpointFailed, node=node, step=name.step, why=message.why, tries=self._failed)
        self._drop(name, node)

    def _is_overtaken(self, name: CheckpointName) -> bool:
        """Return whether a newer checkpoint counts or is being sealed, so that an older one has no use."""
        sealing = any(one.sealer and other > name for other, one in self._open.items())
        return sealing or self._passed_over(name)

    def _may_be_removed(self, name: CheckpointName) -> bool:
        """Return whether a checkpoint of a later generation is being sealed, so that `name` may be removed.

        The sealer removes unsealed checkpoints of earlier generations. It may have listed the folders before `name` was
        sealed, and remove it afterwards.
        """
        later = [other for other, one in self._open.items() if one.sealer]
        return any((other.term, other.generation) > (name.term, name.generation) for other in later)

    def _drop(self, name: CheckpointName, *nodes: str) -> None:
        """Drop a checkpoint that will never count: release its waiting workers and order its removal, on its writers
        and on `nodes`.

        If it may have been sealed, the record remembers that it does not count.
        """
        one, record = self._open.pop(name, None), self._transaction.record
        # A node may have sealed it, by our order or an earlier coordinator's. A later coordinator, which does not know
        # that it was dropped, may receive the node's report.
        if (one is not None and one.complete) or name.term != record.term:
            self._transaction.change(superseded=(*record.superseded, name.folder)[-MAX_PRUNED:])
        self._void = [*self._void, name.folder][-4 * _OPEN :]
        self._prune([*nodes, *(one.nodes if one is not None else ())], (name.folder,))

    # ---- what counts ----

    def _on_sealed(self, message: CheckpointKept) -> None:
        """Record that a checkpoint was sealed and counts from now on: emit it, release its writers, and drop or remove
        older ones.

        One that is undone, overtaken or dropped does not count; it is removed now or with the next ones. Repeated
        reports are ignored.
        """
        transaction, record = self._transaction, self._transaction.record
        node = node_of(message.worker)
        name = _name_of(message)
        known = KnownCheckpoint(step=message.step, name=message.name, term=message.term, generation=message.generation)
        if name is None or known in record.checkpoints or known.name in record.superseded:
            return
        if self._may_be_removed(name):
            self._drop(name, node)
            return
        if self._passed_over(name) or not self._on_lineage(message) or message.name in self._void:
            # It was accepted before a decision abandoned its step, or before a newer checkpoint counted. A later
            # coordinator may know nothing else of it. It is removed together with the next ones, if it still exists.
            transaction.change(superseded=(*record.superseded, known.name)[-MAX_PRUNED:])
            return
        checkpoints, old = retained((*record.checkpoints, known))
        superseded = (*record.superseded, *old)[-MAX_PRUNED:]
        slowed_s = min(self._costs.slowed_s(transaction.now - message.seconds), message.seconds)
        saving = add_save(record.saving, transaction.now, max(message.stall_s, slowed_s))
        transaction.change(checkpoints=checkpoints, superseded=superseded, saving=saving)
        if known in checkpoints:
            self._failed = 0
            self._wanted = None if self._wanted is not None and message.step > self._wanted else self._wanted
            transaction.emit(
                CheckpointSaved,
                step=message.step,
                save_s=message.seconds,
                saved_bytes=message.bytes,
                stall_s=message.stall_s,
                period_s=self.period_s,
                left_out=self._left_out,
            )
            self._reported_from = self._reported_from if self._left_out else _REPORTED_FROM
            self._left_out = 0
        one = self._open.pop(name, None)
        for writer in one.nodes if one is not None else [node]:
            transaction.order_node(writer, _settled(name))
        for older in [other for other in self._open if other.step <= message.step]:
            self._drop(older)
        if superseded:
            self._prune([node], superseded)

    def _on_damaged(self, message: CheckpointDamaged) -> bool:
        """Stop counting a checkpoint that cannot be read, emit that, and tell all nodes, so that they save its step
        again. Its files are kept.

        Return whether it counted; False and no effect if it did not.
        """
        transaction = self._transaction
        remaining = tuple(known for known in transaction.record.checkpoints if known.name != message.name)
        if len(remaining) == len(transaction.record.checkpoints):
            return False
        superseded = (*transaction.record.superseded, message.name)[-MAX_PRUNED:]
        transaction.change(checkpoints=remaining, unreadable=transaction.record.unreadable + 1, superseded=superseded)
        transaction.emit(CheckpointRejected, name=message.name, why=message.why)
        # All nodes must save its step again, even the ones that could read it.
        for node in transaction.members.nodes:
            transaction.order_node(
                node, PruneCheckpoints(term=transaction.record.term, names=(message.name,), remove=False)
            )
        return True

    def repeat_order(self, node: str) -> None:
        """Tell a reconnected node again which checkpoints do not count, if one was unreadable. It removes no files.

        The node may have missed the first order.
        """
        record = self._transaction.record
        if record.unreadable and record.superseded:
            self._transaction.order_node(
                node, PruneCheckpoints(term=record.term, names=record.superseded, remove=False)
            )

    def _on_lineage(self, message: CheckpointWritten | CheckpointKept | CheckpointUnwritten) -> bool:
        """Return whether a message is about a known generation and a step that no rollback has undone."""
        record = self._transaction.record
        known = message.term <= record.term and message.generation <= record.generation
        return known and on_lineage(record, message)

    def _prune(self, nodes: Iterable[str], names: tuple[str, ...]) -> None:
        """Order the first of these nodes to remove checkpoints, and inform the others that they do not count.

        Checkpoints that count are never removed, even if late reports about them arrive. An unreadable one is kept
        until there is another: a human may recover something from it.
        """
        record = self._transaction.record
        stays = {known.name for known in record.checkpoints} or {*record.superseded} - {*self._void}
        pruned = tuple(name for name in names if name not in stays)
        connected = [node for node in dict.fromkeys(nodes) if node in self._transaction.members.nodes] if pruned else []
        for index, node in enumerate(connected):
            self._transaction.order_node(node, PruneCheckpoints(term=record.term, names=pruned, remove=index == 0))


def _settled(name: CheckpointName) -> AcceptCheckpoint:
    return AcceptCheckpoint(term=name.term, generation=name.generation, step=name.step, name=name.folder)


def _name_of(message: CheckpointWritten | CheckpointKept | CheckpointUnwritten) -> CheckpointName | None:
    """Return the parsed name in a message, or None if it is invalid or contradicts the message's term, generation or
    step.
    """
    try:
        name = parse_name(message.name)
    except ValueError:
        return None
    expected = (message.term, message.generation, message.step)
    return name if (name.term, name.generation, name.step) == expected else None
