"""Schedules that once failed: workers of a replica group end, before the job starts or at its end.

Other schedules test the standbys that replace ended workers.
"""

from __future__ import annotations

import pytest

from tests.simulation.cluster import SimCluster
from tests.simulation.faults.plans import Fault, FaultKind, FaultPlan
from tests.simulation.schedules.enumeration import plan_of
from tests.simulation.schedules.shrinking import failure


@pytest.mark.parametrize("number", [29_512_259_961, 29_767_106_753, 29_239_959_974, 29_022_851_189])
def test_a_worker_that_attaches_to_a_finished_job_receives_the_end(number: int) -> None:
    """The other worker of its replica group had already ended, so the node had no local rank for this worker."""
    assert failure(SimCluster(plan_of(number))) == ""


@pytest.mark.parametrize("number", [29_020_774_046])
def test_a_hung_worker_of_a_moved_node_does_not_keep_the_job_from_ending(number: int) -> None:
    """A worker of a moved node hung; the job was done, but its agent waited forever for that worker."""
    assert failure(SimCluster(plan_of(number))) == ""


@pytest.mark.parametrize("number", [29_390_130_611])
def test_a_worker_that_ends_before_it_attaches_ends_its_replica_group(number: int) -> None:
    """The others of its replica group were members of the first generation without a process, so no step ran."""
    assert failure(SimCluster(plan_of(number))) == ""


@pytest.mark.parametrize("number", [29_690_597_637])
def test_the_standby_with_a_whole_initial_state_begins(number: int) -> None:
    """The warmed standby came first and was rejected without a state; the other began only at the next message."""
    assert failure(SimCluster(plan_of(number))) == ""


@pytest.mark.parametrize("number", [29_601_609_920])
def test_a_disconnected_node_is_removed_after_groups_with_two_others(number: int) -> None:
    """Two of three nodes have room for all experts; the checker allowed time for only one group with the node."""
    assert failure(SimCluster(plan_of(number))) == ""


@pytest.mark.parametrize("number", [29_420_769_474])
def test_an_unreachable_node_with_the_only_initial_state_is_removed(number: int) -> None:
    """The other nodes joined it in turn, each without the state, so no step ran."""
    assert failure(SimCluster(plan_of(number))) == ""


@pytest.mark.parametrize("number", [35_408_446_219, 35_833_355_198])
def test_a_report_of_a_replica_group_outside_the_last_plan_is_ignored(number: int) -> None:
    """Its other worker also raised, and the report arrived after the plan of the workers that save."""
    assert failure(SimCluster(plan_of(number))) == ""


@pytest.mark.parametrize("seed", [11, 17, 41])
def test_a_failure_that_a_power_cut_removed_from_the_journal_is_not_awaited(seed: int) -> None:
    """The next coordinator knew the ended processes but not the failure of their node.

    The checker required a wait for that node.
    """
    hangs = Fault(kind=FaultKind.HANG, boundary="entering", target=1, duration=0.8)
    plan = FaultPlan(
        seed=seed,
        steps=2,
        workers_per_node=4,
        places=2,
        micro_batches=4,
        crashes_after_strike=(4,),
        power_cuts=True,
        on_loss="wait",
        witnesses=0,
        faults=(hangs,),
    )
    assert failure(SimCluster(plan)) == ""


def test_a_request_to_an_ended_job_during_a_slow_write_is_refused() -> None:
    """The request waited in the shell, and its refusal was not handled there."""
    faults = (
        Fault(kind=FaultKind.STOP_NODE, target=1, duration=1.5, boundary="reduced", step=3),
        Fault(kind=FaultKind.SLOW_STORE, duration=1.5, boundary="adopting", step=3),
        Fault(kind=FaultKind.DRAIN, time=3.1830834142913713, target=1),
    )
    plan = FaultPlan(
        seed=195,
        steps=3,
        workers_per_node=4,
        places=2,
        micro_batches=1,
        snapshot_every=1,
        witnesses=2,
        stops_at=4,
        faults=faults,
    )
    assert failure(SimCluster(plan)) == ""
