"""Nodes that fail and return: the outages of the fleet of `reliability`, in order, one replication after the other."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from holdfast.planner.fleet.case import FleetCase
from holdfast.planner.reliability.distributions import Distribution, Exponential, Scaled, Weibull
from holdfast.planner.reliability.monte_carlo.estimate import SimulationSettings, in_turns, warmup_of
from holdfast.planner.reliability.monte_carlo.fleet import Fleet, FleetHistory, simulate_fleet
from holdfast.planner.reliability.sparing.block_mtbf import RepairChain
from holdfast.planner.reliability.sparing.recovery import SECONDS_PER_HOUR
from holdfast.planning.special import FloatArray, IntArray


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """Nodes of a simulated fleet that fail or return at one moment."""

    #: seconds from the start of the course
    time: float
    nodes: tuple[int, ...]
    fails: bool
    #: a random number, uniform in 0..1, that decides whether a failure hits members
    mark: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Course:
    """One replication: the nodes that are away at its start, and the changes after that."""

    #: length of the course
    seconds: float
    #: nodes that are away at second 0
    away: frozenset[int]
    changes: tuple[Change, ...]


def make_fleet(case: FleetCase) -> Fleet:
    """Return the nodes and standbys of a case as blocks of one tray each.

    It is filled up to whole racks. The additional nodes raise the failure rate, and callers leave them out.
    """
    racks = math.ceil(case.all_nodes / case.rack_nodes)
    blocks = racks * case.rack_nodes
    return Fleet(
        zones=1,
        blocks=blocks,
        trays=1,
        spare_trays=0,
        blocks_per_rack=case.rack_nodes,
        tray_failure_gaps=_make_distribution(case.failure_shape, case.mtbf_hours / blocks),
        timeline=None,
        mtbf_rack_hours=case.mtbf_rack_hours or math.inf,
        repairs=_make_distribution(case.repair_shape, case.mttr_hours),
        repair_chain=RepairChain.TOGETHER,
    )


def simulate_courses(case: FleetCase, settings: SimulationSettings) -> Iterator[Course]:
    """Yield one course for each replication, after a warm-up. Outages of nodes beyond the case's number are left out.

    Raises:
        BadInputError: there are too many failures to simulate.
    """
    fleet = make_fleet(case)
    warmup = warmup_of(fleet, settings)
    for rng, size in in_turns(fleet, settings, warmup):
        history = simulate_fleet(fleet, rng, size, warmup + settings.hours)
        order = np.argsort(history.outage_replication, kind="stable")
        ends = np.searchsorted(history.outage_replication[order], np.arange(1, size + 1))
        for one in np.split(order, ends[:-1]):
            yield _make_course(case, history, one[history.outage_block[one] < case.all_nodes], warmup, settings.hours)


def _make_distribution(shape: float, mean: float) -> Distribution:
    return Exponential(mean) if shape == 1.0 else Scaled(shape=Weibull(shape=shape, scale=1.0), mean=mean)


def _make_course(case: FleetCase, history: FleetHistory, index: IntArray, warmup: float, hours: float) -> Course:
    """Make a course from the outages at `index`. Second 0 is the end of the warm-up; nodes that are down then are away.

    At the same moment, failures come before returns.
    """
    block, mark = history.outage_block[index], history.outage_mark[index]
    start, end = ((times[index] - warmup) * SECONDS_PER_HOUR for times in (history.outage_start, history.outage_end))
    seconds = hours * SECONDS_PER_HOUR
    changes = [
        *_find_changes(block, start, mark, seconds, fails=True),
        *_find_changes(block, end, mark, seconds, fails=False),
    ]
    changes.sort(key=lambda change: (change.time, not change.fails))
    return Course(seconds=seconds, away=frozenset(block[(start < 0) & (end > 0)].tolist()), changes=tuple(changes))


def _find_changes(
    block: IntArray, time: FloatArray, mark: FloatArray, until: float, *, fails: bool
) -> Iterator[Change]:
    """Yield the changes of the nodes `block` `(M,)` at `time` `(M,)`, in order, from second 0 to below `until`.

    Nodes that fail or return at the same moment, as those of a rack, are one change, with the `mark` of the first.
    """
    inside = np.nonzero((time >= 0) & (time < until))[0]
    inside = inside[np.argsort(time[inside], kind="stable")]
    rows = zip(time[inside].tolist(), block[inside].tolist(), mark[inside].tolist(), strict=True)
    for moment, together in groupby(rows, key=lambda row: row[0]):
        nodes = list(together)
        yield Change(time=moment, nodes=tuple(row[1] for row in nodes), fails=fails, mark=nodes[0][2])
