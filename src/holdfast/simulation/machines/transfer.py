"""Simulated state on its way from a member that has it to one that lacks it: takes time, can be torn."""

from __future__ import annotations

from holdfast.simulation.machines.host import WorkerHost
from holdfast.simulation.machines.training import SimReceipt


class Pusher:
    """The transfers that a worker sends."""

    def __init__(self, worker: WorkerHost) -> None:
        self._worker = worker
        self._generation = 0
        self._open: set[str] = set()
        self._attempt = 0
        self._late_at = 0.0

    @property
    def active(self) -> bool:
        """True while somebody is still owed the state that is here: it must not change."""
        return bool(self._open)

    def begin(self, generation: int, targets: tuple[str, ...]) -> None:
        """Start to push to all targets, unless that has begun."""
        if generation == self._generation:
            return
        self._generation = generation
        self._late_at = self._worker.world.timeline.now + self._worker.world.timing.operation_timeout_s
        self._open = set(targets)
        for target in targets:
            self._try(target, self._attempt)

    def abort(self) -> None:
        """Leave all transfers as they are: torn."""
        self._attempt += 1
        self._open.clear()

    def _try(self, target: str, attempt: int) -> None:
        worker, world = self._worker, self._worker.world
        if attempt != self._attempt:
            return
        peer = world.worker(target)
        if peer is None:
            if world.rng.random() < 0.5:
                worker.obey(worker.machine.complain(self._generation, f"{target} cannot be reached"))
            return
        busy = peer.stopped or peer.copier.active or peer.machine.warming.under_way
        if busy or not world.reaches(worker.id, target) or not peer.machine.pushed(self._generation):
            self._again(target, attempt)
            return
        if not peer.machine.keeps:
            peer.whole, peer.state = False, world.garbage()
        peer.advance()  # it may have entered the pending generation just now
        if not peer.boundary("receiving") and not worker.boundary("sending"):
            world.after("transfer", worker, self._arrived, target, attempt, worker.state, worker.machine.applied)

    def _again(self, target: str, attempt: int) -> None:
        """Nothing gets through: try again, but not for ever."""
        worker, world = self._worker, self._worker.world
        if world.timeline.now < self._late_at:
            world.after("retry", worker, self._try, target, attempt)
        else:
            why, parted = f"{target} does not take the state in time", not world.reaches(worker.id, target)
            fault = worker.machine.complain(
                self._generation, why, timed_out=True, unreachable=[target] if parted else []
            )
            worker.obey(fault)

    def _arrived(self, target: str, attempt: int, state: int, step: int) -> None:
        worker, world = self._worker, self._worker.world
        peer = world.worker(target)
        if attempt != self._attempt:
            return
        if peer is None or peer.stopped or not world.reaches(worker.id, target):
            self._try(target, attempt)
            return
        if world.rng.random() < 0.05:  # the checksum does not fit: once more
            self._try(target, attempt)
            return
        self._open.discard(target)
        before, senders = peer.receipt, frozenset((worker.id,))
        if before is not None and before.generation == self._generation:
            if (before.step, before.state) != (step, state):  # (others have sent parts of another state)
                worker.obey(worker.machine.complain(self._generation, f"{target} refuses the state of step {step}"))
                return
            senders |= before.senders
        peer.receipt = SimReceipt(self._generation, step, worker.machine.history, state, senders)
        peer.advance()
        worker.advance()
