"""Complaints of one worker about failed collectives, after it has checked which members it cannot reach."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.coordination.worker.generations import KnownGenerations
from holdfast.protocol.messages.worker import Complaint


class Complaints:
    """Builds a worker's complaints and records for which generations a check of reachability is running."""

    def __init__(self, worker: str, generations: KnownGenerations) -> None:
        """Start without complaints of the worker with this id."""
        self._worker = worker
        self._generations = generations
        #: the generations in which a wait timed out, while reachability is checked
        self._checked_generations: set[int] = set()

    @property
    def is_checking(self) -> bool:
        """Whether a check of reachability is running."""
        return bool(self._checked_generations)

    def clear_checks(self) -> None:
        """Drop the running checks when another generation is entered: they explain nothing there."""
        self._checked_generations.clear()

    def start_check(self, generation: int) -> bool:
        """Record that a wait in `generation` timed out; return whether to check which members are unreachable.

        False for a generation that is neither current nor pending.
        """
        if not self._generations.is_current_or_pending(generation):
            return False
        self._checked_generations.add(generation)
        return True

    def make_complaint(
        self,
        generation: int,
        detail: str,
        *,
        timed_out: bool,
        unreachable: Sequence[str],
        transfer_peers: Sequence[str] = (),
    ) -> tuple[Complaint | None, bool]:
        """Return the complaint about a failure, and whether a check of reachability preceded it, which then ends.

        The complaint is None if the worker has left `generation` and no check was running.
        """
        looked = generation in self._checked_generations
        self._checked_generations.discard(generation)
        if not looked and not self._generations.is_current_or_pending(generation):
            return None, False
        complaint = Complaint(
            worker=self._worker,
            generation=generation,
            detail=detail[:1024],
            timed_out=timed_out,
            unreachable=tuple(unreachable),
            transfer_peers=tuple(transfer_peers),
        )
        return complaint, looked
