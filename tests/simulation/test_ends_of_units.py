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
def test_a_place_that_comes_once_the_job_is_done_is_told_so_and_has_not_failed(number: int) -> None:
    """The other worker of its replica group had already ended, so the node had no local rank for this worker."""
    assert failure(SimCluster(plan_of(number))) == ""


@pytest.mark.parametrize("number", [29_020_774_046])
def test_who_has_left_its_place_and_hangs_does_not_keep_a_job_from_ending(number: int) -> None:
    """A worker of a moved node hung; the job was done, but its agent waited forever for that worker."""
    assert failure(SimCluster(plan_of(number))) == ""


@pytest.mark.parametrize("number", [29_390_130_611])
def test_a_place_that_ends_before_it_has_come_takes_with_it_those_that_have(number: int) -> None:
    """The others of its replica group were members of the first generation without a process, so no step ran."""
    assert failure(SimCluster(plan_of(number))) == ""


@pytest.mark.parametrize("number", [29_690_597_637])
def test_of_two_standbys_the_one_begins_that_has_a_whole_initial_state(number: int) -> None:
    """The warmed standby came first and was rejected without a state; the other began only at the next message."""
    assert failure(SimCluster(plan_of(number))) == ""


@pytest.mark.parametrize("number", [29_601_609_920])
def test_who_is_cut_off_goes_once_it_was_put_together_with_two_others(number: int) -> None:
    """Two of three nodes have room for all experts; the checker allowed time for only one group with the node."""
    assert failure(SimCluster(plan_of(number))) == ""


@pytest.mark.parametrize("number", [29_420_769_474])
def test_a_node_that_alone_has_the_initial_state_goes_if_no_other_reaches_it(number: int) -> None:
    """The other nodes joined it in turn, each without the state, so no step ran."""
    assert failure(SimCluster(plan_of(number))) == ""


@pytest.mark.parametrize("number", [35_408_446_219, 35_833_355_198])
def test_a_replica_group_that_is_not_in_the_last_plan_changes_nothing(number: int) -> None:
    """Its other worker also raised, and the report arrived after the plan of the workers that save."""
    assert failure(SimCluster(plan_of(number))) == ""


@pytest.mark.parametrize("seed", [11, 17, 41])
def test_what_the_journal_has_lost_with_its_machine_is_not_held_against_the_next_coordinator(seed: int) -> None:
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


def test_what_is_asked_while_the_store_is_slow_and_refused_as_the_job_has_ended_is_refused() -> None:
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
