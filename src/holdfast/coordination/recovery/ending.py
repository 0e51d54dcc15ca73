"""The end of a job: finished, failed or resumable; reported once to all connected agents."""

from __future__ import annotations

from holdfast.coordination.instructions import EndJob
from holdfast.coordination.membership import Node
from holdfast.coordination.transaction import Transaction
from holdfast.errors import EXIT_DONE, EXIT_FAILED
from holdfast.protocol.events import JobFailed, JobFinished, NodeStayed
from holdfast.protocol.messages.agent import EndNode
from holdfast.protocol.messages.orders import JobDone


class JobEnd:
    """Ends the job."""

    def __init__(self, transaction: Transaction) -> None:
        #: How the job ended, or None while it goes on.
        self.over: EndJob | None = None
        self._transaction = transaction

    @property
    def farewell(self) -> str:
        """The reason with which nodes leave once the job is over."""
        return self._transaction.record.outcome or "drained"

    def repeat_outcome(self) -> None:
        """End this coordinator with the outcome in the record: an earlier one wrote it, but some agents may not know
        it.

        Nothing is sent yet; agents get the outcome as they connect.
        """
        outcome = self._transaction.record.outcome
        self._end(EXIT_DONE if outcome == "finished" else EXIT_FAILED, f"the job is {outcome}")

    def finish_job(self) -> None:
        """Finish the job: cancel moves, emit `job_finished`, and tell all workers that it is done. End nodes without
        workers.

        The reason is "stopped" if a script requested the end, else "completed".
        """
        transaction = self._transaction
        stops = [info.stopped for info in transaction.members.workers() if info.stopped is not None]
        transaction.change(outcome="finished")
        self._cancel_moves()
        self._emit_finished("stopped" if stops else "completed", next(filter(None, stops), ""))
        transaction.order_all((info.id for info in transaction.members.all_workers()), JobDone())
        # Nodes without workers are still starting, and JobDone would reach no worker there.
        starting = (node.connection for node in transaction.members.nodes.values() if not node.workers)
        transaction.broadcast(starting, EndNode(exit_code=EXIT_DONE, why="the job is done"))
        self._end(EXIT_DONE, "done")

    def fail_job(self, why: str, exit_code: int = EXIT_FAILED, traceback: str = "") -> None:
        """Fail the job: cancel moves, emit `job_failed`, and end all nodes. Ignored once the job is over."""
        if self.over is not None:
            return
        self._transaction.change(outcome="failed")
        self._cancel_moves()
        self._transaction.emit(JobFailed, why=why, traceback=traceback)
        self._end_all_nodes(exit_code, why)

    def stop_job(self, exit_code: int, reason: str, why: str) -> None:
        """End all nodes without an outcome, so that the job can be resumed. Cancels moves; ignored once the job is
        over.
        """
        if self.over is not None:
            return
        self._cancel_moves()
        self._emit_finished(reason, why, resumable=True)
        self._end_all_nodes(exit_code, why)

    def _cancel_moves(self) -> None:
        """Cancel moves of nodes that would have become standbys, unless the job goes on without them already; emit
        this.
        """
        transaction = self._transaction
        stay = [one for one in transaction.record.leaving if one.stays and not one.owed]
        if stay:
            transaction.change(leaving=tuple(one for one in transaction.record.leaving if one not in stay))
        for one in stay:
            why = "the job ended before a standby had its place"
            transaction.emit(NodeStayed, node=one.node, reason="job_ended", detail=why)

    def _emit_finished(self, reason: str, why: str = "", *, resumable: bool = False) -> None:
        """Emit `job_finished` with the numbers of steps and samples, and the last loss if it is known."""
        at = self._transaction.position
        # All steps have the same number of samples. Earlier steps belong to a run with events that are not in this
        # journal.
        counted = at.samples // at.step_samples if at.step_samples else 0
        totals = {"steps": at.step, "samples": at.samples, "samples_since": at.step - counted}
        loss = at.loss if at.step_time else None
        self._transaction.emit(JobFinished, reason=reason, why=why, resumable=resumable, final_loss=loss, **totals)

    def _end_all_nodes(self, exit_code: int, why: str) -> None:
        """Send all connected nodes the order to end, and record how the job ended."""
        here = (node.connection for node in self._transaction.members.nodes.values())
        self._transaction.broadcast(here, EndNode(exit_code=exit_code, why=why))
        self._end(exit_code, why)

    def answer_late_node(self, node: Node) -> None:
        """Order a node that connects after the end to end. With an outcome, its workers get JobDone instead, elsewhere.

        Ignored while the job goes on.
        """
        if self.over is not None and not (self._transaction.record.outcome and node.workers):
            self._transaction.send(node.connection, EndNode(exit_code=self.over.exit_code, why=self.over.why))

    def handle_hang(self, name: str) -> bool:
        """Return whether the job is over. If so, end the node `name`, of which a worker hangs, if it is a standby or
        retained.

        A hang after the end is not a failure.
        """
        members = self._transaction.members
        node = members.standbys.get(name) or members.owed.get(name)
        if self.over is not None and node is not None:
            why = "a worker hangs, and the job is over"
            self._transaction.send(node.connection, EndNode(exit_code=EXIT_FAILED, why=why, alone=True))
        return self.over is not None

    def _end(self, exit_code: int, why: str) -> None:
        """Record how the job ended, and order the shell to end."""
        self.over = EndJob(exit_code, why)
        self._transaction.end(self.over)
