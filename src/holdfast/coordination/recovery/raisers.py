"""Workers whose scripts have raised: their state is kept while it may be the only one, then they are replaced.

An exception that one node meets is a process that starts again; one that the work brings about wherever it is done ends
the job, saved first.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from holdfast.coordination.config import CoordinatorConfig
from holdfast.coordination.failures.blame import nodes_that_agree
from holdfast.coordination.failures.classes import UNKNOWN, Classes
from holdfast.coordination.failures.seen import script_raised
from holdfast.coordination.generations.stopping import Stopping
from holdfast.coordination.layouts.failing import FailingLayouts
from holdfast.coordination.membership import Node
from holdfast.coordination.progress.ledger import StepLedger
from holdfast.coordination.recovery.closing import Closing
from holdfast.coordination.recovery.failures import Failures
from holdfast.coordination.roles import unit_of
from holdfast.coordination.turn import Transaction
from holdfast.errors import EXIT_BAD_INPUT
from holdfast.protocol.failures import Detector, FailureKind
from holdfast.protocol.messages.agent import Replace, WorkerDown
from holdfast.protocol.messages.worker import Raised, ScriptError
from holdfast.protocol.names import node_of
from holdfast.protocol.record import MAX_REASON, RaisedBefore

#: so many of the newest exceptions are remembered: more than any generation of a small job can meet at once
_REMEMBERED = 64
#: classes of what a script does wrong by itself
_SOFTWARE = ("software_error", UNKNOWN)


@dataclass(slots=True)
class _Blamed:
    """What the job ends for: where it is raised, what is said of it, and on which nodes it was met so far."""

    place: str
    said: str
    where: str


class Raisers:
    """Takes in what scripts raise, and lets go of the processes that are not needed any more."""

    def __init__(
        self,
        transaction: Transaction,
        config: CoordinatorConfig,
        ledger: StepLedger,
        stopping: Stopping,
        failures: Failures,
        closing: Closing,
        classes: Classes,
        failing: FailingLayouts,
    ) -> None:
        self._transaction = transaction
        self._config = config
        self._ledger = ledger
        self._stopping = stopping
        self._failures = failures
        self._closing = closing
        self._classes, self._failing = classes, failing
        self._blamed: _Blamed | None = None

    def raised(self, node: Node, message: Raised) -> None:
        """A script has raised; its process is there, and keeps what it has."""
        transaction, info = self._transaction, node.workers[message.worker]
        if info.raised:
            return
        info.raised = True
        if not transaction.is_member(message.worker):
            self._failures.take(script_raised(node.name, message, transaction.now))
            self.release([message.worker])
        elif message.worker in (before.worker for before in transaction.record.raised):
            # A coordinator before this one has told of it. In the last plan it is a member that only saves.
            if transaction.record.plan is not None and not transaction.record.plan.last:
                self._stopping.begin(transaction.now)
            return
        else:
            self._failures.note(script_raised(node.name, message, transaction.now))
        if message.final:
            why = f"{transaction.place_of(message.worker)}: {_said(message.error, message.detail)}"
            self._closing.fail(why, message.exit_code, message.error.traceback)
        elif not self._failing.again(message.worker, _said(message.error, message.detail)):
            self._remember(message.worker, message.error, message.detail)

    def no_more(self, down: WorkerDown) -> bool:
        """A process has ended: where its script wants no more the job does; tell whether its node's input is bad."""
        if down.final:
            trace = down.error.traceback if down.error is not None else ""
            self._closing.fail(f"{self._transaction.place_of(down.worker)}: {down.detail}", down.exit_code, trace)
        return down.exit_code == EXIT_BAD_INPUT and not down.final

    def ended(self, down: WorkerDown) -> None:
        """A script has raised, and its process is gone."""
        if down.error is not None and not down.final:
            self._remember(down.worker, down.error, down.detail)

    def among(self, workers: Iterable[str]) -> list[str]:
        """Return those of these workers whose scripts have raised, and with them the others of their units."""
        members = self._transaction.members
        infos = [info for worker in workers if (info := members.worker(worker)) is not None]
        units = {unit_of(info.id, members.unit_places) for info in infos if info.raised}
        return [info.id for info in infos if unit_of(info.id, members.unit_places) in units] if units else []

    def release(self, workers: Iterable[str]) -> None:
        """Nobody needs what these have: other processes are to take their places."""
        members = self._transaction.members
        for worker in workers:
            node = members.nodes[node_of(worker)]
            info = members.drop(node, worker)
            self._ledger.forget(worker)
            self._stopping.forget(worker)
            if info is not None and info.raised:
                self._transaction.send(node.connection, Replace(worker=worker))
            else:  # (it goes with another one of its unit)
                node.broken.add(worker)

    def _remember(self, worker: str, error: ScriptError, detail: str) -> None:
        """Keep it with those before; end the job where it is the work's fault."""
        transaction = self._transaction
        found = self._classes.of(FailureKind.EXCEPTION, Detector.EXCEPTION, detail)
        if worker in (one.worker for one in transaction.record.raised):
            return  # (its node tells a coordinator that has come since)
        last = RaisedBefore(
            worker=worker,
            place=error.place[:MAX_REASON],
            step=error.step,
            micro_batch=error.micro_batch,
            time=transaction.now,
        )
        before = transaction.record.raised
        transaction.change(raised=(*before, last)[-_REMEMBERED:])
        if self._failing.ran_out(error):
            return
        machine = found.status not in _SOFTWARE
        if nodes := nodes_that_agree(before, last, self._nodes, machine=machine, ever=not transaction.position.step):
            where = f" (on {'nodes' if len(nodes) > 1 else 'node'} {', '.join(nodes)})"
            if self._failing.fits_elsewhere(error):
                self._closing.renew(_said(error, detail) + where)
            elif self._blamed is None or self._blamed.place != error.place:
                if not self._closing.fail(_said(error, detail) + where, traceback=error.traceback):
                    return
                self._blamed = _Blamed(error.place, _said(error, detail), "")
            else:
                self._closing.amend(self._blamed.said + self._blamed.where, self._blamed.said + where)
            if self._blamed is not None:
                self._blamed.where = where

    @property
    def _nodes(self) -> int:
        """How many nodes the job has, those that it waits for to begin included."""
        plan, spec = self._transaction.record.plan, self._config.spec
        if plan is None:
            return max(
                len(self._transaction.members.regular),
                0 if self._transaction.record.generation else spec.nodes_to_begin,
            )
        return len({member.node for member in plan.members})


def _said(error: ScriptError, detail: str) -> str:
    """Say what was raised, and at which micro-batch of which step."""
    where = [f"step {error.step}"] if error.step is not None else []
    where += [f"micro-batch {error.micro_batch}"] if error.micro_batch is not None else []
    return f"{', '.join(where)}: {detail}" if where else detail
