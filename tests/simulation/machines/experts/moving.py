"""A simulated worker's experts in its training thread: moves, training and load reports."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from holdfast.coordination.experts.blobs import decode_experts
from holdfast.coordination.experts.worker_experts import HeldExperts
from holdfast.errors import JobFailedError
from holdfast.planning import plan_transfers
from holdfast.planning.arrays import IntArray
from holdfast.protocol.messages import any_side as msg
from tests.simulation.machines.experts.stored import LOADS_EVERY, StoredExperts, drifting_loads, pool
from tests.simulation.machines.host import WorkerHost
from tests.simulation.machines.transfer import Carrier


class Mover:
    """Moves experts in memory as the worker's machine orders; reports missing experts to the checker."""

    def __init__(self, worker: WorkerHost, stored: StoredExperts, holding: HeldExperts) -> None:
        self._worker = worker
        self._stored = stored
        self._holding = holding
        self.carrier = Carrier(worker)

    def move(self, plan: msg.GenerationPlan) -> None:
        """Apply a placement; the training thread waits for the experts that it must fetch."""
        worker, stored = self._worker, self._stored
        try:
            change = worker.machine.begin_move()
        except JobFailedError:
            worker.raised()
            return
        if change is None:
            return
        if not stored.keep(change.keep):
            worker.checker.lacks_experts(worker, plan, "an expert that this worker must keep is missing")
        served = [decode_experts(blob, stored.shape) for blob in change.serving]
        if not np.sum(served, axis=0).all():
            worker.checker.lacks_experts(worker, plan, "some experts are not served by any worker")
        stored.serving = served[worker.machine.generations.rank]
        if change.during_step:
            self._set_out(plan, served)
            return
        if not change.fetch:
            self.moved(stored.steps)
            return
        # Step 0, because workers that still wait for their state do not know its step.
        worker.issue("move", stored.steps, pool, step=0)
        worker.boundary("moving")

    def _set_out(self, plan: msg.GenerationPlan, served: list[IntArray]) -> None:
        """Send and await the experts that move during the first step."""
        worker, experts = self._worker, plan.expert_plan
        assert experts is not None
        wanted = [decode_experts(blob, self._stored.shape) for blob in experts.placement]
        transfers, lost = plan_transfers(np.stack(served, axis=2), np.stack(wanted, axis=2))
        if lost:
            worker.checker.lacks_experts(worker, plan, f"no worker has the experts {lost}")
        coming: dict[str, IntArray] = {}
        targets: dict[str, None] = {}
        for layer, expert, source, to in transfers.as_tuples():
            if plan.workers[to] == worker.id:
                counts = coming.setdefault(plan.workers[source], np.zeros_like(served[0]))
                counts[layer, expert] = 1
            if plan.workers[source] == worker.id:
                targets[plan.workers[to]] = None
        self._stored.expect(plan.generation, coming)
        self.carrier.begin(plan.generation, tuple(targets))
        if not worker.boundary("moving") and worker.machine.end_move(plan.generation) and not worker.boundary("moved"):
            worker.advance()

    def brings(self, then: Callable[[Any], None], value: Any) -> bool:
        """Return whether all experts moving during the step have arrived; if not, call `then` later."""
        worker, generation = self._worker, self._worker.machine.generation
        if self._stored.awaits(generation):
            worker.busy = "bring"
            worker.world.after("retry", worker, self._look_again, generation, then, value)
            return False
        if not self._holding.is_complete and not worker.machine.frozen:
            worker.obey(worker.machine.finish_background_transfer(received_bytes=1, transfer_s=0.01))
        return True

    def _look_again(self, generation: int, then: Callable[[Any], None], value: Any) -> None:
        worker = self._worker
        if worker.busy == "bring" and worker.machine.generation == generation and not worker.hung:
            worker.busy = ""
            then(value)

    def moved(self, offers: tuple[int, ...]) -> None:
        """Fetch experts after all members have offered theirs."""
        worker, plan = self._worker, self._worker.machine.plan
        assert plan is not None
        if not self._stored.fetch(offers, self._holding.placed):
            worker.checker.lacks_experts(worker, plan, "no member had an expert that this worker needs")
        if worker.machine.end_move(plan.generation) and not worker.boundary("moved"):
            worker.advance()

    def load(self, step: int) -> None:
        """Load the experts from the checkpoint of a step."""
        self._stored.load(self._holding.placed, step)

    def take_up(self, steps: tuple[int, ...]) -> None:
        """Restore the experts from the stash; `steps` has the step of each."""
        self._stored.take_up(self._holding.placed, steps)

    def apply(self, plan: msg.GenerationPlan, step: int) -> None:
        """Train the experts for one step."""
        if not self._stored.apply(self._holding.placed, step):
            self._worker.checker.lacks_experts(
                self._worker, plan, f"some experts do not have the state before step {step}"
            )
        self._stored.serving = self._holding.placed

    def send_loads(self) -> None:
        """Send the experts' loads every few steps."""
        worker, machine = self._worker, self._worker.machine
        step = machine.applied or 0
        if step % LOADS_EVERY == 0 and machine.generations.rank == 0:
            rng = worker.world.rng
            worker.send(drifting_loads(self._stored.shape, worker.id, machine.generation, step, rng))
