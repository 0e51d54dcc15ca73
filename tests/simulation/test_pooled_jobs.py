"""A job in a pool with failures: schedules that once failed, and new ones."""

from __future__ import annotations

import pytest

from holdfast.protocol.events import NodeMoved
from tests.simulation.cluster import SimCluster
from tests.simulation.schedules.enumeration import FIRST_POOLED_MOVE_SEED, FIRST_POOLED_SEED, plan_of
from tests.simulation.schedules.shrinking import failure


@pytest.mark.parametrize(
    "number",
    [
        27_603_387_978,  # the pool's message arrives after the job is done, which is not a failure
        27_674_563_579,  # the pool recalls more nodes than the threshold allows, so the plan announces fewer copies
        # the only member had saved a step; another member redid it, and the old checkpoint was accepted
        27_013_575_550,
        27_329_148_880,  # a node that had just left was drained again, and the job's size stayed smaller
        27_833_017_767,  # a draining node's new process is the only one with a state for the others
        28_135_585_524,  # a node expected with new workers returned as a standby, and the job waited forever
        28_311_999_808,  # a standby starts alone while the member's new process starts: one of them must wait
        35_815_298_932,  # the same while the members are disconnected: the later one must wait
        34_756_269_588,  # a recalled member is lost, and a standby replaces it before a granted node joins
        34_959_601_458,  # the pool recalls a standby that has just replaced a moved node, so it is a member
        34_339_334_250,  # a moved node returns to its rank at once, because its replacement is terminated
        34_571_947_226,  # the coordinator ends during a move, and the member that trains returns last
    ],
)
def test_a_pooled_schedule_that_once_failed_passes(number: int) -> None:
    assert failure(SimCluster(plan_of(number))) == ""


def test_pooled_jobs_survive_recalls_and_new_grants() -> None:
    clusters = [SimCluster(plan_of(number)) for number in range(FIRST_POOLED_SEED, FIRST_POOLED_SEED + 120)]
    assert [failure(cluster) for cluster in clusters] == [""] * len(clusters)
    records = [cluster.world.store.record for cluster in clusters]
    assert sum(record is not None and record.held is not None for record in records) == len(clusters)
    assert sum(bool(cluster.plan.recalls) for cluster in clusters) > 60


def test_moves_in_a_pool_never_count_one_node_too_many() -> None:
    clusters = [SimCluster(plan_of(number)) for number in range(FIRST_POOLED_MOVE_SEED, FIRST_POOLED_MOVE_SEED + 60)]
    assert [failure(cluster) for cluster in clusters] == [""] * len(clusters)
    moved = [event for cluster in clusters for event in cluster.world.journal.events if isinstance(event, NodeMoved)]
    assert len(moved) > 5
