"""The checkpoints that one worker writes, in the background, and renames or removes as it is told."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.protocol import messages as msg

if TYPE_CHECKING:
    from holdfast.simulation.worker import SimWorker


class Saver:
    """Writes checkpoints of one worker's state, and tells it once that of its newest step is settled."""

    def __init__(self, worker: SimWorker) -> None:
        self._worker = worker
        #: the checkpoint of the step that is here, under its temporary name
        self._saving = ""
        self._writing = False
        #: the last save, that waits until the one before is written
        self._next: tuple[msg.EpochPlan, int, int] | None = None

    def applied(self, plan: msg.EpochPlan, step: int, state: int) -> None:
        """Save a step if it is one of those to be saved, and the one before is written.

        `plan`: the one under which the step was applied; a swap may have taken effect since.
        """
        every = self._worker.cluster.plan.checkpoint_every
        if every and step % every == 0 and not self._writing:
            self.save(plan, step, state)

    def save(self, plan: msg.EpochPlan, step: int, state: int) -> bool:
        """Save a step if this worker is the one to do it; False where nothing is written."""
        worker = self._worker
        if not worker.cluster.plan.checkpoint_every or not step or plan.rank(worker.id) != 0:
            return False
        if self._writing:
            self._next = plan, step, state
            return True
        self._writing = True
        worker.cluster.after_disk("checkpoint", worker, worker.agent.name, self._written, plan, step, state)
        return True

    def order(self, order: msg.AcceptCheckpoint | msg.PruneCheckpoints) -> None:
        """Take an order; the disk obeys it when it can."""
        worker = self._worker
        worker.cluster.after_disk("rename", worker, worker.agent.name, self._obey, order)

    def _written(self, plan: msg.EpochPlan, step: int, state: int) -> None:
        worker, cluster = self._worker, self._worker.cluster
        self._writing, waiting, self._next = False, self._next, None
        if waiting is not None:
            self.save(*waiting)
        is_newest = step == worker.machine.applied
        if cluster.troubles(worker.agent.name).full_until > cluster.timeline.now:
            if is_newest:
                worker.saved()
            return  # training is worth more than a checkpoint
        name = cluster.write_checkpoint(plan, step, state).writing
        if is_newest:
            self._saving = name
        worker.tell(
            msg.CheckpointWritten(
                worker=worker.id, term=plan.term, epoch=plan.epoch, step=step, name=name, bytes=1, seconds=0.1
            )
        )

    def _obey(self, order: msg.AcceptCheckpoint | msg.PruneCheckpoints) -> None:
        worker, cluster = self._worker, self._worker.cluster
        if isinstance(order, msg.AcceptCheckpoint):
            cluster.keep_checkpoint(worker, order)
        else:
            cluster.prune_checkpoints(order)
        if self._saving in (order.names if isinstance(order, msg.PruneCheckpoints) else (order.name,)):
            worker.saved()
