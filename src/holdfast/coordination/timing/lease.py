"""The lease of a node: how long it counts as alive after its last message, learned from the usual gaps between them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from holdfast.coordination.timing.times import FAILURE, FLOOR_S

#: the longest gap of the last one or two windows of this many seconds counts
WINDOW_S = 30.0


def least_lease_s(lease_s: float, beat_s: float) -> float:
    """Return the shortest lease for a node that sends a message at least every `beat_s` seconds."""
    return min(lease_s, FAILURE * beat_s + FLOOR_S)


@dataclass(slots=True)
class LearntLease:
    """The learned lease of one node. It is infinite until the first window is over."""

    #: when the newest message arrived that was counted, in seconds
    word: float
    #: when this window began
    began: float
    #: the longest gap in this window
    longest_s: float = 0.0
    #: the longest gap in the previous window
    before_s: float = math.inf

    @property
    def lasts_s(self) -> float:
        """The lease: three times the longest gap, and a little more."""
        return FAILURE * max(self.before_s, self.longest_s) + FLOOR_S

    def roll(self, now: float) -> None:
        """Start a new window."""
        self.before_s, self.longest_s, self.began = self.longest_s, 0.0, now
