"""A record of machines that failed and came back.

Axes: F failures.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from holdfast.errors import BadInputError
from holdfast.planning.special import BoolArray, FloatArray, IntArray, require_finite, require_positive

MOST_NODES = 10_000_000
MOST_HOURS = 1_000_000


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FailureTrace:
    """Failures of `nodes` machines, sorted by start. Arrays are (F,), hours from the start of the observation."""

    nodes: int
    span_hours: float
    node: IntArray
    start_hours: FloatArray
    end_hours: FloatArray
    #: False if the end of the observation cut the repair off; `end_hours` is then the end of the observation
    ended: BoolArray
    #: the line of the file at which each failure begins, for messages
    line: IntArray
    #: the rack of each node, by the node's number in `node`; empty if the racks are not known
    rack_of: IntArray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    #: the lines of failures that took down a whole rack, according to the file
    rack_lines: frozenset[int] = frozenset()
    #: when the observation began, unix seconds, or None if the file's clock does not say
    began_unix_s: float | None = None

    def __post_init__(self) -> None:
        """Raise `BadInputError` for fewer than 2 failures, numbers out of range, or fewer nodes than the trace names.

        The same holds for failures out of order, beyond the span, with an end before the start, or overlapping on one
        node.
        """
        if self.start_hours.size < 2:
            raise BadInputError(f"trace: has {self.start_hours.size} failures, and 2 are the least to fit anything")
        if not 1 <= self.nodes <= MOST_NODES:
            shown = str(self.nodes)
            shown = shown if len(shown) <= 20 else f"{shown[:20]}..."
            raise BadInputError(f"nodes = {shown}: must lie between 1 and {MOST_NODES:,}")
        require_positive("span_hours", self.span_hours)
        require_finite("span_hours", self.span_hours)
        if self.span_hours > MOST_HOURS:
            raise BadInputError(f"span_hours = {self.span_hours:g}: must be at most {MOST_HOURS:,} (114 years)")
        distinct = np.unique(self.node).size
        if distinct > self.nodes:
            raise BadInputError(f"nodes = {self.nodes}: the trace names {distinct} nodes, so it must be at least that")
        self._check(
            self.start_hours[1:] < self.start_hours[:-1], 1, "starts before the failure above it: sort by start"
        )
        self._check(self.end_hours < self.start_hours, 0, "ends before it starts")
        late = self.start_hours > self.span_hours
        self._check(late, 0, f"starts after the {self.span_hours:g} hours of observation: give more --hours")
        self._check_overlaps()

    def _check(self, wrong: BoolArray, offset: int, rule: str) -> None:
        """Raise `BadInputError` if any is `wrong`, with the rule and the line `offset` after the first such one."""
        if np.any(wrong):
            raise BadInputError(f"trace, line {self.line[int(np.argmax(wrong)) + offset]}: the failure {rule}")

    def _check_overlaps(self) -> None:
        """Raise `BadInputError` with both lines if a failure starts before the last one of its node has ended."""
        order = np.lexsort((self.start_hours, self.node))
        same = self.node[order][1:] == self.node[order][:-1]
        overlap = same & (self.start_hours[order][1:] < self.end_hours[order][:-1])
        if np.any(overlap):
            at = int(np.argmax(overlap))
            first, second = self.line[order[at]], self.line[order[at + 1]]
            raise BadInputError(
                f"trace, line {second}: the failure overlaps the repair of the same node from line {first}: "
                "correct it, or give --merge-overlaps to count both as one outage"
            )

    @property
    def repair_hours(self) -> FloatArray:
        """Lengths of the repairs that ended, in order of failure."""
        return (self.end_hours - self.start_hours)[self.ended]

    @property
    def in_repair_hours(self) -> FloatArray:
        """Hours that each failure was in repair within the observation, (F,)."""
        return np.minimum(self.end_hours, self.span_hours) - self.start_hours

    @property
    def open_repairs(self) -> int:
        """Number of repairs that had not ended."""
        return int((~self.ended).sum())

    @property
    def gap_hours(self) -> FloatArray:
        """Gaps between failures anywhere in the fleet, (F - 1,)."""
        return np.diff(self.start_hours)

    @property
    def node_hours_up(self) -> float:
        """Time in service of all nodes together."""
        return self.nodes * self.span_hours - float(self.in_repair_hours.sum())


def merged(
    node: IntArray, start: FloatArray, end: FloatArray, ended: BoolArray, line: IntArray
) -> tuple[IntArray, FloatArray, FloatArray, BoolArray, IntArray]:
    """Return the outages, (F,) each, sorted by start. Outages of one node that overlap are joined into one.

    It has the line of the first, and the end, and whether it ended, of the one that ends last.
    """
    order = np.lexsort((start, node))
    node, start, end, ended, line = node[order], start[order], end[order], ended[order], line[order]
    keep = np.ones(node.size, dtype=bool)
    end, ended = end.copy(), ended.copy()
    last = 0
    for i in range(1, node.size):
        if node[i] == node[last] and start[i] < end[last]:
            keep[i] = False
            if end[i] >= end[last]:
                end[last], ended[last] = end[i], ended[i]
        else:
            last = i
    kept = np.nonzero(keep)[0][np.argsort(start[keep], kind="stable")]
    return node[kept], start[kept], end[kept], ended[kept], line[kept]
