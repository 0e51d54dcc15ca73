"""Monte Carlo simulation of one synchronous job on a simulated fleet: blocking, rollbacks, checkpoints.

Axes: N replications, E events, F failures of the replication with most failures.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from holdfast.planner.reliability.monte_carlo.fleet import FleetHistory
from holdfast.planner.reliability.sparing.recovery import SECONDS_PER_HOUR, Checkpoint
from holdfast.planning.checkpointing import FailureClock
from holdfast.planning.special import BoolArray, FloatArray, IntArray, as_floats


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class JobHistory:
    """Hours of the job within its window, one value per replication, (N,)."""

    blocked: FloatArray
    useful: FloatArray


@dataclass(frozen=True, slots=True, eq=False)
class _Timeline:
    """All events in order of (replication, time); all (E,). A fault comes before the outage it causes."""

    replication: IntArray
    zone: IntArray
    time: FloatArray
    down_change: IntArray  # blocks that leave (+1) or return (-1); 0 for a fault
    mark: FloatArray


def simulate_job(
    history: FleetHistory,
    checkpoint: Checkpoint,
    *,
    zones: int,
    blocks: int,
    spare_blocks: int,
    replications: int,
    warmup_hours: float,
    hours: float,
) -> JobHistory:
    """Return blocked hours, and useful hours that reached a checkpoint, of each replication after the warm-up.

    While any zone has more than `spare_blocks` blocks out, the job is blocked and its own clock stops. A fault
    interrupts the job only if it strikes a working block. Of a zone's L blocks, L - R work, drawn with equal
    probability from the blocks that are up.
    """
    end = warmup_hours + hours
    line = _timeline(history, end)
    down = _blocks_down(line, zones)
    blocked_after = np.any(down > spare_blocks, axis=0)
    window = np.clip(line.time, warmup_hours, end) - warmup_hours
    duration = np.append(np.diff(window), 0.0)
    # A difference across replications has no meaning, but then no block is down.
    blocked_time = np.where(blocked_after, duration, 0.0)
    blocked = as_floats(np.bincount(line.replication, weights=blocked_time, minlength=replications))
    before = np.cumsum(blocked_time) - blocked_time - (np.cumsum(blocked) - blocked)[line.replication]
    up = blocks - down[line.zone, np.arange(line.zone.size)]
    strikes = (line.down_change == 0) & (line.time >= warmup_hours) & (line.time < end) & ~blocked_after
    strikes &= line.mark * up < blocks - spare_blocks
    faults = _padded(line.replication[strikes], (window - before)[strikes], replications)
    return JobHistory(blocked=blocked, useful=useful_time(faults, hours - blocked, checkpoint))


def _timeline(history: FleetHistory, end: float) -> _Timeline:
    """Return all faults, starts and ends of outages of blocks, sorted by replication and time.

    Starts count +1, ends -1, faults 0. Outages that last beyond `end` hours end there.
    """
    faults, outages = history.fault_time.size, history.outage_start.size
    replication = np.concatenate([history.fault_replication, np.tile(history.outage_replication, 2)])
    zone = np.concatenate([history.fault_zone, np.tile(history.outage_zone, 2)])
    # Let every outage end by `end`, so that each replication starts with all blocks up.
    time = np.concatenate([history.fault_time, history.outage_start, np.minimum(history.outage_end, end)])
    change = np.repeat(np.array([0, 1, -1]), [faults, outages, outages])
    mark = np.concatenate([history.fault_mark, np.zeros(2 * outages)])
    order = np.argsort(replication * (end + 1.0) + time, kind="stable")
    return _Timeline(replication[order], zone[order], time[order], change[order], mark[order])


def _blocks_down(line: _Timeline, zones: int) -> IntArray:
    """Return the blocks of each zone that are down after each event, (zones, E)."""
    return np.stack([np.cumsum(np.where(line.zone == zone, line.down_change, 0)) for zone in range(zones)])


def _padded(replication: IntArray, time: FloatArray, replications: int) -> FloatArray:
    """Return the faults' times as (most faults of a replication, replications). Each column rises, and ends with
    infinity.

    `replication` and `time` belong to each fault, sorted by both.
    """
    counts = np.bincount(replication, minlength=replications)
    rank = np.arange(time.size) - (np.cumsum(counts) - counts)[replication]
    padded = np.full((int(counts.max(initial=0)), replications), np.inf)
    padded[rank, replication] = time
    return padded


def useful_time(faults: FloatArray, available: FloatArray, checkpoint: Checkpoint) -> FloatArray:
    """Return the hours of work that reached a checkpoint, (N,).

    Args:
        faults: hours of unblocked time at which working parts fail, (F, N), rising, padded with infinity.
        available: total hours of unblocked time, (N,).
        checkpoint: plain numbers. With a frozen clock, failures during saving, detection and restart have no effect.
    """
    period, save, detect, restart = (
        float(as_floats(seconds)) / SECONDS_PER_HOUR
        for seconds in (
            checkpoint.period_seconds,
            checkpoint.save_seconds,
            checkpoint.detect_seconds,
            checkpoint.restart_seconds,
        )
    )
    frozen = checkpoint.clock is FailureClock.FROZEN
    ready, useful = np.zeros_like(available), np.zeros_like(available)
    for fault in faults:
        worked = fault - ready
        periods = np.floor(worked / (period + save))
        interrupts: BoolArray = fault < available
        if frozen:
            with np.errstate(invalid="ignore"):
                interrupts &= (worked >= 0.0) & (worked - periods * (period + save) < period)
        useful += np.where(interrupts, np.maximum(periods, 0.0) * period, 0.0)
        ready = np.where(interrupts, fault + detect + restart, ready)
    return useful + np.maximum(np.floor((available - ready) / (period + save)), 0.0) * period
