"""A simulated worker's experts, as its training thread sees them: they move, are trained, and tell of their loads."""

from __future__ import annotations

from holdfast.coordination.experts.holding import HeldExperts
from holdfast.errors import JobFailedError
from holdfast.protocol.messages import any_side as msg
from holdfast.simulation.machines.experts import LOADS_EVERY, StoredExperts, drifting_loads, pool
from holdfast.simulation.machines.host import WorkerHost


class Mover:
    """Keeps the experts in memory where the worker's machine says they are; the checker hears where that fails."""

    def __init__(self, worker: WorkerHost, stored: StoredExperts, holding: HeldExperts) -> None:
        self._worker = worker
        self._stored = stored
        self._holding = holding

    def move(self, plan: msg.GenerationPlan) -> None:
        """Take up a placement; where experts travel, the training thread waits for them."""
        worker, stored = self._worker, self._stored
        try:
            change = worker.machine.moving()
        except JobFailedError:
            worker.raised()
            return
        if change is None:
            return
        if not stored.keep(change.keep):
            worker.checker.lacks_experts(worker, plan, "what is to stay is not here")
        if not change.bring:
            self.moved(plan, stored.steps)
            return
        worker.issue("move", stored.steps, pool, step=0)  # those whose state still comes do not know of which it is
        worker.boundary("moving")

    def moved(self, plan: msg.GenerationPlan, offers: tuple[int, ...]) -> None:
        """All have offered what they have."""
        worker = self._worker
        if not self._stored.fetch(offers, self._holding.placed):
            worker.checker.lacks_experts(worker, plan, "nobody had what is wanted here")
        if worker.machine.moved(plan.generation) and not worker.boundary("moved"):
            worker.advance()

    def load(self, step: int) -> None:
        """Take them from the checkpoint of a step."""
        self._stored.load(self._holding.placed, step)

    def apply(self, plan: msg.GenerationPlan, step: int) -> None:
        """Train them by one step."""
        if not self._stored.apply(self._holding.placed, step):
            self._worker.checker.lacks_experts(self._worker, plan, f"not all are of the step before {step}")

    def tell_loads(self) -> None:
        """Tell now and then how much each had to do."""
        worker, machine = self._worker, self._worker.machine
        step = machine.applied or 0
        if step % LOADS_EVERY == 0 and machine.generations.rank == 0:
            rng = worker.world.rng
            worker.tell(drifting_loads(self._stored.shape, worker.id, machine.generation, step, rng))
