"""Which nodes compute slower than the others, by a sequential test: soon where it is plain, never for a moment's noise.

A cumulative sum of log-likelihood ratios (Page 1954; Wald's test begun anew at 0) of a node's pace against the others'
median, between "as fast" and `SLOWER` times as long. How much one word scatters is measured: where machines are quiet a
word or two tell, where they are shared many are needed. Waiting is in none of it, only what workers compute themselves;
and what makes all slower at once (longer samples) is nobody's slowness. Pure: the same words give the same findings.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from statistics import median
from types import MappingProxyType

#: A node counts as slow where it takes so many times as long as the others' median (Unicron 4.1),
SLOWER = 1.1
#: and as fast again where it takes no more than half way there; between the two nothing changes.
_HALF = math.log(SLOWER) / 2
#: The sum at which it is found. By Wald's bound one word in e^14 (a million) begins such a run by chance.
FOUND = 14.0
#: no single word says it all: where others have more to say than so many times their share, a moment was bad
MOST_AT_ONCE = FOUND / 2
#: Scatter of the logarithm of the ratio: at the least; what is assumed first, as if so many words had said it; over how
#: many words it is learnt at the most; and how many there must be before anybody is judged.
LEAST_SCATTER, FIRST_SCATTER, FIRST_WORDS, MEMORY, LEAST_WORDS = 0.015, 0.08, 6, 120, 8


@dataclass(slots=True)
class _Pace:
    """What is known of one node."""

    #: of its slowest worker, seconds for a micro-batch, by the newest word
    seconds: float = 0.0
    #: the logarithm of the newest ratio to the others' median
    log_ratio: float | None = None
    #: the cumulative sum
    total: float = 0.0
    #: how far ratios lie from each other: mean square of differences of logarithms, halved
    scatter: float = FIRST_SCATTER**2
    words: int = 0
    slow: bool = False
    #: the mean ratio since the sum was 0 last, and how many words that is made of
    factor: float = 1.0
    run: int = 0

    def learn(self, log_ratio: float) -> None:
        """Take in how far a word lies from the one before, and what it says."""
        if self.log_ratio is not None:
            # (a step from fast to slow is no scatter: nothing beyond three times what is known)
            apart = min(abs(log_ratio - self.log_ratio), 3.0 * math.sqrt(2.0 * self.scatter))
            self.words += 1
            self.scatter += (apart**2 / 2.0 - self.scatter) / min(self.words + FIRST_WORDS, MEMORY)
        self.log_ratio = log_ratio
        weight = 2.0 * _HALF / max(self.scatter, LEAST_SCATTER**2) * (log_ratio - _HALF)
        self.total = max(0.0, min(FOUND, self.total + max(-MOST_AT_ONCE, min(MOST_AT_ONCE, weight))))
        if self.words < LEAST_WORDS:
            self.total = min(self.total, MOST_AT_ONCE)
        ratio = math.exp(log_ratio)
        self.run = self.run + 1 if self.total > 0.0 else 0
        self.factor += (ratio - self.factor) / max(1, self.run)
        self.slow = self.total > 0.0 if self.slow else self.total >= FOUND


class SlowNodes:
    """Of one generation's members; what is forgotten is learnt again."""

    def __init__(self) -> None:
        self._paces: dict[str, _Pace] = {}

    def follow(self, nodes: Collection[str], known: Mapping[str, float] = MappingProxyType({})) -> None:
        """Forget all other nodes; those `known` to be slow, by which factor, are so until they show otherwise."""
        self._paces = {name: pace for name, pace in self._paces.items() if name in nodes}
        for name in known:
            if name in nodes and name not in self._paces:
                self._paces[name] = _Pace(total=FOUND, slow=True, factor=known[name], run=1)

    def begin_anew(self, node: str) -> None:
        """Something about a node was changed: what it took before says nothing."""
        self._paces.pop(node, None)

    def told(self, node: str, words: Mapping[str, tuple[int, float]]) -> None:
        """A node says how many micro-batches each of its workers has computed since its last word, in which seconds."""
        known = [seconds / count for count, seconds in words.values() if count > 0 and seconds > 0.0]
        if not known:
            return
        pace = self._paces.setdefault(node, _Pace())
        pace.seconds = max(known)
        others = [other.seconds for name, other in self._paces.items() if name != node and other.seconds > 0.0]
        if others:
            pace.learn(math.log(pace.seconds / median(others)))

    @property
    def found(self) -> dict[str, float]:
        """The nodes that are slow, each with as how many times as long as the others' median it takes."""
        return {name: pace.factor for name, pace in self._paces.items() if pace.slow}
