"""The coordinator chooses when to save: all members save after the same step, and the save may fail."""

from __future__ import annotations

from dataclasses import replace

import pytest

from holdfast.protocol import events as ev
from holdfast.protocol.checkpoints.names import parse_name
from tests.simulation.cluster import SimCluster
from tests.simulation.faults.plans import Fault, FaultKind, FaultPlan
from tests.simulation.schedules.enumeration import plan_of
from tests.simulation.schedules.shrinking import failure

PLAN = FaultPlan(seed=11, nodes=4, start_nodes=4, steps=60, checkpoint_every=1, saves_in_time=True, start_spread=0.0)


def run(plan: FaultPlan) -> SimCluster:
    cluster = SimCluster(plan)
    assert cluster.run().exit_code == 0
    return cluster


def saved(cluster: SimCluster) -> list[int]:
    return [event.step for event in cluster.world.journal.events if isinstance(event, ev.CheckpointSaved)]


def periods(cluster: SimCluster) -> set[float]:
    saved_periods = (event.period_s for event in cluster.world.journal.events if isinstance(event, ev.CheckpointSaved))
    return {round(period, 3) for period in saved_periods if period is not None}


def test_every_checkpoint_but_the_last_is_complete() -> None:
    for seed in range(5):
        cluster = run(replace(PLAN, seed=seed))
        steps = saved(cluster)
        assert 3 <= len(steps) < 30, f"seed {seed}: the saves do not follow the time interval: {steps}"
        files = sorted(cluster.world.checkpoints.files.items(), key=lambda item: parse_name(item[0]))
        complete = [file.sealed and len(file.parts) == 4 for _, file in files]
        assert all(complete[:-1]), f"seed {seed}: a checkpoint before the last one is incomplete"


def test_saves_continue_under_a_new_coordinator() -> None:
    crash = Fault(kind=FaultKind.CRASH_COORDINATOR, time=0.9, duration=0.2)
    for seed in range(5):
        cluster = run(replace(PLAN, seed=seed, faults=(crash,)))
        record = cluster.world.store.record
        assert record is not None
        assert record.term == 2
        assert record.saving.saves == len(saved(cluster)) >= 3, "the new coordinator lost the number of saves"


def test_a_checkpoint_interrupted_by_a_failure_never_counts() -> None:
    for seed in range(5):
        kills = tuple(Fault(kind=FaultKind.KILL_WORKER, time=0.7 + 0.4 * n, target=n) for n in range(3))
        cluster = run(replace(PLAN, seed=seed, faults=kills))
        assert len(saved(cluster)) >= 3
        newest = max(parse_name(name) for name in cluster.world.checkpoints.files)
        assert cluster.world.checkpoints.files[newest.folder].sealed, f"seed {seed}"


def test_rollbacks_are_counted_as_losses() -> None:
    lost = tuple(Fault(kind=FaultKind.KILL_WORKER, time=1.5, target=n) for n in range(4))
    cluster = run(replace(PLAN, faults=lost))
    back = [event for event in cluster.world.journal.events if isinstance(event, ev.RolledBack)]
    record = cluster.world.store.record
    assert record is not None
    assert record.saving.losses == len(back) == 1
    assert periods(cluster)


@pytest.mark.parametrize("in_time", [True, False])
def test_a_node_with_a_slow_disk_only_makes_checkpoints_less_frequent(*, in_time: bool) -> None:
    for seed in range(5):
        slow = Fault(kind=FaultKind.SLOW_DISK, time=0.5, target=seed, duration=4.0)
        plan = replace(PLAN, seed=seed, saves_in_time=in_time, steps=120, faults=(slow,))
        cluster = run(plan)
        events, files = cluster.world.journal.events, cluster.world.checkpoints.files
        assert not [event for event in events if isinstance(event, ev.CheckpointFailed)]
        begun = sorted(files.items(), key=lambda item: parse_name(item[0]))
        assert all(file.sealed and len(file.parts) == 4 for _, file in begun[:-1]), f"seed {seed}: {files}"
        saves = [event for event in events if isinstance(event, ev.CheckpointSaved)]
        longest = max(saves, key=lambda event: event.left_out)
        assert longest.left_out >= 3, f"seed {seed}: {saves}"
        assert [event for event in events if isinstance(event, ev.CheckpointDelayed)], f"seed {seed}"


@pytest.mark.parametrize("seed", [15118906747])
def test_one_that_was_removed_counts_for_no_later_coordinator(seed: int) -> None:
    """The checkpoint was sealed late, removed because a newer one existed, and reported to the next coordinator."""
    assert not failure(SimCluster(plan_of(seed))), f"python -m tests.simulation replay {seed}"
