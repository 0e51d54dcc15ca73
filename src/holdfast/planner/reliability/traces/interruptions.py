"""How often a job on all nodes of a trace would have been interrupted, by single nodes and by whole racks.

Axes: F failures, G groups of failures.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from holdfast.planner.reliability.traces.trace import FailureTrace
from holdfast.planning.special import IntArray

#: Failures of nodes of one rack that start within this time, in hours, are one failure of the rack.
TOGETHER_HOURS = 60.0 / 3600.0
#: Failures that start at the same time count as one only if they are this many times as frequent as by chance.
CHANCE_FACTOR = 10.0

#: The resolution of a trace's clock is the largest of these that divides all its times.
CLOCK_UNITS_S = (86_400.0, 3_600.0, 60.0, 1.0)

#: How failures of racks were distinguished from failures of nodes.
RackEvidence = Literal["none", "given", "scope", "rack", "simultaneous"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Interruptions:
    """The interruptions of a trace, by cause."""

    #: failures of single nodes
    nodes: float
    #: failures of whole racks; each counts once, regardless of its number of nodes
    racks: float
    evidence: RackEvidence

    @property
    def total(self) -> float:
        """All interruptions."""
        return self.nodes + self.racks

    @property
    def rack_share(self) -> float:
        """Share of interruptions that took down a whole rack."""
        return self.racks / self.total


def count_interruptions(trace: FailureTrace, rack_share: float | None = None) -> Interruptions:
    """Return the interruptions of nodes and of whole racks in a trace, and the evidence for the racks.

    The first that applies decides: `rack_share`, a column with each failure's scope, racks of which several nodes
    failed together, or more failures at exactly the same time than by chance. Else each failure is that of a single
    node.

    Args:
        rack_share: share of interruptions that took down a whole rack, if the user gives it.
    """
    failures = trace.start_hours.size
    if rack_share is not None:
        return Interruptions(nodes=failures * (1.0 - rack_share), racks=failures * rack_share, evidence="given")
    if trace.rack_lines:
        racks = int(np.isin(trace.line, np.fromiter(trace.rack_lines, dtype=np.int64)).sum())
        return Interruptions(nodes=failures - racks, racks=racks, evidence="scope")
    if trace.rack_of.size:
        groups = _groups(trace, trace.rack_of[trace.node], TOGETHER_HOURS)
        return _by_groups(groups, "rack")
    groups = _groups(trace, np.zeros(failures, dtype=np.int64), 0.0)
    if (groups > 1).sum() > CHANCE_FACTOR * max(1.0, _expected_coincidences(trace)):
        return _by_groups(groups, "simultaneous")
    return Interruptions(nodes=failures, racks=0, evidence="none")


def _by_groups(groups: IntArray, evidence: RackEvidence) -> Interruptions:
    """Count each group of more than one failure as a rack's, and each other as a node's. `groups` has their sizes.

    Without such a group, the evidence is "none".
    """
    racks = int((groups > 1).sum())
    found = racks > 0
    return Interruptions(nodes=groups.size - racks, racks=racks, evidence=evidence if found else "none")


def _groups(trace: FailureTrace, domain: IntArray, within_hours: float) -> IntArray:
    """Return the sizes (G,) of groups of failures that start together in one domain.

    Each failure starts at most `within_hours` after the one before it. A group contains a node once: if the node fails
    again, that is another failure.
    """
    order = np.lexsort((trace.start_hours, domain))
    start, domain, node = trace.start_hours[order], domain[order], trace.node[order]
    sizes, members = list[int](), set[int]()
    for place in range(start.size):
        joins = place > 0 and domain[place] == domain[place - 1] and start[place] - start[place - 1] <= within_hours
        if joins and int(node[place]) not in members:
            sizes[-1] += 1
            members.add(int(node[place]))
        else:
            sizes.append(1)
            members = {int(node[place])}
    return np.array(sizes, dtype=np.int64)


def _expected_coincidences(trace: FailureTrace) -> float:
    """Return how many pairs of failures start at the same time by chance, at the trace's resolution.

    That is the coarsest of `CLOCK_UNITS_S` (day to second) that divides the time from the first failure to each other.
    If none does, the result is 0.
    """
    seconds = 3600.0 * (trace.start_hours - trace.start_hours[0])
    fits = (unit for unit in CLOCK_UNITS_S if np.abs(seconds - unit * np.rint(seconds / unit)).max() < 1e-3)
    resolution_hours = next(fits, 0.0) / 3600.0
    return trace.start_hours.size**2 * resolution_hours / (2.0 * trace.span_hours)
