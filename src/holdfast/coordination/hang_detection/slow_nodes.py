"""Finds nodes that compute slower than the others, by a sequential test: fast if the difference is clear, never by
noise.

The test is a cumulative sum of log-likelihood ratios (Page 1954; Wald's test restarted at 0). It compares a node's pace
with the others' median: "as fast" against `SLOWER` times as long. The scatter of a report is measured: on quiet
machines one or two reports suffice, on shared machines many are needed. Waiting does not count, only the computing of
the workers themselves. If all nodes become slower at once, as with longer samples, no node counts as slow.

Pure: the same reports give the same findings.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from statistics import median
from types import MappingProxyType

#: A node counts as slow if it takes this many times as long as the others' median (Unicron 4.1).
SLOWER = 1.1
#: Half of that on a logarithmic scale: a slow node that falls below counts as fast again.
_HALF = math.log(SLOWER) / 2
#: The sum at which a node is found slow. By Wald's bound one report in e^14 (a million) starts such a run by chance.
THRESHOLD = 14.0
#: largest change of the sum by one report: a single bad moment does not suffice
MAX_CHANGE = THRESHOLD / 2
#: smallest scatter of the logarithm of the ratio
MIN_SCATTER = 0.015
#: prior of the scatter
PRIOR_SCATTER = 0.08
#: weight of that prior, in reports
PRIOR_REPORTS = 6
#: largest number of reports over which the scatter is averaged
MEMORY = 120
#: reports before a node can be found slow
MIN_REPORTS = 8


@dataclass(slots=True)
class _NodePace:
    """The pace of one node, and the sum of its test."""

    #: seconds of a micro-batch of its slowest worker, by the newest report
    seconds: float = 0.0
    #: logarithm of the newest ratio to the others' median
    log_ratio: float | None = None
    #: the cumulative sum
    total: float = 0.0
    #: mean square of the differences of successive logarithms, halved
    scatter: float = PRIOR_SCATTER**2
    #: number of reports
    reports: int = 0
    slow: bool = False
    #: mean ratio since the sum was last 0
    factor: float = 1.0
    #: number of reports in that mean
    run: int = 0

    def add_report(self, log_ratio: float) -> None:
        """Add a report: update the scatter, then the test's sum and its verdict `slow`.

        The node is slow once the sum reaches its threshold, and until it is 0 again. The first 8 reports cannot reach
        it.

        Args:
            log_ratio: the logarithm of the node's time relative to the others' median.
        """
        if self.log_ratio is not None:
            # A change from fast to slow is not scatter, so a difference counts as at most three times the known
            # scatter.
            apart = min(abs(log_ratio - self.log_ratio), 3.0 * math.sqrt(2.0 * self.scatter))
            self.reports += 1
            self.scatter += (apart**2 / 2.0 - self.scatter) / min(self.reports + PRIOR_REPORTS, MEMORY)
        self.log_ratio = log_ratio
        weight = 2.0 * _HALF / max(self.scatter, MIN_SCATTER**2) * (log_ratio - _HALF)
        self.total = max(0.0, min(THRESHOLD, self.total + max(-MAX_CHANGE, min(MAX_CHANGE, weight))))
        if self.reports < MIN_REPORTS:
            self.total = min(self.total, MAX_CHANGE)
        ratio = math.exp(log_ratio)
        self.run = self.run + 1 if self.total > 0.0 else 0
        self.factor += (ratio - self.factor) / max(1, self.run)
        self.slow = self.total > 0.0 if self.slow else self.total >= THRESHOLD


class SlowNodes:
    """The test for all members of one generation. Forgotten nodes are learned again."""

    def __init__(self) -> None:
        self._paces: dict[str, _NodePace] = {}

    def keep_nodes(self, nodes: Collection[str], known: Mapping[str, float] = MappingProxyType({})) -> None:
        """Forget the reports of all nodes that are not in `nodes`.

        Args:
            known: nodes that are known to be slow, with their factors. Nodes among them without reports count as slow
                until reports prove otherwise.
        """
        self._paces = {name: pace for name, pace in self._paces.items() if name in nodes}
        for name in known:
            if name in nodes and name not in self._paces:
                self._paces[name] = _NodePace(total=THRESHOLD, slow=True, factor=known[name], run=1)

    def forget_node(self, node: str) -> None:
        """Forget the reports of a node that was changed."""
        self._paces.pop(node, None)

    def on_report(self, node: str, computed: Mapping[str, tuple[int, float]]) -> None:
        """Compare a node's slowest worker with the median of the other nodes' newest reports, and update its test.

        Ignored if nothing was computed; with the first node, nothing can be compared.

        Args:
            node: its name
            computed: by worker, the micro-batches computed since the last report, and the seconds that they took
        """
        known = [seconds / count for count, seconds in computed.values() if count > 0 and seconds > 0.0]
        if not known:
            return
        pace = self._paces.setdefault(node, _NodePace())
        pace.seconds = max(known)
        others = [other.seconds for name, other in self._paces.items() if name != node and other.seconds > 0.0]
        if others:
            pace.add_report(math.log(pace.seconds / median(others)))

    @property
    def slow_nodes(self) -> dict[str, float]:
        """The slow nodes, with their times as multiples of the others' median."""
        return {name: pace.factor for name, pace in self._paces.items() if pace.slow}
