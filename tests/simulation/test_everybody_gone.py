"""All nodes die, visibly or silently, and return under their names: the job waits, reports it and continues."""

from __future__ import annotations

from random import Random

import pytest

from holdfast.errors import EXIT_DONE
from holdfast.protocol import events as ev
from tests.simulation.cluster import SimCluster
from tests.simulation.faults.plans import Fault, FaultKind, FaultPlan
from tests.simulation.schedules.enumeration import plan_of
from tests.simulation.schedules.shrinking import failure

KILLED_AT_S = 1.5
#: A silent death is detected when the lease of 1 s expires.
RETURN_AFTER_S = 2.5


def everybody_goes(seed: int) -> FaultPlan:
    """Three nodes die within 50 ms; each returns; the coordinator crashes in between in every other plan."""
    rng = Random(seed)
    deaths = [rng.choice((FaultKind.KILL_NODE, FaultKind.SILENT_NODE)) for _ in range(3)]
    faults = [Fault(kind=kind, time=KILLED_AT_S + rng.uniform(0, 0.05), target=0) for kind in deaths]
    back = KILLED_AT_S + RETURN_AFTER_S
    faults += [Fault(kind=FaultKind.RETURN, time=back + rng.uniform(0, 0.5), target=rng.randrange(3)) for _ in range(3)]
    if seed % 2:
        crash = KILLED_AT_S + rng.uniform(0, RETURN_AFTER_S)
        faults.append(Fault(kind=FaultKind.CRASH_COORDINATOR, time=crash, duration=0.2))
    return FaultPlan(seed=seed, steps=25, checkpoint_every=1, faults=tuple(faults))


@pytest.mark.parametrize("chunk", range(2))
def test_a_job_without_nodes_waits_and_goes_on(chunk: int) -> None:
    for seed in range(chunk, 100, 2):
        cluster = SimCluster(everybody_goes(seed))
        outcome = cluster.run()
        assert outcome.exit_code == EXIT_DONE, f"{seed}: {outcome.why}"
        events = cluster.world.journal.events
        waits = [index for index, event in enumerate(events) if isinstance(event, ev.JobWaiting)]
        assert waits, f"seed {seed}: no wait was reported"
        rest = events[waits[-1] :]
        assert any(isinstance(event, ev.RolledBack) for event in rest), f"seed {seed}"
        steps = {event.step for event in events if isinstance(event, ev.StepCommitted)}
        assert steps == set(range(1, 26))


@pytest.mark.parametrize("seed", [18474005479])
def test_the_job_continues_from_a_checkpoint_that_a_returning_node_reports(seed: int) -> None:
    """A returning node reports a checkpoint of the last step after the job had decided to start from the beginning."""
    assert not failure(SimCluster(plan_of(seed))), f"python -m tests.simulation replay {seed}"


@pytest.mark.parametrize("seed", [22261521189])
def test_a_node_is_named_by_no_generation_before_it_has_joined(seed: int) -> None:
    """All nodes died, and one returned with half of its workers while the other was there; it was a member at once."""
    assert not failure(SimCluster(plan_of(seed))), f"python -m tests.simulation replay {seed}"


@pytest.mark.parametrize("seed", [11424588318])
def test_a_script_that_always_fails_at_one_step_causes_one_restart_of_all_workers(seed: int) -> None:
    """The same node always reached that step first, while the other still read the checkpoint."""
    cluster = SimCluster(plan_of(seed))
    assert not failure(cluster), f"python -m tests.simulation replay {seed}"
    started = [event for event in cluster.world.journal.events if isinstance(event, ev.GenerationStarted)]
    restarts = [event for event in started if event.reason == "rollback" and event.world_size == 2]
    assert len(restarts) == 1, started


@pytest.mark.parametrize("seed", [26175300658])
def test_a_job_waits_for_lost_nodes_after_its_coordinator_died(seed: int) -> None:
    """The lost node joined the next coordinator with a new agent; the others continued before it could train."""
    assert not failure(SimCluster(plan_of(seed))), f"python -m tests.simulation replay {seed}"


@pytest.mark.parametrize("seed", [26276229693])
def test_an_awaited_node_may_return_to_a_later_coordinator_unchanged(seed: int) -> None:
    """The node's generation continued, so its next step ends the wait."""
    assert not failure(SimCluster(plan_of(seed))), f"python -m tests.simulation replay {seed}"


@pytest.mark.parametrize("seed", [26882569162])
def test_a_standby_lost_before_it_has_ranks_is_not_awaited(seed: int) -> None:
    """The standby had joined next to a draining node, which left anyway."""
    assert not failure(SimCluster(plan_of(seed))), f"python -m tests.simulation replay {seed}"


@pytest.mark.parametrize("seed", [29069011483])
def test_a_node_of_a_generation_without_state_does_not_rejoin(seed: int) -> None:
    """The only node lost its connection and a worker before any state existed, and was not complete again."""
    assert not failure(SimCluster(plan_of(seed))), f"python -m tests.simulation replay {seed}"


@pytest.mark.parametrize("seed", [23153804026])
def test_a_standby_that_replaced_another_node_frees_no_draining_node(seed: int) -> None:
    """A standby replaced a node, and another node lost a process with experts, so two nodes were too few."""
    assert not failure(SimCluster(plan_of(seed))), f"python -m tests.simulation replay {seed}"


@pytest.mark.parametrize("seed", [26355316214])
def test_a_draining_node_lost_after_its_replacement_joined_is_not_awaited(seed: int) -> None:
    """A draining node was killed after its standby had become a member, so the job kept its size."""
    assert not failure(SimCluster(plan_of(seed))), f"python -m tests.simulation replay {seed}"


@pytest.mark.parametrize("seed", [26410957701])
def test_a_waiting_job_restarts_with_its_former_number_of_nodes(seed: int) -> None:
    """No node had a complete state, so all workers restarted; the first node that returned trained alone."""
    assert not failure(SimCluster(plan_of(seed))), f"python -m tests.simulation replay {seed}"


@pytest.mark.parametrize("seed", [21077257678])
def test_a_job_waits_for_a_node_with_room_for_its_experts(seed: int) -> None:
    """The other node with the state was killed, and the new node alone has no room for all experts."""
    assert not failure(SimCluster(plan_of(seed))), f"python -m tests.simulation replay {seed}"
