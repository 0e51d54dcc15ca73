"""Results of evaluations: each is reported once per step, even if several members or messages report it."""

from __future__ import annotations

import math

from holdfast.coordination.transaction import Transaction
from holdfast.protocol.events import Evaluated
from holdfast.protocol.messages.worker import EvaluationDone
from holdfast.protocol.record import MAX_EVALUATIONS


class EvaluationBook:
    """Emits the results of members. The caller filters out messages of other workers."""

    def __init__(self, transaction: Transaction) -> None:
        self._transaction = transaction

    def on_evaluation_done(self, message: EvaluationDone) -> None:
        """Emit the results in a member's message that are newer than the reported ones of the same name, and record
        their steps.

        Non-finite metrics become None. Messages of an abandoned lineage are ignored.
        """
        transaction, record = self._transaction, self._transaction.record
        if not record.lineage <= message.generation <= record.generation:
            return
        reported = dict(record.evaluated)
        news = [result for result in message.results if result.step > reported.get(result.name, 0)]
        for result in sorted(news, key=lambda one: (one.step, one.name)):
            reported.pop(result.name, None)  # The names that were reported longest ago stay first.
            reported[result.name] = result.step
            metrics = {key: value if math.isfinite(value) else None for key, value in result.metrics.items()}
            transaction.emit(Evaluated, name=result.name, step=result.step, samples=result.samples, metrics=metrics)
        if news:
            transaction.change(evaluated=dict(list(reported.items())[-MAX_EVALUATIONS:]))

    def on_rollback(self, step: int) -> None:
        """Allow the evaluations after `step` to be reported a second time."""
        evaluated = self._transaction.record.evaluated
        if any(newest > step for newest in evaluated.values()):
            self._transaction.change(evaluated={name: min(newest, step) for name, newest in evaluated.items()})
