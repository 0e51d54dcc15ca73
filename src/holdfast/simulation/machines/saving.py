"""The checkpoints that one simulated worker writes, in the background, and renames or removes as it is told."""

from __future__ import annotations

from holdfast.protocol.checkpoint_names import CheckpointName, parse_name
from holdfast.protocol.messages import any_side as msg
from holdfast.simulation.durable import CheckpointFile
from holdfast.simulation.machines.host import WorkerHost


class Saver:
    """Writes checkpoints of one worker's state, and tells it whenever all of them are settled."""

    def __init__(self, worker: WorkerHost) -> None:
        self._worker = worker
        #: the step of the newest checkpoint that was begun or loaded here
        self._newest: int = 0
        self._writing = False
        #: what waits for the coordinator's answer
        self._waiting: list[CheckpointName] = []
        #: the last save, that waits until the one before is written
        self._next: tuple[msg.GenerationPlan, int, int] | None = None

    def applied(self, plan: msg.GenerationPlan, step: int, state: int) -> None:
        """Save a step if it is one of those to be saved, and the one before is written.

        `plan`: the one under which the step was applied; a swap may have taken effect since.
        """
        every = self._worker.world.plan.checkpoint_every
        if every and step % every == 0 and not self._writing:
            self.save(plan, step, state)

    @property
    def idle(self) -> bool:
        """True where nothing is being written, and nothing written waits for its final name."""
        return not self._writing and not self._waiting

    def save(self, plan: msg.GenerationPlan, step: int, state: int) -> None:
        """Save a step if this worker is the one to do it, and has not begun to before."""
        worker = self._worker
        if not worker.world.plan.checkpoint_every or plan.rank(worker.id) != 0 or step == self._newest:
            return
        if self._writing:
            self._next = plan, step, state
            return
        self._newest, self._writing = step, True
        worker.world.after_disk("checkpoint", worker, worker.node, self._written, plan, step, state)

    def loaded(self, step: int) -> None:
        """The state went back to that of a checkpoint: what was written since is nobody's any more."""
        self._newest, self._waiting = step, []

    def order(self, order: msg.AcceptCheckpoint | msg.PruneCheckpoints) -> None:
        """Take an order; the disk obeys it when it can."""
        worker = self._worker
        worker.world.after_disk("rename", worker, worker.node, self._obey, order)

    def _written(self, plan: msg.GenerationPlan, step: int, state: int) -> None:
        worker, world = self._worker, self._worker.world
        self._writing, waiting, self._next = False, self._next, None
        if waiting is not None:
            self.save(*waiting)
        if world.troubles(worker.node).full_until > world.timeline.now:
            worker.saved()
            return  # training is worth more than a checkpoint
        name = self._write(plan, step, state)
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
        if isinstance(order, msg.AcceptCheckpoint):
            self._keep(order)
            accepted = parse_name(order.name)
            self._waiting = [name for name in self._waiting if name > accepted]  # what is older was passed over
        else:
            self._prune(order)
            self._waiting = [name for name in self._waiting if name.writing not in order.names]
        self._worker.saved()

    def _write(self, plan: msg.GenerationPlan, step: int, state: int) -> CheckpointName:
        """Put a complete checkpoint under a temporary name; return what it is called."""
        world = self._worker.world
        name = CheckpointName(term=plan.term, generation=plan.generation, step=step, nonce=world.nonce())
        world.checkpoints.files[name.writing] = CheckpointFile(step=step, state=state)
        return name

    def _keep(self, order: msg.AcceptCheckpoint) -> None:
        """Give an accepted checkpoint its final name, unless it is not whole any more."""
        worker, files, name = self._worker, self._worker.world.checkpoints.files, parse_name(order.name)
        if name.writing in files:
            files[name.final] = files.pop(name.writing)
        file = files.get(name.final)
        if file is None or file.damaged:
            return
        worker.tell(
            msg.CheckpointKept(
                worker=worker.id,
                term=order.term,
                generation=order.generation,
                step=order.step,
                name=name.final,
                bytes=1,
                seconds=0.1,
            )
        )

    def _prune(self, order: msg.PruneCheckpoints) -> None:
        """Remove checkpoints, kept or not."""
        for name in order.names:
            self._worker.checker.pruned(name)
            self._worker.world.checkpoints.files.pop(name, None)
