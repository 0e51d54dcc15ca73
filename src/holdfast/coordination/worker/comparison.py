"""Compares a worker with the other workers of its role, so that replicas do not diverge unnoticed.

Settings are compared in every step. A slice of the state is compared in the first steps of each generation, because a
worker that has joined may hold state that was not transferred to it.
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from holdfast.protocol.fingerprint import Fingerprint

#: the number of steps of a generation in which a slice of the state is compared
COMPARED_STEPS = 8


class ReplicaComparison:
    """The fingerprint that one worker compares in the step in progress."""

    def __init__(self) -> None:
        """Start without a fingerprint."""
        #: the fingerprint of the current attempt, or of the last one
        self.fingerprint: Fingerprint | None = None
        #: whether that attempt was refused because the workers differ
        self.differs = False
        self._first = 0
        self._received = False
        self._describe: Callable[[], tuple[str, ...]] = tuple

    def enter_generation(self, first: int) -> None:
        """Reset for a generation that begins with step `first`, which is the same for all members."""
        self._first, self.fingerprint, self.differs = first, None, False

    def record_received_state(self, step: int) -> None:
        """Record that this worker has received or loaded the state of a step."""
        self._received = True
        self.enter_generation(step + 1)

    def includes_state(self, step: int) -> bool:
        """Whether a slice of the state is compared at a step."""
        return self._first <= step < self._first + COMPARED_STEPS

    def set_fingerprint(self, fingerprint: Fingerprint, describe: Callable[[], tuple[str, ...]]) -> None:
        """Store the fingerprint that is compared in the reduction that begins now.

        Args:
            describe: Returns this worker's settings in words. It is called only if they are reported.
        """
        self.fingerprint, self.differs = replace(fingerprint, received=self._received), False
        self._describe = describe

    def reported_fingerprint(self, step: int) -> Fingerprint | None:
        """Return the fingerprint of the attempt at a step, with this worker's settings in words, or None if no attempt
        at this step reached the reduction.
        """
        if self.fingerprint is None or self.fingerprint.step != step:
            return None
        return replace(self.fingerprint, shown=self._describe())

    def record_agreement(self) -> None:
        """Record that all workers have the same fingerprint at this step."""
        if self.fingerprint is not None and self.fingerprint.state:
            self._received = False
