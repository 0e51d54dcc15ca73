"""A standby replaces a node that becomes slow, and only that node, despite other failures."""

from __future__ import annotations

from dataclasses import replace
from statistics import median

import pytest

from holdfast.errors import EXIT_DONE
from holdfast.protocol import events as ev
from tests.simulation.cluster import SimCluster
from tests.simulation.families.work_plans import straggler_plan
from tests.simulation.faults.plans import Fault, FaultKind, FaultPlan
from tests.simulation.schedules.enumeration import FIRST_STRAGGLER_SEED
from tests.simulation.schedules.shrinking import failure

SCHEDULES = 20
QUIET = FaultPlan(seed=5, nodes=4, start_nodes=4, steps=150, micro_batches=8, work_s=0.5, standbys=1, stragglers="move")
#: One node takes 1.5 times as long after some time.
SLOW = Fault(kind=FaultKind.SLOW_NODE, time=60.0, target=80, duration=1000.0)


@pytest.mark.parametrize("chunk", range(2))
def test_random_schedules_of_slow_nodes(chunk: int) -> None:
    moved = reported = 0
    for seed in range(FIRST_STRAGGLER_SEED + chunk, FIRST_STRAGGLER_SEED + SCHEDULES, 2):
        cluster = SimCluster(straggler_plan(seed))
        assert not failure(cluster), f"python -m tests.simulation replay {seed}"
        found = [event for event in cluster.world.journal.events if isinstance(event, ev.StragglerFound)]
        policy = cluster.plan.stragglers
        assert not (found and policy == "off")
        assert policy == "move" or all(event.action == "told" for event in found)
        moved += sum(event.action == "move" for event in found)
        reported += sum(event.action == "told" for event in found)
    assert min(moved, reported) >= SCHEDULES // 20


def test_no_node_is_a_straggler_if_all_are_equally_fast() -> None:
    for seed in range(3):
        cluster = SimCluster(replace(QUIET, seed=seed))
        assert cluster.run().exit_code == EXIT_DONE
        assert not [
            event for event in cluster.world.journal.events if isinstance(event, ev.StragglerFound | ev.NodeMoved)
        ]


def test_a_straggler_is_moved_once_and_stays_a_standby() -> None:
    cluster = SimCluster(replace(QUIET, faults=(SLOW,)))
    assert cluster.run().exit_code == EXIT_DONE
    events = cluster.world.journal.events
    (found,) = [event for event in events if isinstance(event, ev.StragglerFound)]
    (moved,) = [event for event in events if isinstance(event, ev.NodeMoved)]
    assert (found.action, found.node, moved.reason) == ("move", moved.from_node, "move")
    assert 1.1 < found.factor < 1.6
    assert not [event for event in events if isinstance(event, ev.FailureDetected)]
    (*_, last) = [event for event in events if isinstance(event, ev.GenerationStarted)]
    assert moved.to_node in last.members
    assert found.node not in last.members


def test_without_a_standby_a_straggler_computes_fewer_micro_batches() -> None:
    cluster = SimCluster(replace(QUIET, micro_batches=16, standbys=0, faults=(SLOW,)))
    assert cluster.run().exit_code == EXIT_DONE
    events = cluster.world.journal.events
    (found,) = [event for event in events if isinstance(event, ev.StragglerFound)]
    assert found.action == "fewer"
    assert not [event for event in events if isinstance(event, ev.FailureDetected | ev.RolledBack)]
    (first, fewer, *rest) = [event for event in events if isinstance(event, ev.GenerationStarted)]
    assert (fewer.reason, fewer.members) == ("rebalance", first.members)
    assert len(rest) <= 2, "the division of micro-batches oscillates"
    steps = [event for event in events if isinstance(event, ev.StepCommitted)]
    slow = events[0].time + SLOW.time
    (*_, before) = [event.step_s for event in steps if slow < event.time <= fewer.time + 0.1]
    after = [event.step_s for event in steps if event.time > fewer.time + 10.0]
    # Before, its four micro-batches took 1.5 times as long as four of a fast node; now no node takes longer than five.
    assert median(after) < 0.9 * before
