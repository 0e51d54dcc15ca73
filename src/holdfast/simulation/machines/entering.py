"""How a simulated worker's training thread enters a generation: it loads, moves experts, receives state, and is in."""

from __future__ import annotations

from holdfast.coordination.worker import tasks
from holdfast.protocol.messages import any_side as msg
from holdfast.simulation.machines.building import Builder
from holdfast.simulation.machines.host import WorkerHost
from holdfast.simulation.machines.moving import Mover
from holdfast.simulation.machines.saving import Saver
from holdfast.simulation.machines.transfer import Pusher


class SimEntrance:
    """Leads one worker into the generations that its machine has tasks of."""

    def __init__(self, worker: WorkerHost, builder: Builder, pusher: Pusher, saver: Saver, mover: Mover | None) -> None:
        self._worker = worker
        self._builder = builder
        self._pusher = pusher
        self._saver = saver
        self._mover = mover
        #: the generation whose experts are not moved any more: that has failed
        self._left_move = 0

    def leave_move(self, generation: int) -> None:
        """The experts of a generation could not be moved: do not try again."""
        self._left_move = generation

    def enter(self, task: tasks.Load | tasks.Move | tasks.Receive | tasks.Enter) -> None:
        """Do what is to be done now, as far as it goes."""
        worker, generation = self._worker, task.plan.generation
        if isinstance(task, tasks.Move | tasks.Enter):
            self._pusher.begin(generation, task.send_to)
        if not self._builder.stands(generation):
            return
        match task:
            case tasks.Load():
                worker.busy = "load"
                worker.world.after("load", worker, self._loaded, task)
            case tasks.Move() if self._mover and self._left_move != generation and not worker.boundary("entering"):
                self._mover.move(task.plan)
            case tasks.Receive():
                self._receive(generation)
            case tasks.Enter() if worker.experts is not None or not worker.boundary("entering"):
                self._entered()
            case _:
                pass

    def _entered(self) -> None:
        worker = self._worker
        receipt, worker.receipt = worker.receipt, None
        entered = worker.machine.entered
        worker.obey(entered() if receipt is None else entered(received_bytes=1, transfer_s=0.01))
        if not worker.boundary("entered"):
            worker.advance()

    def _receive(self, generation: int) -> None:
        worker, receipt = self._worker, self._worker.receipt
        if receipt is None or receipt.generation != generation:
            return
        if worker.machine.received(generation, receipt.passed, receipt.step):
            worker.state, worker.whole = receipt.state, True
            worker.checker.holds(worker)
            worker.advance()

    def _loaded(self, task: tasks.Load) -> None:
        worker = self._worker
        if worker.busy != "load" or worker.hung:
            return
        generation = task.plan.generation
        file = worker.world.checkpoints.files.get(task.checkpoint)
        if file is None or file.damaged:
            name = task.checkpoint
            worker.tell(msg.CheckpointDamaged(worker=worker.id, generation=generation, name=name, why="cut short"))
            return  # busy until a Halt comes
        worker.busy = ""
        if worker.machine.loaded(generation, file.step):
            worker.state, worker.whole = file.state, True
            if self._mover is not None:
                self._mover.load(file.step)
            self._saver.loaded(file.step)
            worker.checker.holds(worker)
        worker.advance()
