"""Simulated workers save checkpoint parts, which their agents write, and snapshot parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from holdfast.coordination.agent.instructions import AdmitReaders, DropParts, FetchParts, OpenSnapshotMemory
from holdfast.coordination.experts.blobs import decode_experts
from holdfast.coordination.worker.machine import WorkerMachine
from holdfast.coordination.worker.requests import is_save_due
from holdfast.protocol.checkpoints.names import CheckpointName
from holdfast.protocol.commit import Commit, Wish
from holdfast.protocol.messages import any_side as msg
from holdfast.protocol.names import node_and_index_of
from holdfast.protocol.plan import DecisionKind
from holdfast.protocol.state import CheckpointSource, SnapshotPart, SnapshotSource, seal_of
from tests.simulation.durable import CheckpointFile, HandedPart, MemoryPart
from tests.simulation.invariants import Checker
from tests.simulation.machines.host import WorkerHost
from tests.simulation.world import Delivers, World


class Saver:
    """Hands checkpoint parts to the worker's agent, and calls the worker when a pending save is resolved."""

    def __init__(self, worker: WorkerHost) -> None:
        self._worker = worker
        #: The newest checkpoint handed over, until its outcome is known.
        self._pending: CheckpointName | None = None
        #: The step and name of the newest accepted checkpoint, or of the checkpoint loaded later.
        self._counting = (0, "")

    def applied(self, plan: msg.GenerationPlan, step: int, state: int, commit: Commit) -> None:
        """Save a step if all workers save it.

        `plan` is the plan under which the step was applied; a swap may have taken effect since.
        """
        self._worker.copier.applied(plan, step)
        wanted = is_save_due(commit.wishes, due=self._is_due(step)) and not commit.failed
        if wanted and not alone_in(self._worker.machine, step):
            self._hand(plan, step, state)

    def is_still_saving(self, step: int) -> bool:
        """Return whether this worker's part of an earlier checkpoint keeps all workers from saving after `step`."""
        in_time = self._worker.world.plan.saves_in_time
        return (in_time or self._is_due(step)) and self._worker.agent.writer.busy(self._worker.id)

    def _is_due(self, step: int) -> bool:
        job = self._worker.world.plan
        return bool(job.checkpoint_every) and not job.saves_in_time and step % job.checkpoint_every == 0

    @property
    def idle(self) -> bool:
        """Whether the outcome of every save is known."""
        return self._pending is None

    def save(self, plan: msg.GenerationPlan, step: int, state: int) -> None:
        """Save a step, unless it is already saved or being saved."""
        job = self._worker.world.plan
        if job.checkpoint_every and step and self._counting[0] != step and self._pending != _name(plan, step):
            self._hand(plan, step, state)

    def loaded(self, step: int, source: CheckpointSource | SnapshotSource) -> None:
        """Forget the later checkpoints after the state was rolled back."""
        self._pending = None
        self._counting = (step, source.name) if isinstance(source, CheckpointSource) else (0, "")

    def order(self, order: msg.AcceptCheckpoint | msg.PruneCheckpoints | msg.AskCheckpoint) -> None:
        """Handle an order about checkpoints."""
        worker, pending = self._worker, self._pending
        if isinstance(order, msg.AskCheckpoint):
            worker.machine.wishes.raise_wish(Wish.SAVE_IF_FREE)
            return
        if isinstance(order, msg.AcceptCheckpoint):
            if order.files:
                return  # The agent handles this order.
            self._counting = max(self._counting, (order.step, order.name))
        names = order.names if isinstance(order, msg.PruneCheckpoints) else (order.name,)
        if pending is not None and pending.folder in names:
            self._pending = None
        if isinstance(order, msg.PruneCheckpoints) and self._counting[1] in names:
            self._counting = (0, "")
        worker.saved()

    def _hand(self, plan: msg.GenerationPlan, step: int, state: int) -> None:
        worker = self._worker
        rank = plan.rank(worker.id)
        if rank is not None:
            self._pending = _name(plan, step)
            handed = HandedPart(worker.id, self._pending, rank, len(plan.members), plan.places, state)
            worker.agent.writer.write_part(handed)


def _name(plan: msg.GenerationPlan, step: int) -> CheckpointName:
    nonce = seal_of(plan.secret).hex()[:8]
    return CheckpointName(term=plan.term, generation=plan.generation, step=step, nonce=nonce)


def alone_in(machine: WorkerMachine, step: int) -> bool:
    """Return whether a step was applied as FORWARD, only by the workers that had not applied it."""
    decision = machine.generations.decision
    return decision is not None and decision.kind is DecisionKind.FORWARD and decision.applied == step


class SimWriter:
    """Writes, seals and removes the checkpoint parts of one node's workers, even after a worker dies."""

    def __init__(
        self, world: World, checker: Checker, node: str, agent: Delivers, say: Callable[[msg.WorkerMessage], None]
    ) -> None:
        self._world, self._checker, self._node, self._agent, self._say = world, checker, node, agent, say
        self._writing: list[HandedPart] = []

    def busy(self, worker: str) -> bool:
        """Return whether a part of the worker at this local rank is being written."""
        return any(node_and_index_of(handed.worker) == node_and_index_of(worker) for handed in self._writing)

    def write_part(self, handed: HandedPart) -> None:
        """Write a part when the disk is ready."""
        self._writing.append(handed)
        self._world.after_disk("checkpoint", self._agent, self._node, self._written, handed)

    def obey(self, order: msg.AcceptCheckpoint | msg.PruneCheckpoints) -> None:
        """Seal a checkpoint, or remove checkpoints, when the disk is ready."""
        if isinstance(order, msg.PruneCheckpoints) or order.files:
            self._world.after_disk("rename", self._agent, self._node, self._obey, order)

    def _written(self, handed: HandedPart) -> None:
        self._writing.remove(handed)
        name, world = handed.name, self._world
        fields: dict[str, Any] = {"worker": handed.worker, "term": name.term}
        fields |= {"generation": name.generation, "step": name.step}
        if world.troubles(self._node).full_until > world.timeline.now:
            # A failed checkpoint must not stop the training.
            self._say(msg.CheckpointUnwritten(**fields, name=name.folder, why="No space left on device"))
            return
        file = world.checkpoints.files.setdefault(name.folder, CheckpointFile(step=name.step, places=handed.places))
        place = handed.part % handed.places
        if file.states.setdefault(place, handed.state) != handed.state:
            file.states[place] = world.garbage()
        file.parts.add(handed.part)
        files = (msg.StoredFile(name=f"part-{handed.part}", bytes=1, sha256="0" * 64),)
        self._say(
            msg.CheckpointWritten(
                **fields, name=name.folder, part=handed.part, parts=handed.parts, files=files, seconds=0.1
            )
        )

    def _obey(self, order: msg.AcceptCheckpoint | msg.PruneCheckpoints) -> None:
        files = self._world.checkpoints.files
        if isinstance(order, msg.PruneCheckpoints):
            for name in order.names if order.remove else ():
                self._checker.pruned(name)
                files.pop(name, None)
            return
        file = files.get(order.name)
        fields: dict[str, Any] = {"worker": f"{self._node}/0/0", "term": order.term}
        fields |= {"generation": order.generation, "step": order.step}
        if file is None or file.damaged or len(file.parts) != len(order.files):
            self._say(msg.CheckpointUnwritten(**fields, name=order.name, why="cut short"))
            return
        file.sealed = True
        self._say(msg.CheckpointKept(**fields, name=order.name, bytes=1, seconds=0.1))


class SnapshotCopier:
    """Copies the worker's part of the state while the next step computes; apply waits for the copy."""

    def __init__(self, worker: WorkerHost) -> None:
        self._worker = worker
        #: Whether a copy is reading the state, so that the state must not change.
        self.active = False

    def applied(self, plan: msg.GenerationPlan, step: int) -> None:
        """Copy the state of a step if a snapshot is due; `plan` is the plan under which the step was applied."""
        worker, every = self._worker, self._worker.world.plan.snapshot_every
        rank = plan.rank(worker.id)
        if not every or step % every or rank is None or alone_in(worker.machine, step):
            return
        self.active = True
        snapshot = plan.snapshot_part(rank, step)
        worker.world.after("copy", worker, self._copied, snapshot)

    def stash_state(self, plan: msg.GenerationPlan) -> None:
        """Stash the state in the node's memory before another layout takes effect."""
        worker, machine = self._worker, self._worker.machine
        rank, step = plan.rank(worker.id), machine.applied or 0
        part = plan.stash_part(rank, step) if rank is not None else None
        apart = plan.expert_stash_part(rank, step) if rank is not None else None
        if part is None and apart is None:
            machine.generations.record_stash(plan.generation)
            worker.advance()
            return
        worker.busy = "put"
        worker.world.after("copy", worker, self._put, plan, part, apart)
        worker.boundary("putting")

    def _put(self, plan: msg.GenerationPlan, part: SnapshotPart | None, apart: SnapshotPart | None) -> None:
        worker, experts = self._worker, plan.expert_plan
        if worker.busy != "put" or worker.hung:
            return
        worker.busy = ""
        worker.machine.generations.record_stash(plan.generation)
        if part is not None:
            self._written(part, worker.state)
        if apart is not None and experts is not None and worker.experts is not None:
            blob = experts.placement[worker.machine.generations.rank]
            self._written(apart, worker.state, worker.experts.of(decode_experts(blob, worker.experts.shape)))
        worker.advance()

    def _copied(self, snapshot: SnapshotPart) -> None:
        worker = self._worker
        self.active = False
        worker.world.after("seal", worker, self._written, snapshot, worker.state)
        worker.advance()

    def _written(self, snapshot: SnapshotPart, state: int, experts: tuple[int, ...] = ()) -> None:
        worker, world = self._worker, self._worker.world
        if world.troubles(worker.node).memory_full_until > world.timeline.now:
            worker.send(
                msg.SnapshotLeftOut(
                    worker=worker.id, generation=snapshot.generation, step=snapshot.step, why="no room for 1 byte"
                )
            )
            return
        world.memory(worker.node).parts[snapshot] = MemoryPart(state, experts=experts)
        worker.send(msg.SnapshotTaken(worker=worker.id, snapshot=snapshot, bytes=1, seconds=0.1))


class SimKeeper:
    """The snapshot parts in the memory of one node, for its agent."""

    def __init__(self, world: World, node: str, agent: Delivers, on_part: Callable[[SnapshotPart], None]) -> None:
        self._world, self._node, self._agent, self._on_part = world, node, agent, on_part
        self._wanted: Sequence[msg.WantedPart] = ()

    def found(self) -> msg.NodeSnapshots | None:
        """Return the parts still in memory when the agent starts, or None if the job takes no snapshots."""
        return self.opened() if self._world.plan.snapshot_every else None

    def opened(self) -> msg.NodeSnapshots:
        """Open the memory for parts, and return the parts still in it."""
        memory = self._world.memory(self._node)
        memory.open = True
        if self._world.rng.random() < 0.5:
            memory.parts.clear()
        return msg.NodeSnapshots(host="10.0.0.1", port=1, parts=tuple(memory.parts))

    def close(self) -> None:
        """Close the memory, because the agent has died."""
        self._world.memory(self._node).open = False

    def obey(self, work: FetchParts | DropParts | AdmitReaders | OpenSnapshotMemory) -> None:
        """Execute an instruction of the agent's machine."""
        if isinstance(work, FetchParts):
            self._wanted = work.wanted
            for one in work.wanted:
                self._world.after("transfer", self._agent, self._fetch, one, 3)
        elif isinstance(work, DropParts):
            for part in work.parts:
                self._world.memory(self._node).parts.pop(part, None)

    def _fetch(self, one: msg.WantedPart, tries: int) -> None:
        """Copy a part from another node if possible, or try again later."""
        world, memory = self._world, self._world.memory(one.keeper.node)
        if one not in self._wanted:
            return
        part = memory.parts.get(one.snapshot)
        full = world.troubles(self._node).memory_full_until > world.timeline.now
        within_reach = memory.open and world.data_plane.reaches(self._node, {one.keeper.node})
        if part is not None and within_reach and not part.damaged and not full:
            world.memory(self._node).parts[one.snapshot] = MemoryPart(part.state)
            self._on_part(one.snapshot)
        elif tries:
            world.after("retry", self._agent, self._fetch, one, tries - 1)
