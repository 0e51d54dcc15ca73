"""What evaluations came to: told once for each step, whoever tells it, and how often."""

from __future__ import annotations

import math

from holdfast.coordination.transaction import Transaction
from holdfast.protocol.events import Evaluated
from holdfast.protocol.messages.worker import EvaluationDone
from holdfast.protocol.record import MAX_EVALUATIONS


class EvaluationBook:
    """Tells of evaluations of members; messages of others never get here."""

    def __init__(self, transaction: Transaction) -> None:
        self._transaction = transaction

    def take(self, message: EvaluationDone) -> None:
        """Tell what is news in a member's message, unless it is of a lineage that was left."""
        transaction, record = self._transaction, self._transaction.record
        if not record.lineage <= message.generation <= record.generation:
            return
        told = dict(record.evaluated)
        news = [result for result in message.results if result.step > told.get(result.name, 0)]
        for result in sorted(news, key=lambda one: (one.step, one.name)):
            told.pop(result.name, None)  # the names that are reported longest ago come first
            told[result.name] = result.step
            metrics = {key: value if math.isfinite(value) else None for key, value in result.metrics.items()}
            transaction.emit(Evaluated, name=result.name, step=result.step, samples=result.samples, metrics=metrics)
        if news:
            transaction.change(evaluated=dict(list(told.items())[-MAX_EVALUATIONS:]))

    def rolled_back(self, step: int) -> None:
        """What comes after `step` is evaluated once more."""
        evaluated = self._transaction.record.evaluated
        if any(newest > step for newest in evaluated.values()):
            self._transaction.change(evaluated={name: min(newest, step) for name, newest in evaluated.items()})
