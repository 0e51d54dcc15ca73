"""Monte Carlo simulation of trays, racks, spare trays and repairs: when is which block out of production.

Repair capacity is unlimited, so blocks only share the failures of their rack, and bursts if gaps between failures are
not exponential. All blocks of all replications can therefore be simulated at the same time: the outer loop runs over
the k-th failure of each block, and is as long as the longest list of failures of one block.

Axes: F failures, O outages, A both.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from holdfast.planner.reliability.distributions import Distribution, RateProfile
from holdfast.planner.reliability.sparing.block_mtbf import RepairChain
from holdfast.planning.special import BoolArray, FloatArray, IntArray


@dataclass(frozen=True, kw_only=True, slots=True)
class Fleet:
    """The blocks of one strategy, and how they fail. Hours."""

    zones: int
    blocks: int  # per zone
    trays: int  # per block
    spare_trays: int  # per block
    #: blocks that go down with one rack failure; 1 gives each block its own rack failures
    blocks_per_rack: int
    #: gaps between tray failures anywhere in the fleet, as if failed trays could fail again
    tray_failure_gaps: Distribution
    #: how the rate of tray failures varies over time, or None for a constant rate
    timeline: RateProfile | None
    mtbf_rack_hours: float
    repairs: Distribution
    repair_chain: RepairChain

    @property
    def all_blocks(self) -> int:
        """Blocks of all zones."""
        return self.zones * self.blocks


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FleetHistory:
    """The failures and outages of a simulation, unsorted.

    Replications count from 0, hours from the start of the warm-up.
    """

    # Failures of working trays, or of racks, in blocks that were up, (F,).
    fault_replication: IntArray
    fault_zone: IntArray
    fault_time: FloatArray
    #: uniform in 0..1, shared by the blocks of one rack failure: whether it hits a working block or an idle spare
    fault_mark: FloatArray
    # Blocks out of production, (O,). Blocks are numbered across all zones.
    outage_replication: IntArray
    outage_zone: IntArray
    outage_block: IntArray
    #: as `fault_mark`
    outage_mark: FloatArray
    outage_start: FloatArray
    outage_end: FloatArray


@dataclass(frozen=True, slots=True, eq=False)
class _Arrivals:
    """Failures by block, sorted by lane, then time; all (A,). A lane is one block in one replication.

    A lane's number is the replication, times the number of all blocks, plus the block.
    """

    lane: IntArray
    time: FloatArray
    from_rack: BoolArray
    tray: FloatArray  # which tray is struck, uniform in 0..1
    mark: FloatArray
    repair: FloatArray


def simulate_fleet(fleet: Fleet, rng: np.random.Generator, replications: int, hours: float) -> FleetHistory:
    """Return the faults and outages of `replications` independent fleets, all up at time 0, over `hours`.

    A block that loses its rack, or more trays than it has spares, leaves production. One repair restores all of it. In
    a running block, failed trays return together or one by one, according to the repair chain.
    """
    arrivals = _arrivals(fleet, rng, replications, hours)
    faulted, outage_end = _run_blocks(fleet, arrivals, replications * fleet.all_blocks)
    replication, block = np.divmod(arrivals.lane, fleet.all_blocks)
    zone, out = block // fleet.blocks, outage_end > 0
    return FleetHistory(
        fault_replication=replication[faulted],
        fault_zone=zone[faulted],
        fault_time=arrivals.time[faulted],
        fault_mark=arrivals.mark[faulted],
        outage_replication=replication[out],
        outage_zone=zone[out],
        outage_block=block[out],
        outage_mark=arrivals.mark[out],
        outage_start=arrivals.time[out],
        outage_end=outage_end[out],
    )


def _arrivals(fleet: Fleet, rng: np.random.Generator, replications: int, hours: float) -> _Arrivals:
    """Draw all failures of trays and racks, each with a repair time, and sort them by lane and time.

    A lane is one block in one replication. The failure of a rack becomes one arrival for each of its blocks, with a
    common time, mark and repair.
    """
    replication, time = _tray_failures(fleet, rng, replications, hours)
    trays = time.size
    lane = replication * fleet.all_blocks + rng.integers(fleet.all_blocks, size=trays)
    racks = fleet.all_blocks // fleet.blocks_per_rack
    count = int(rng.poisson(replications * racks * hours / fleet.mtbf_rack_hours))
    rack = rng.integers(replications * racks, size=count)
    shared = np.repeat(np.arange(count), fleet.blocks_per_rack)
    rack_lane = rack[shared] * fleet.blocks_per_rack + np.tile(np.arange(fleet.blocks_per_rack), count)
    every_lane = np.concatenate([lane, rack_lane])
    every_time = np.concatenate([time, rng.uniform(0.0, hours, count)[shared]])
    order = np.lexsort((every_time, every_lane))
    mark, repair = rng.random(trays + count), fleet.repairs.draw(rng, trays + count)
    source = np.concatenate([np.arange(trays), trays + shared])[order]
    return _Arrivals(
        every_lane[order], every_time[order], source >= trays, rng.random(order.size), mark[source], repair[source]
    )


def _tray_failures(
    fleet: Fleet, rng: np.random.Generator, replications: int, hours: float
) -> tuple[IntArray, FloatArray]:
    """Return (replication, time) of the tray failures before `hours`, times rising within each replication.

    Their rate varies with the fleet's timeline, if it has one.
    """
    if fleet.timeline is None:
        return _renewals(fleet.tray_failure_gaps, rng, replications, hours)
    # The profile shifts an event by at most one length of its observation.
    even = _renewals(fleet.tray_failure_gaps, rng, replications, hours + fleet.timeline.span_hours)
    time = fleet.timeline.warp(rng, *even)
    inside = time < hours
    return even[0][inside], time[inside]


def _renewals(
    gaps: Distribution, rng: np.random.Generator, replications: int, hours: float
) -> tuple[IntArray, FloatArray]:
    """Return (replication, time) of a renewal process per replication up to `hours`, times rising within each.

    It starts at 0 with a full gap.
    """
    expected = hours / gaps.mean
    batch = int(expected + 4.0 * expected**0.5) + 8
    time = np.cumsum(gaps.draw(rng, replications * batch).reshape(replications, batch), axis=1)
    while time[:, -1].min() < hours:
        more = np.cumsum(gaps.draw(rng, replications * batch).reshape(replications, batch), axis=1)
        time = np.concatenate([time, time[:, -1:] + more], axis=1)
    inside = time < hours
    return np.nonzero(inside)[0], time[inside]


def _run_blocks(fleet: Fleet, arrivals: _Arrivals, lanes: int) -> tuple[BoolArray, FloatArray]:
    """Return for each arrival whether it struck a working part, and the end of the outage that it caused (0: none)."""
    counts = np.bincount(arrivals.lane, minlength=lanes)
    # Sort lanes by falling number of arrivals, so that the lanes with a k-th arrival are a prefix.
    by_count = np.argsort(-counts, kind="stable")
    start, left = (np.cumsum(counts) - counts)[by_count], counts[by_count]
    state = _Blocks(fleet, lanes)
    faulted, outage_end = np.zeros(arrivals.time.size, dtype=bool), np.zeros(arrivals.time.size)
    for k in range(int(left.max(initial=0))):
        index = start[: int(np.searchsorted(-left, -k))] + k
        faulted[index], outage_end[index] = state.strike(
            arrivals.time[index], arrivals.from_rack[index], arrivals.tray[index], arrivals.repair[index]
        )
    return faulted, outage_end


class _Blocks:
    """The state of all lanes between arrivals."""

    def __init__(self, fleet: Fleet, lanes: int) -> None:
        """Start with all trays of all lanes up and all spares free. A lane is one block in one replication."""
        self._trays, self._spares = fleet.trays, fleet.spare_trays
        self._together = fleet.repair_chain is RepairChain.TOGETHER
        self._down_until = np.zeros(lanes)
        self._failed = np.zeros(lanes, dtype=np.int64)  # together: trays that wait for the visit under way
        # together: one slot, when the visit ends; individual: one slot per spare, when its tray is back
        self._back_at = np.zeros((lanes, 1 if self._together else max(1, fleet.spare_trays)))

    def strike(
        self, time: FloatArray, from_rack: BoolArray, tray: FloatArray, repair: FloatArray
    ) -> tuple[BoolArray, FloatArray]:
        """Apply one failure to each of the first `time.size` lanes.

        Return whether each struck a working part, and the end of the outage that it caused (0: none).
        """
        lanes = slice(time.size)
        down_until, back_at = self._down_until[lanes], self._back_at[lanes]
        if self._together:
            failed = self._failed[lanes]
            failed[back_at[:, 0] <= time] = 0
        else:
            failed = (back_at > time[:, None]).sum(axis=1)
        # Trays are in this order: failed trays, idle spares, working trays.
        hit = (down_until <= time) & (from_rack | (tray * self._trays >= failed))
        faulted = hit & (from_rack | (tray * self._trays >= self._spares))
        outage = hit & (from_rack | (failed == self._spares))
        down_until[outage] = (time + repair)[outage]
        self._note_failed_trays(lanes, hit & ~outage, time + repair)
        self._failed[lanes][outage] = 0
        back_at[outage] = 0.0
        return faulted, np.where(outage, time + repair, 0.0)

    def _note_failed_trays(self, lanes: slice, spared: BoolArray, repaired_at: FloatArray) -> None:
        """Record failed trays that a spare replaces (`spared`), and when the repair ends.

        With repairs together, the first failed tray of a lane sets the end, and later ones wait for the same visit.
        With individual repairs, each takes the slot of the spare that is back first.
        """
        back_at = self._back_at[lanes]
        if self._together:
            failed = self._failed[lanes]
            first = spared & (failed == 0)
            back_at[first, 0] = repaired_at[first]
            failed[spared] += 1
            return
        rows = np.nonzero(spared)[0]
        back_at[rows, np.argmin(back_at[rows], axis=1)] = repaired_at[rows]
