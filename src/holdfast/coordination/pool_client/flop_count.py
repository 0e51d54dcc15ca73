"""Computes the training FLOP of a sample from the counts of workers, if the user has not declared it."""

from __future__ import annotations

from holdfast.coordination.config import CoordinatorConfig
from holdfast.coordination.transaction import Transaction
from holdfast.protocol.events import FlopCounted
from holdfast.protocol.messages.worker import FlopTally


class FlopBook:
    """Adds up the counts of all workers that should count.

    A worker that cannot count sends nothing; then the sum stays unknown.
    """

    def __init__(self, transaction: Transaction, config: CoordinatorConfig) -> None:
        self._transaction = transaction
        self._output = config.spec.output
        #: counts of one round, by worker
        self._tallies: dict[str, FlopTally] = {}

    @property
    def per_sample(self) -> float:
        """Training FLOP of a sample, declared or counted; 0 if unknown."""
        return self._output.flop_per_sample or self._transaction.record.flop_per_sample

    @property
    def event_fields(self) -> dict[str, float]:
        """Fields about FLOP in the event of a coordinator's start."""
        return {"flop_per_sample": self.per_sample, "peak_flop_per_s": self._output.peak_flop_per_s}

    def on_tally(self, tally: FlopTally) -> None:
        """Handle the count of a member; with the last one of a step, record and emit the FLOP per sample.

        Ignored if that is known, or from another generation or a worker that must not count.
        """
        transaction = self._transaction
        plan = transaction.record.plan
        if self.per_sample or plan is None:
            return
        if tally.generation != plan.generation or not plan.is_counting(tally.worker):
            return
        of_round = {
            worker: other
            for worker, other in self._tallies.items()
            if (other.generation, other.step) == (tally.generation, tally.step)
        }
        self._tallies = {**of_round, tally.worker: tally}
        if not all(worker in self._tallies for worker in plan.workers if plan.is_counting(worker)):
            return
        samples = sum(one.samples for one in self._tallies.values())
        flop = sum(one.flop for one in self._tallies.values())
        self._tallies = {}
        if samples and flop:
            transaction.change(flop_per_sample=flop / samples)
            transaction.emit(FlopCounted, step=tally.step, flop_per_sample=flop / samples)
