"""A simulated worker's training thread enters a generation: it loads state, moves experts and receives state.

A standby runs shadow steps to stay warm while it has no generation.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from holdfast.coordination.experts.blobs import decode_experts
from holdfast.coordination.worker import tasks
from holdfast.protocol.layouts.proposals import adoption
from holdfast.protocol.messages import any_side as msg
from holdfast.protocol.state import CheckpointSource, SnapshotPart, SnapshotSource
from tests.simulation.durable import MemoryPart
from tests.simulation.machines.building import Builder
from tests.simulation.machines.experts.moving import Mover
from tests.simulation.machines.host import WorkerHost
from tests.simulation.machines.saving import Saver
from tests.simulation.machines.training import SimReceipt
from tests.simulation.machines.transfer import Pusher
from tests.simulation.machines.unit import Consent

#: The number of micro-batches in one shadow step.
SHADOW_MICRO_BATCHES = 4


class SimEntrance:
    """Executes the tasks with which one worker enters a generation."""

    def __init__(self, worker: WorkerHost, builder: Builder, pusher: Pusher, saver: Saver, mover: Mover | None) -> None:
        self._worker = worker
        self._builder = builder
        self._pusher = pusher
        self._saver = saver
        self._mover = mover
        #: The agreement of the replica group before it adopts received state, or None for a single worker.
        self.consent: Consent | None = None
        #: The generation for which moving experts has failed.
        self._left_move = 0

    def leave_move(self, generation: int) -> None:
        """Do not try again to move the experts of this generation."""
        self._left_move = generation

    def enter(self, task: tasks.WarmUp | tasks.Load | tasks.Move | tasks.Receive | tasks.Enter) -> None:
        """Execute the current task as far as possible."""
        if isinstance(task, tasks.WarmUp):
            self._warm_up()
            return
        worker, generation = self._worker, task.plan.generation
        if isinstance(task, tasks.Move | tasks.Enter):
            self._pusher.begin(generation, task.send_to)
        if not self._builder.stands(generation):
            return
        match task:
            case tasks.Load() if worker.copier.active:
                pass  # The copier still reads the state that this load would overwrite.
            case tasks.Load():
                worker.busy = "load"
                worker.world.after("load", worker, self._loaded, task)
            case tasks.Move() if self._mover and self._left_move != generation and not worker.boundary("entering"):
                self._mover.move(task.plan)
            case tasks.Receive():
                self._receive(generation, self.consent if task.together else None)
            case tasks.Enter() if worker.experts is not None or not worker.boundary("entering"):
                self._entered()
            case _:
                pass

    def _warm_up(self) -> None:
        worker = self._worker
        if not worker.machine.warming.start():
            return
        worker.state, worker.whole = worker.world.garbage(), False
        worker.busy = "warm"
        worker.world.after("micro_batch", worker, self._warmed, worker.world.timeline.now, SHADOW_MICRO_BATCHES - 1)

    def _warmed(self, began: float, left: int) -> None:
        """Handle the end of a micro-batch of a shadow step."""
        worker, warming = self._worker, self._worker.machine.warming
        if worker.hung:
            return
        if left and warming.is_due:
            worker.world.after("micro_batch", worker, self._warmed, began, left - 1)
            return
        worker.busy = ""
        if warming.is_due:
            worker.world.cold_warm_ups -= 1
            why = "cold" if worker.world.cold_warm_ups >= 0 else ""
            worker.obey(warming.finish(worker.world.timeline.now - began, why))
        else:
            warming.interrupt()
        worker.advance()

    def _entered(self) -> None:
        worker = self._worker
        receipt, worker.receipt = worker.receipt, None
        entered = worker.machine.finish_entering
        worker.obey(entered() if receipt is None else entered(received_bytes=1, transfer_s=0.01))
        if not worker.boundary("entered"):
            worker.advance()

    def _receive(self, generation: int, consent: Consent | None) -> None:
        worker, receipt = self._worker, self._worker.receipt
        plan = worker.machine.plan
        if receipt is None or plan is None or receipt.generation != generation:
            return
        if not receipt.senders.issuperset(plan.senders(worker.id)) or not worker.machine.begin_adoption(generation):
            return
        if consent is not None and worker.machine.keeps:
            self._ask(consent, generation, agreed=lambda: self._adopt(receipt, None), withdrawn=self._unadopted)
        else:
            self._adopt(receipt, consent)

    def _ask(
        self, consent: Consent, generation: int, *, agreed: Callable[[], object], withdrawn: Callable[[], object]
    ) -> None:
        """Wait until all workers of the replica group have received their state."""
        machine = self._worker.machine
        consent.ask(
            adoption(generation),
            wanted=lambda: machine.is_adoption_wanted(generation),
            agreed=agreed,
            withdrawn=withdrawn,
        )

    def _unadopted(self) -> None:
        self._worker.obey(self._worker.machine.cancel_adoption())

    def _adopt(self, receipt: SimReceipt, consent: Consent | None) -> None:
        worker = self._worker
        worker.busy = "adopt"
        worker.state, worker.whole = worker.world.garbage(), False
        worker.world.after("adopt", worker, self._adopted, receipt, consent)
        worker.boundary("adopting")

    def _adopted(self, receipt: SimReceipt, consent: Consent | None) -> None:
        worker = self._worker
        if worker.hung:
            return
        worker.busy = ""
        worker.state, worker.whole = receipt.state, True
        instructions = worker.machine.finish_receive(receipt.passed, receipt.step)
        worker.checker.holds(worker)
        worker.obey(instructions)
        if consent is None:
            worker.advance()
        else:
            self._ask(consent, receipt.generation, agreed=worker.advance, withdrawn=lambda: None)

    def _loaded(self, task: tasks.Load) -> None:
        worker = self._worker
        if worker.busy != "load" or worker.hung:
            return
        generation = task.plan.generation
        found, kept = self._read(task.source, generation), self._read_experts(task)
        if found is None or kept is None:
            return  # It stays busy until a Halt.
        worker.busy, (step, state) = "", found
        if worker.machine.finish_load(generation, step):
            worker.state, worker.whole = state, True
            if self._mover is not None and kept:
                self._mover.take_up(kept)
            elif self._mover is not None:
                self._mover.load(step)
            self._saver.loaded(step, task.source)
            worker.checker.holds(worker)
        worker.advance()

    def _read(self, source: CheckpointSource | SnapshotSource, generation: int) -> tuple[int, int] | None:
        """Return the step and state of a checkpoint or snapshot, or report it as damaged and return None."""
        worker = self._worker
        if isinstance(source, SnapshotSource):
            place, places = worker.place, worker.places
            if source.everywhere:
                place, places = 0, 1
            numbers = range(place, source.dense, places)
            states = [self._read_part(source, number, generation) for number in numbers]
            complete = [state for state in states if state is not None]
            if len(complete) < len(states):
                return None
            if source.everywhere:
                return source.step, worker.world.relaid.under(tuple(complete), worker.places)[worker.place]
            return source.step, complete[0] if len(set(complete)) == 1 else worker.world.garbage()
        file = worker.world.checkpoints.files.get(source.name)
        if file is None or file.damaged:
            damaged = msg.CheckpointDamaged(worker=worker.id, generation=generation, name=source.name, why="cut short")
            worker.send(damaged)
            return None
        states = tuple(file.states[place] for place in range(file.places))
        return file.step, worker.world.relaid.under(states, worker.places)[worker.place]

    def _read_experts(self, task: tasks.Load) -> tuple[int, ...] | None:
        """Return the step of each stashed expert that this worker needs, or None if an expert is unavailable.

        Return () if the experts are not stored separately.
        """
        worker, source, plan = self._worker, task.source, task.plan.expert_plan
        if not isinstance(source, SnapshotSource) or not source.experts or plan is None or worker.experts is None:
            return ()
        shape = worker.experts.shape
        wanted = decode_experts(plan.placement[worker.machine.generations.rank], shape) > 0
        here = {place for place, keeper in enumerate(source.keepers) if keeper.node == worker.node}
        numbers = range(source.dense, len(source.parts))
        found = np.full(wanted.shape, -1, dtype=np.int64)
        for number in sorted(numbers, key=lambda number: here.isdisjoint(source.parts[number])):
            there = wanted & (found < 0) & (decode_experts(source.experts[number - source.dense], shape) > 0)
            part = self._find_part(source, number, task.plan.generation) if there.any() else None
            if part is not None:
                found = np.where(there, np.array(part.experts).reshape(wanted.shape), found)
        if (wanted & (found < 0)).any():
            self._complain(source.part(0), "", task.plan.generation)
            return None
        return tuple(int(step) for step in found.flat)

    def _read_part(self, source: SnapshotSource, number: int, generation: int) -> int | None:
        part = self._find_part(source, number, generation)
        return part.state if part is not None else None

    def _find_part(self, source: SnapshotSource, number: int, generation: int) -> MemoryPart | None:
        worker, snapshot = self._worker, source.part(number)
        keepers = [source.keepers[place] for place in source.parts[number]]
        for keeper in sorted(keepers, key=lambda keeper: keeper.node != worker.node):
            memory = worker.world.memory(keeper.node)
            part = memory.parts.get(snapshot)
            within_reach = memory.open and worker.world.data_plane.reaches(worker.node, {keeper.node})
            if part is not None and not part.damaged and (within_reach or keeper.node == worker.node):
                return part
            self._complain(snapshot, keeper.node, generation)
        return None

    def _complain(self, snapshot: SnapshotPart, node: str, generation: int) -> None:
        worker = self._worker
        worker.send(
            msg.SnapshotDamaged(worker=worker.id, generation=generation, snapshot=snapshot, node=node, why="of no use")
        )
