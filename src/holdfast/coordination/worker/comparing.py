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
        #: of the attempt at hand, or the last one
        self.fingerprint: Fingerprint | None = None
        #: the attempt at hand was refused because workers differ
        self.differs = False
        self._first = 0
        self._received = False
        self._describe: Callable[[], tuple[str, ...]] = tuple

    def enter(self, first: int) -> None:
        """A generation begins, with this step: the same for all its members."""
        self._first, self.fingerprint, self.differs = first, None, False

    def receive(self, step: int) -> None:
        """The state of a step has come from elsewhere."""
        self._received = True
        self.enter(step + 1)

    def includes_state(self, step: int) -> bool:
        """Whether a slice of the state is compared at a step."""
        return self._first <= step < self._first + COMPARED_STEPS

    def begin(self, fingerprint: Fingerprint, describe: Callable[[], tuple[str, ...]]) -> None:
        """A reduction begins, with this fingerprint, whose settings `describe` returns in words."""
        self.fingerprint, self.differs = replace(fingerprint, received=self._received), False
        self._describe = describe

    def reported_at(self, step: int) -> Fingerprint | None:
        """Return the fingerprint of an attempt at a step as it is reported, or None if no attempt came that far."""
        if self.fingerprint is None or self.fingerprint.step != step:
            return None
        return replace(self.fingerprint, shown=self._describe())

    def agree(self) -> None:
        """All workers have the same fingerprint at this step."""
        if self.fingerprint is not None and self.fingerprint.state:
            self._received = False
