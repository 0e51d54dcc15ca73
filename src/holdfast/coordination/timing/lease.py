"""For how long a node counts as alive after its last word: learnt from how far apart its words usually are."""

from __future__ import annotations

import math
from dataclasses import dataclass

from holdfast.coordination.timing.times import FAILURE, FLOOR_S

#: the longest gap of the last one or two of these counts, in seconds
WINDOW_S = 30.0


def least_lease_s(lease_s: float, beat_s: float) -> float:
    """Return the shortest lease that is learnt, of a node that says a word every `beat_s` seconds at the least."""
    return min(lease_s, FAILURE * beat_s + FLOOR_S)


@dataclass(slots=True)
class LearntLease:
    """Of one node, looked at with every tick; times in seconds. Nothing is learnt before the first window is over.

    word: when the newest word came that was looked at. began: this window. longest_s: the longest gap in it;
    before_s: in the one before.
    """

    word: float
    began: float
    longest_s: float = 0.0
    before_s: float = math.inf

    @property
    def lasts_s(self) -> float:
        """Three times the longest gap, and a little more."""
        return FAILURE * max(self.before_s, self.longest_s) + FLOOR_S

    def roll(self, now: float) -> None:
        """A window is over."""
        self.before_s, self.longest_s, self.began = self.longest_s, 0.0, now
