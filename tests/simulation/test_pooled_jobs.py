"""A job that runs in a pool, whatever fails: found schedules, and fresh ones."""

from __future__ import annotations

import pytest

from holdfast.protocol.events import NodeMoved
from tests.simulation.cluster import SimCluster
from tests.simulation.schedules.enumeration import FIRST_POOLED_MOVE_SEED, FIRST_POOLED_SEED, plan_of
from tests.simulation.schedules.shrinking import failure


@pytest.mark.parametrize(
    "number",
    [
        27_603_387_978,  # the pool's word comes once the job is done, and nobody has failed
        27_674_563_579,  # more nodes are wanted back than the threshold allows: what lives on fewer is said
        27_013_575_550,  # the only member had saved a step alone; another redid it, and what was saved counted for it
        27_329_148_880,  # who had just left was asked to leave once more, and the job's size was less for ever
        27_833_017_767,  # a process of who leaves has only come, and is all that the others could begin with
        28_135_585_524,  # who was to come again with fresh workers came as a standby: the job waited for it for ever
        28_311_999_808,  # a standby begins alone while the member's fresh process comes up: one of them must wait
        35_815_298_932,  # the same while the members are absent: the one that comes later must wait
        34_756_269_588,  # a recalled member is lost, and a standby takes its place before a granted node has come
        34_959_601_458,  # the pool recalls a standby that has just taken a moved node's place: it is no standby
        34_339_334_250,  # a moved node takes its place back at once, as the node that has it is told to end
        34_571_947_226,  # the coordinator ends during a move, and the member with the place comes back last
    ],
)
def test_what_was_found_stays_mended(number: int) -> None:
    assert failure(SimCluster(plan_of(number))) == ""


def test_nodes_are_wanted_back_and_granted_anew_and_nothing_is_lost() -> None:
    clusters = [SimCluster(plan_of(number)) for number in range(FIRST_POOLED_SEED, FIRST_POOLED_SEED + 120)]
    assert [failure(cluster) for cluster in clusters] == [""] * len(clusters)
    records = [cluster.world.store.record for cluster in clusters]
    assert sum(record is not None and record.held is not None for record in records) == len(clusters)
    assert sum(bool(cluster.plan.recalls) for cluster in clusters) > 60


def test_nodes_of_a_pools_job_are_moved_and_the_pool_never_counts_one_too_many() -> None:
    clusters = [SimCluster(plan_of(number)) for number in range(FIRST_POOLED_MOVE_SEED, FIRST_POOLED_MOVE_SEED + 60)]
    assert [failure(cluster) for cluster in clusters] == [""] * len(clusters)
    moved = [event for cluster in clusters for event in cluster.world.journal.events if isinstance(event, NodeMoved)]
    assert len(moved) > 5
