"""A script fails under one layout, before or after it attaches, or dies; all workers return to the old layout."""

from __future__ import annotations

import pytest

from holdfast.protocol.events import JobFinished, LayoutKept, RolledBack
from tests.simulation.cluster import SimCluster
from tests.simulation.schedules.enumeration import plan_of
from tests.simulation.schedules.shrinking import failure


@pytest.mark.parametrize(
    "number",
    [29_200_000_986, 29_200_000_245, 29_200_000_249, 29_200_002_486, 29_200_000_329, 29_200_000_435],
    ids=["before", "after", "dead", "experts before", "experts after", "experts dead"],
)
def test_all_workers_return_to_the_former_layout_without_a_rollback(number: int) -> None:
    cluster = SimCluster(plan_of(number))
    assert failure(cluster) == ""
    events = cluster.world.journal.events
    kept = [event.why for event in events if isinstance(event, LayoutKept)]
    assert any("the job failed before its first step" in why for why in kept), kept
    assert [event for event in events if isinstance(event, JobFinished)]
    assert not [event for event in events if isinstance(event, RolledBack)]
