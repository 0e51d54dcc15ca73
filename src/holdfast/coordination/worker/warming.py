"""Warm-up of a standby: shadow steps that overwrite its own state, which no job uses."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.coordination.worker.copy import StateCopy
from holdfast.coordination.worker.generations import KnownGenerations
from holdfast.coordination.worker.tasks import SendToCoordinator, WorkerInstruction
from holdfast.protocol.messages.orders import Warm
from holdfast.protocol.messages.worker import Warmed

if TYPE_CHECKING:
    from holdfast.coordination.experts.worker_experts import HeldExperts

_ERROR_CHARACTERS = 1024


class Warming:
    """The warm-up of one worker. Orders that concern it as a member take precedence and interrupt it."""

    def __init__(
        self, worker: str, generations: KnownGenerations, copy: StateCopy, holding: HeldExperts | None
    ) -> None:
        """Start without an order to warm up. `worker` is the worker's id."""
        #: whether the training thread runs shadow steps; until they end, nothing else may write to the state
        self.is_running = False
        self._worker = worker
        self._generations = generations
        self._copy = copy
        self._holding = holding
        self._wanted = False

    @property
    def is_due(self) -> bool:
        """Whether shadow steps should start or go on."""
        known = self._generations
        return self._wanted and not known.frozen and known.plan is None and known.pending is None

    def on_warm(self, order: Warm) -> list[WorkerInstruction]:
        """Record that this worker should warm up: shadow steps are then due (`is_due`). Always returns an empty list.

        Ignored if the order is of an old term, or if the worker is in a generation.
        """
        if order.term >= self._generations.term and self._generations.plan is None:
            self._generations.term, self._wanted = order.term, True
        return []

    def start(self) -> bool:
        """Mark this worker's state and experts as void before the first shadow step; return False if warm-up is no
        longer due.

        No job starts from a void state, and no report counts it.
        """
        if not self.is_due:
            return False
        self._copy.mark_void()
        if self._holding is not None:
            self._holding.mark_overwritten()
        self.is_running = True
        return True

    def interrupt(self) -> None:
        """Record that the shadow steps were interrupted. They start again if the worker stays a standby."""
        self.is_running = False

    def finish(self, seconds: float, error: str = "") -> list[WorkerInstruction]:
        """Report that all shadow steps took `seconds`, or that one failed with `error`."""
        self.is_running = self._wanted = False
        return [SendToCoordinator(Warmed(worker=self._worker, seconds=seconds, error=error[:_ERROR_CHARACTERS]))]
