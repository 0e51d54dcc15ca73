"""What a worker compares with the others of its role, and when.

Settings are compared in every step. A slice of the state is compared in the first steps of each generation: a worker
that has joined may keep something outside the state that was sent to it, and then trains on to another state.
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from holdfast.protocol.fingerprint import Fingerprint

#: steps of a generation in which a slice of the state is compared
COMPARED_STEPS = 8


class ReplicaComparison:
    """One worker's fingerprint of the step in progress."""

    def __init__(self) -> None:
        """Compare nothing yet."""
        #: that of the attempt in progress, or of the last one
        self.fingerprint: Fingerprint | None = None
        #: whether that attempt was refused because workers differ
        self.differs = False
        self._first = 0
        self._received = False
        self._describe: Callable[[], tuple[str, ...]] = tuple

    def enter(self, first: int) -> None:
        """Start again for a generation that begins with this step, which is the same for all its members."""
        self._first, self.fingerprint, self.differs = first, None, False

    def receive(self, step: int) -> None:
        """Record that this worker has received or loaded the state of a step."""
        self._received = True
        self.enter(step + 1)

    def includes_state(self, step: int) -> bool:
        """Whether a slice of the state is compared at a step."""
        return self._first <= step < self._first + COMPARED_STEPS

    def begin(self, fingerprint: Fingerprint, describe: Callable[[], tuple[str, ...]]) -> None:
        """Take the fingerprint with which a reduction begins.

        Args:
            describe: returns its settings in words; called only if it is reported.
        """
        self.fingerprint, self.differs = replace(fingerprint, received=self._received), False
        self._describe = describe

    def reported_at(self, step: int) -> Fingerprint | None:
        """Return the fingerprint of the attempt at a step, for a report, or None if no attempt came that far."""
        if self.fingerprint is None or self.fingerprint.step != step:
            return None
        return replace(self.fingerprint, shown=self._describe())

    def agree(self) -> None:
        """Record that all workers have the same fingerprint at this step."""
        if self.fingerprint is not None and self.fingerprint.state:
            self._received = False
