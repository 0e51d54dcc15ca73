"""The checkpoints that one worker writes, in the background, and renames or removes as it is told."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.protocol.checkpoint_names import CheckpointName, parse_name
from holdfast.protocol.messages import any_side as msg

if TYPE_CHECKING:
    from holdfast.simulation.machines.worker import SimWorker


class Saver:
    """Writes checkpoints of one worker's state, and tells it whenever all of them are settled."""

    def __init__(self, worker: SimWorker) -> None:
        self._worker = worker
        #: the step of the newest checkpoint that was begun or loaded here
        self._newest = 0
        self._writing = False
        #: what waits for the coordinator's answer
        self._waiting: list[CheckpointName] = []
        #: the last save, that waits until the one before is written
        self._next: tuple[msg.GenerationPlan, int, int] | None = None

    def applied(self, plan: msg.GenerationPlan, step: int, state: int) -> None:
        """Save a step if it is one of those to be saved, and the one before is written.

        `plan`: the one under which the step was applied; a swap may have taken effect since.
        """
        every = self._worker.cluster.plan.checkpoint_every
        if every and step % every == 0 and not self._writing:
            self.save(plan, step, state)

    @property
    def idle(self) -> bool:
        """True where nothing is being written, and nothing written waits for its final name."""
        return not self._writing and not self._waiting

    def save(self, plan: msg.GenerationPlan, step: int, state: int) -> None:
        """Save a step if this worker is the one to do it, and has not begun to before."""
        worker = self._worker
        if not worker.cluster.plan.checkpoint_every or plan.rank(worker.id) != 0 or step == self._newest:
            return
        if self._writing:
            self._next = plan, step, state
            return
        self._newest, self._writing = step, True
        worker.cluster.after_disk("checkpoint", worker, worker.agent.name, self._written, plan, step, state)

    def loaded(self, step: int) -> None:
        """The state went back to that of a checkpoint: what was written since is nobody's any more."""
        self._newest, self._waiting = step, []

    def order(self, order: msg.AcceptCheckpoint | msg.PruneCheckpoints) -> None:
        """Take an order; the disk obeys it when it can."""
        worker = self._worker
        worker.cluster.after_disk("rename", worker, worker.agent.name, self._obey, order)

    def _written(self, plan: msg.GenerationPlan, step: int, state: int) -> None:
        worker, cluster = self._worker, self._worker.cluster
        self._writing, waiting, self._next = False, self._next, None
        if waiting is not None:
            self.save(*waiting)
        if cluster.troubles(worker.agent.name).full_until > cluster.timeline.now:
            worker.saved()
            return  # training is worth more than a checkpoint
        name = cluster.write_checkpoint(plan, step, state)
        self._waiting.append(name)
        worker.tell(
            msg.CheckpointWritten(
                worker=worker.id,
                term=plan.term,
                generation=plan.generation,
                step=step,
                name=name.writing,
                bytes=1,
                seconds=0.1,
            )
        )

    def _obey(self, order: msg.AcceptCheckpoint | msg.PruneCheckpoints) -> None:
        worker, cluster = self._worker, self._worker.cluster
        if isinstance(order, msg.AcceptCheckpoint):
            cluster.keep_checkpoint(worker, order)
            accepted = parse_name(order.name)
            self._waiting = [name for name in self._waiting if name > accepted]  # what is older was passed over
        else:
            cluster.prune_checkpoints(order)
            self._waiting = [name for name in self._waiting if name.writing not in order.names]
        worker.saved()
