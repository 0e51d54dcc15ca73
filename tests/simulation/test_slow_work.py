"""One micro-batch of one step is slow on every node, so no node is excluded."""

from __future__ import annotations

from dataclasses import replace

import pytest

from holdfast.errors import EXIT_DONE
from holdfast.protocol import events as ev
from tests.simulation.cluster import SimCluster
from tests.simulation.families.work_plans import work_plan
from tests.simulation.faults.plans import FaultPlan
from tests.simulation.schedules.enumeration import FIRST_WORK_SEED
from tests.simulation.schedules.shrinking import failure

SCHEDULES = 40
SLOW = FaultPlan(seed=5, steps=30, start_spread=0.0, slow_work=((24, 2),), slow_work_s=1.5)


@pytest.mark.parametrize("chunk", range(2))
def test_random_schedules_of_slow_work(chunk: int) -> None:
    ended = raised = 0
    for seed in range(FIRST_WORK_SEED + chunk, FIRST_WORK_SEED + SCHEDULES, 2):
        cluster = SimCluster(work_plan(seed))
        assert not failure(cluster), f"python -m tests.simulation replay {seed}"
        events = cluster.world.journal.events
        ended += sum(isinstance(event, ev.FailureDetected) and event.kind == "hang" for event in events)
        raised += sum(isinstance(event, ev.LimitRaised) for event in events)
    assert min(ended, raised) >= SCHEDULES // 10


@pytest.mark.parametrize("hold", [False, True], ids=["others compute it", "the same node does"])
def test_a_slow_process_is_restarted_once_and_then_gets_more_time(hold: bool) -> None:
    cluster = SimCluster(replace(SLOW, hold=hold, max_restarts=1))
    assert cluster.run().exit_code == EXIT_DONE
    events = cluster.world.journal.events
    (failed,) = [event for event in events if isinstance(event, ev.FailureDetected)]
    assert (failed.kind, failed.step, failed.micro_batch) == ("hang", 24, 2)
    assert [event for event in events if isinstance(event, ev.NodeLeft) and event.reason != "finished"] == []
    raised = [event for event in events if isinstance(event, ev.LimitRaised)]
    assert [(event.step, event.micro_batch) for event in raised] == ([] if hold else [(24, 2)])
