"""Links that become silent briefly or for long, or flap; clocks that jump; replicas that diverge."""

from __future__ import annotations

from dataclasses import replace

import pytest

from holdfast.errors import EXIT_DONE, EXIT_FAILED
from holdfast.protocol import events as ev
from tests.simulation.cluster import SimCluster
from tests.simulation.families.link_plans import link_plan
from tests.simulation.faults.plans import Fault, FaultKind, FaultPlan
from tests.simulation.schedules.enumeration import FIRST_LINK_SEED
from tests.simulation.schedules.shrinking import failure

SCHEDULES = 60
CALM = FaultPlan(seed=5, nodes=3, start_nodes=3, steps=12, start_spread=0.0)
DOWN = Fault(kind=FaultKind.LINK_DOWN, target=1, boundary="voted", step=6)


def run(*faults: Fault) -> tuple[int, str, list[ev.AnyEvent]]:
    cluster = SimCluster(replace(CALM, faults=faults))
    outcome = cluster.run()
    return outcome.exit_code, outcome.why, cluster.world.journal.events


@pytest.mark.parametrize("chunk", range(2))
def test_random_schedules_of_links(chunk: int) -> None:
    struck: set[str] = set()
    for seed in range(FIRST_LINK_SEED + chunk, FIRST_LINK_SEED + SCHEDULES, 2):
        cluster = SimCluster(link_plan(seed))
        assert not failure(cluster), f"python -m tests.simulation replay {seed}"
        struck |= {fault for fault, _ in cluster.injector.seen}
    assert {FaultKind.LINK_DOWN, FaultKind.CLOCK_JUMP, FaultKind.CORRUPT_STATE} <= struck


def test_a_node_with_a_long_link_failure_is_removed_and_rejoins() -> None:
    code, _, events = run(replace(DOWN, duration=6.0))
    assert code == EXIT_DONE
    (failed,) = [event for event in events if isinstance(event, ev.FailureDetected)]
    assert failed.node == "n1"
    assert failed.severity == 1
    assert not [event for event in events if isinstance(event, ev.RolledBack)]


def test_a_short_link_failure_only_delays() -> None:
    code, _, events = run(replace(DOWN, duration=0.1))
    assert code == EXIT_DONE
    assert [event for event in events if isinstance(event, ev.FailureDetected)] == []


def test_a_replica_with_another_state_fails_the_job() -> None:
    code, why, events = run(Fault(kind=FaultKind.CORRUPT_STATE, target=1, boundary="voted", step=6))
    assert (code, "replicas diverged: step 6" in why) == (EXIT_FAILED, True), why
    assert max(event.step for event in events if isinstance(event, ev.StepCommitted)) == 5


@pytest.mark.parametrize("seed", [16535743175])
def test_a_replica_with_another_state_at_the_last_step_fails_the_job(seed: int) -> None:
    """Nodes that joined later had no own state to compare, so the job waited forever for theirs."""
    cluster = SimCluster(link_plan(seed))
    assert not failure(cluster), f"python -m tests.simulation replay {seed}"


def test_the_only_checkpoint_is_not_removed_because_it_cannot_be_read() -> None:
    """Its node reported it to a later coordinator as not accepted, and the only checkpoint was removed."""
    cluster = SimCluster(link_plan(seed := 16535741204))
    assert not failure(cluster), f"python -m tests.simulation replay {seed}"
