"""Workers with script errors: they keep their state while it may be the only copy, then they are replaced.

An exception on one node restarts a process. An exception that the same work causes on every node ends the job, after a
save.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from holdfast.coordination.config import CoordinatorConfig
from holdfast.coordination.failures.blame import find_agreeing_nodes
from holdfast.coordination.failures.classes import UNKNOWN, FailureClasses
from holdfast.coordination.failures.detections import script_raised
from holdfast.coordination.generations.interruption import Interruption
from holdfast.coordination.layouts.failing import FailingLayouts
from holdfast.coordination.membership import Node
from holdfast.coordination.progress.ledger import StepLedger
from holdfast.coordination.recovery.closing import Closing
from holdfast.coordination.recovery.failures import Failures
from holdfast.coordination.roles import unit_of
from holdfast.coordination.transaction import Transaction
from holdfast.errors import EXIT_BAD_INPUT
from holdfast.protocol.failures import Detector, FailureKind
from holdfast.protocol.messages.agent import Replace, WorkerDown
from holdfast.protocol.messages.worker import Raised, ScriptError
from holdfast.protocol.names import node_of
from holdfast.protocol.record import MAX_REASON, RaisedBefore

#: The newest exceptions are remembered, at most this many: more than one generation of a small job can raise.
_REMEMBERED = 64
#: Failure classes of errors in the script itself.
_SOFTWARE = ("software_error", UNKNOWN)


@dataclass(slots=True)
class _Blamed:
    """The exception that ends the job."""

    #: Where it is raised.
    place: str
    #: Its description.
    said: str
    #: The nodes that raised it, in words.
    where: str


class ScriptErrors:
    """Handles script errors, and releases processes that are no longer needed."""

    def __init__(
        self,
        transaction: Transaction,
        config: CoordinatorConfig,
        ledger: StepLedger,
        stopping: Interruption,
        failures: Failures,
        closing: Closing,
        classes: FailureClasses,
        failing: FailingLayouts,
    ) -> None:
        self._transaction = transaction
        self._config = config
        self._ledger = ledger
        self._interruption = stopping
        self._failures = failures
        self._closing = closing
        self._classes, self._failing = classes, failing
        self._blamed: _Blamed | None = None

    def on_raised(self, node: Node, message: Raised) -> None:
        """Handle a script error in a process that still runs and keeps its state. A repeated message is ignored.

        A member's error interrupts its generation; any other process is replaced at once. A final error closes the job.
        Another one may revert a change of layout; else it is remembered, and closes the job if the work causes it on
        every node.
        """
        transaction, info = self._transaction, node.workers[message.worker]
        if info.raised:
            return
        info.raised = True
        if not transaction.is_member(message.worker):
            self._failures.handle(script_raised(node.name, message, transaction.now))
            self.release([message.worker])
        elif message.worker in (before.worker for before in transaction.record.raised):
            # An earlier coordinator has reported it. In the last plan the worker is a member that only saves.
            if transaction.record.plan is not None and not transaction.record.plan.last:
                self._interruption.start(transaction.now)
            return
        else:
            self._failures.report_needed_worker(script_raised(node.name, message, transaction.now))
        if message.final:
            why = f"{transaction.place_of(message.worker)}: {_describe_error(message.error, message.detail)}"
            self._closing.fail(why, message.exit_code, message.error.traceback)
        elif not self._failing.on_replacement(message.worker, _describe_error(message.error, message.detail)):
            self._remember(message.worker, message.error, message.detail)

    def close_if_final(self, down: WorkerDown) -> bool:
        """Close the job if a script ended with an error for which no restart helps.

        Returns:
            Whether the script ended for bad input of its node alone.
        """
        if down.final:
            trace = down.error.traceback if down.error is not None else ""
            self._closing.fail(f"{self._transaction.place_of(down.worker)}: {down.detail}", down.exit_code, trace)
        return down.exit_code == EXIT_BAD_INPUT and not down.final

    def on_process_ended(self, down: WorkerDown) -> None:
        """Remember the script error of an ended process, unless it is final; close the job if the work causes it on
        every node.
        """
        if down.error is not None and not down.final:
            self._remember(down.worker, down.error, down.detail)

    def find_failed(self, workers: Iterable[str]) -> list[str]:
        """Return the workers with script errors, together with the others of their replica groups."""
        members = self._transaction.members
        infos = [info for worker in workers if (info := members.worker(worker)) is not None]
        units = {unit_of(info.id, members.unit_places) for info in infos if info.raised}
        return [info.id for info in infos if unit_of(info.id, members.unit_places) in units] if units else []

    def release(self, workers: Iterable[str]) -> None:
        """Remove these workers, because their state is not needed, and have their agents replace the processes.

        Agents replace the rest of a replica group together with the worker that has raised.
        """
        members = self._transaction.members
        for worker in workers:
            node = members.nodes[node_of(worker)]
            info = members.drop(node, worker)
            self._ledger.forget(worker)
            self._interruption.forget(worker)
            if info is not None and info.raised:
                self._transaction.send(node.connection, Replace(worker=worker))
            else:
                # It ends together with another worker of its replica group.
                node.broken.add(worker)

    def _remember(self, worker: str, error: ScriptError, detail: str) -> None:
        """Record a script error in the job's record; close the job if the work causes it on every node.

        The layout may be the cause instead: then another layout starts, or the job is saved for a restart under one. A
        further report of the error that closed the job only adds its node to the reason.
        """
        transaction = self._transaction
        found = self._classes.classify(FailureKind.EXCEPTION, Detector.EXCEPTION, detail)
        if worker in (one.worker for one in transaction.record.raised):
            # Reported again by its node, because this coordinator is new.
            return
        last = RaisedBefore(
            worker=worker,
            place=error.place[:MAX_REASON],
            step=error.step,
            micro_batch=error.micro_batch,
            time=transaction.now,
        )
        before = transaction.record.raised
        transaction.change(raised=(*before, last)[-_REMEMBERED:])
        if self._failing.on_script_error(error):
            return
        machine = found.status not in _SOFTWARE
        if nodes := find_agreeing_nodes(before, last, self._nodes, machine=machine, ever=not transaction.position.step):
            where = f" (on {'nodes' if len(nodes) > 1 else 'node'} {', '.join(nodes)})"
            if self._failing.can_fit_elsewhere(error):
                self._closing.renew(_describe_error(error, detail) + where)
            elif self._blamed is None or self._blamed.place != error.place:
                if not self._closing.fail(_describe_error(error, detail) + where, traceback=error.traceback):
                    return
                self._blamed = _Blamed(error.place, _describe_error(error, detail), "")
            else:
                self._closing.amend(self._blamed.said + self._blamed.where, self._blamed.said + where)
            if self._blamed is not None:
                self._blamed.where = where

    @property
    def _nodes(self) -> int:
        """The number of nodes in the job, including the ones it waits for at the start."""
        plan, spec = self._transaction.record.plan, self._config.spec
        if plan is None:
            return max(
                len(self._transaction.members.regular),
                0 if self._transaction.record.generation else spec.nodes_to_begin,
            )
        return len({member.node for member in plan.members})


def _describe_error(error: ScriptError, detail: str) -> str:
    """Return the error text `detail`, after the step and the micro-batch in which the script was, if they are known."""
    where = [f"step {error.step}"] if error.step is not None else []
    where += [f"micro-batch {error.micro_batch}"] if error.micro_batch is not None else []
    return f"{', '.join(where)}: {detail}" if where else detail
