"""New nodes and first nodes that are unreachable, one-way links, and nodes that cannot send."""

from __future__ import annotations

from dataclasses import replace

import pytest

from holdfast.errors import EXIT_DONE
from holdfast.protocol import events as ev
from tests.simulation.cluster import SimCluster
from tests.simulation.families.newcomer_plans import newcomer_plan
from tests.simulation.faults.plans import Fault, FaultKind, FaultPlan
from tests.simulation.schedules.enumeration import FIRST_NEWCOMER_SEED
from tests.simulation.schedules.shrinking import failure

SCHEDULES = 100
CALM = FaultPlan(seed=5, nodes=3, start_nodes=3, steps=12, start_spread=0.0, max_restarts=2)


def run(*faults: Fault, nodes: int = 3) -> list[ev.AnyEvent]:
    cluster = SimCluster(replace(CALM, nodes=nodes, start_nodes=nodes, faults=faults))
    assert cluster.run().exit_code == EXIT_DONE
    return cluster.world.journal.events


@pytest.mark.parametrize("seed", [30000014067, 30000010993, 30000010497])
def test_a_job_that_needs_more_memory_finishes_once_reachable_nodes_join(seed: int) -> None:
    """The experts need the memory of nodes that are unreachable or have failed too often."""
    assert SimCluster(newcomer_plan(seed)).run().exit_code == EXIT_DONE


@pytest.mark.parametrize("chunk", range(2))
def test_random_schedules_of_newcomers(chunk: int) -> None:
    struck: set[str] = set()
    for seed in range(FIRST_NEWCOMER_SEED + chunk, FIRST_NEWCOMER_SEED + SCHEDULES, 2):
        cluster = SimCluster(newcomer_plan(seed))
        assert not failure(cluster), f"python -m tests.simulation replay {seed}"
        struck |= {fault for fault, _ in cluster.injector.seen}
    assert {FaultKind.JOIN_UNREACHABLE, FaultKind.BAD_SENDER, FaultKind.ONE_WAY} <= struck


@pytest.mark.parametrize("nodes", [1, 3])
@pytest.mark.parametrize("silent", [0, 1])
def test_an_unreachable_newcomer_costs_neither_a_member_nor_a_step(nodes: int, silent: int) -> None:
    events = run(Fault(kind=FaultKind.JOIN_UNREACHABLE, time=0.3, target=silent), nodes=nodes)
    left = {event.node for event in events if isinstance(event, ev.NodeLeft) and event.reason != "finished"}
    assert left <= {f"n{nodes}"}
    assert not [event for event in events if isinstance(event, ev.RolledBack)]


def test_a_newcomer_gets_the_state_from_another_member_if_one_cannot_send() -> None:
    events = run(
        Fault(kind=FaultKind.BAD_SENDER, time=0.5, target=0, duration=30.0),
        Fault(kind=FaultKind.JOIN, time=0.7),
        Fault(kind=FaultKind.JOIN, time=0.7),
    )
    assert not [event for event in events if isinstance(event, ev.NodeLeft) and event.reason != "finished"]
    started = [event for event in events if isinstance(event, ev.GenerationStarted)]
    assert {"n3", "n4"} <= {name for event in started for name in event.members}


@pytest.mark.parametrize("silent", [0, 1])
def test_a_newcomer_that_is_probed_and_cannot_be_reached_is_in_no_generation(silent: int) -> None:
    fault = Fault(kind=FaultKind.JOIN_UNREACHABLE, time=0.5, target=silent)
    cluster = SimCluster(replace(CALM, probes=True, steps=30, faults=(fault,)))
    assert cluster.run().exit_code == EXIT_DONE
    events = cluster.world.journal.events
    assert [event.node for event in events if isinstance(event, ev.NodeRefused)] == ["n3"]
    assert not [event for event in events if isinstance(event, ev.FailureDetected)]
    assert not [event for event in events if isinstance(event, ev.GenerationStarted) and "n3" in event.members]


def start(blocked: tuple[tuple[int, int], ...], start_nodes: int) -> SimCluster:
    nodes = max(start_nodes, 4)
    cluster = SimCluster(replace(CALM, nodes=nodes, start_nodes=start_nodes, probes=True, blocked=blocked))
    assert cluster.run().exit_code == EXIT_DONE
    return cluster


def summary_of(cluster: SimCluster) -> tuple[list[str], set[str], list[ev.AnyEvent]]:
    """Return the refused nodes, all members, and the failures."""
    events = cluster.world.journal.events
    refused = [event.node for event in events if isinstance(event, ev.NodeRefused)]
    members = {name for event in events if isinstance(event, ev.GenerationStarted) for name in event.members}
    return refused, members, [event for event in events if isinstance(event, ev.FailureDetected)]


@pytest.mark.parametrize("bad", range(4))
@pytest.mark.parametrize("sends", [True, False])
def test_an_unreachable_node_is_refused_before_the_first_generation(bad: int, sends: bool) -> None:
    """The bad node may be the one that would send its initial state to all others."""
    refused, members, failures = summary_of(start(((-1, bad),) if sends else ((bad, -1),), start_nodes=3))
    assert refused == [f"n{bad}"]
    assert members == {"n0", "n1", "n2", "n3"} - {f"n{bad}"}
    assert not failures


def test_a_job_that_needs_all_nodes_waits_for_one_that_replaces_the_refused() -> None:
    refused, members, failures = summary_of(start(((-1, 1),), start_nodes=4))
    assert refused == ["n1"]
    assert members == {"n0", "n2", "n3", "n4"}
    assert not failures


def test_one_broken_link_refuses_no_node() -> None:
    refused, members, _ = summary_of(start(((2, 3),), start_nodes=4))
    assert not refused
    assert len(members) == 4
