"""Outages of a pool's nodes: losses, returns, and failures of a process on a node that stays up. Drawn, or recorded.

Trace a of Unicron's evaluation: 8 weeks, 10 lost nodes and 33 other failures. A node returns after 1 to 7 days
(uniform). Trace b: 7 days, 26 and 80. Only these counts are printed. Times are uniform over the trace, like the
times of a Poisson process with a known number of events. A failure strikes a node drawn uniformly from the nodes that
are up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from holdfast.errors import BadInputError
from holdfast.planning.availability import NodeEvent

DAY_S = 86400.0
#: longest trace: a century
MOST_S = 36525 * DAY_S
OutageKind = Literal["lost", "back", "fault"]
#: random numbers for each failure, uniform in 0..1; all simulated systems use the same ones
MARKS = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Outage:
    """A node is lost, returns, or a process on it fails ("fault")."""

    #: seconds from the start of the trace
    at: float
    node: str
    what: OutageKind
    #: random numbers, uniform in 0..1, for the costs of a failure
    marks: tuple[float, ...] = (0.5,) * MARKS


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetTrace:
    """The initial nodes of a pool, and its outages in order."""

    name: str
    #: nodes that are up at second 0
    nodes: tuple[str, ...]
    outages: tuple[Outage, ...]
    #: length of the trace
    seconds: float

    @property
    def most_nodes(self) -> int:
        """The largest number of nodes that are up at one time, including the start."""
        there, most = set(self.nodes), len(self.nodes)
        for outage in self.outages:
            if outage.what == "back":
                there.add(outage.node)
            elif outage.what == "lost":
                there.discard(outage.node)
            most = max(most, len(there))
        return most

    def count(self, what: OutageKind) -> int:
        """Return how many outages are of this kind."""
        return sum(outage.what == what for outage in self.outages)


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceDrawing:
    """Parameters of a random trace of node failures and repairs."""

    name: str
    seconds: float
    #: number of lost nodes
    lost: int
    #: number of failures of a process on a node that stays up
    faults: int
    #: shortest and longest time until a lost node returns
    repair_s: tuple[float, float]


TRACE_A = TraceDrawing(name="trace a", seconds=56 * DAY_S, lost=10, faults=33, repair_s=(DAY_S, 7 * DAY_S))
#: The repair times of trace b are not printed. ASSUMED: a node returns after 0.5 to 1.5 times the mean time between
#: losses, so that as many nodes return as are lost ("a stable resource pool").
_GAP_S = 7 * DAY_S / 26
TRACE_B = TraceDrawing(name="trace b", seconds=7 * DAY_S, lost=26, faults=80, repair_s=(0.5 * _GAP_S, 1.5 * _GAP_S))


def scale_drawing(drawing: TraceDrawing, nodes: int, of: int = 16) -> TraceDrawing:
    """Return the parameters for another number of nodes, each of which fails as often as before."""
    return replace(drawing, lost=drawing.lost * nodes // of, faults=drawing.faults * nodes // of)


def make_node_names(nodes: int) -> tuple[str, ...]:
    """Return the names of this many nodes."""
    return tuple(f"n{number:04d}" for number in range(1, nodes + 1))


def draw_trace(drawing: TraceDrawing, nodes: int, seed: int) -> FleetTrace:
    """Draw a trace: losses and faults at uniform times, each on a random node that is up, and a return after each loss.

    A failure while no node is up, and a return after the end, are left out.
    """
    rng = np.random.default_rng([seed, drawing.lost, drawing.faults])
    times = rng.uniform(0.0, drawing.seconds, drawing.lost + drawing.faults)
    loses = np.arange(times.size) < drawing.lost
    names = make_node_names(nodes)
    back: dict[str, float] = {}
    outages: list[Outage] = []
    for at in np.argsort(times, kind="stable"):
        now, chance = float(times[at]), rng.random(MARKS + 2).tolist()
        there = [name for name in names if back.get(name, 0.0) <= now]
        if not there:
            continue
        node = there[int(chance[0] * len(there))]
        outages.append(Outage(at=now, node=node, what="lost" if loses[at] else "fault", marks=tuple(chance[2:])))
        if loses[at]:
            least, most = drawing.repair_s
            back[node] = now + least + chance[1] * (most - least)
            if back[node] <= drawing.seconds:
                outages.append(Outage(at=back[node], node=node, what="back"))
    outages.sort(key=lambda outage: outage.at)
    return FleetTrace(name=drawing.name, nodes=names, outages=tuple(outages), seconds=drawing.seconds)


def make_trace(
    name: str, events: Sequence[NodeEvent], *, nodes: int, end: float | None = None, seed: int = 0
) -> FleetTrace:
    """Return a trace from rows `add`, `remove`, and `fault` (a process fails, the node stays up).

    Rows up to 0 s give the nodes that are up at the start. Rows from `end` on are left out.

    Args:
        nodes: size of the cluster, which limits how many nodes can be up.
        end: length of the trace in seconds, by default the time of the last row.
        seed: seed of the random marks of the outages.

    Raises:
        BadInputError: too many nodes are up in a row, no node is up at 0 s, or the length is not positive or too large.
            The message gives the line.
    """
    there_now = set[str]()
    for event in events:
        if not event.fault:
            (there_now.add if event.add else there_now.discard)(event.node)
        if len(there_now) > nodes:
            raise BadInputError(f"line {event.line}: {event.node} would be node {nodes + 1}: the cluster has {nodes}")
    last = events[-1]
    seconds = last.seconds if end is None else end
    if seconds <= 0:
        raise BadInputError(f"line {last.line}: the trace ends at {last.seconds:g} s, when it begins: give --hours")
    if not seconds <= MOST_S:
        raise BadInputError(f"line {last.line}: {seconds:g} s are too long for a trace: at most {MOST_S:g} s")
    first = [event for event in events if event.seconds <= 0]
    present = {event.node: event.add for event in first if not event.fault}
    there = tuple(node for node, here in present.items() if here)
    if not there:
        raise BadInputError(f"line {events[0].line}: no node is there at 0 s: begin with rows of 0,add,NODE")
    rng = np.random.default_rng([seed, len(events)])
    outages = tuple(
        Outage(at=event.seconds, node=event.node, what=_kind_of(event), marks=tuple(rng.random(MARKS).tolist()))
        for event in events
        if 0 < event.seconds < seconds
    )
    return FleetTrace(name=name, nodes=there, outages=outages, seconds=seconds)


def _kind_of(event: NodeEvent) -> OutageKind:
    return "fault" if event.fault else "back" if event.add else "lost"
