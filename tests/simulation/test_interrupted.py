"""A user interrupts jobs with failures: the members' state is saved, and the job is not reported as finished."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from holdfast.errors import EXIT_INTERRUPTED
from holdfast.protocol import events as ev
from tests.simulation.cluster import SimCluster
from tests.simulation.families.storm_plans import storm_plan
from tests.simulation.faults.plans import Fault, FaultKind, FaultPlan, random_plan
from tests.simulation.schedules.enumeration import plan_of
from tests.simulation.schedules.shrinking import failure


def interrupted(plan: FaultPlan, at_s: float) -> SimCluster:
    """Run a plan with a user interrupt at a time, and return its cluster."""
    cluster = SimCluster(plan)
    cluster.world.timeline.after(at_s, cluster.interrupt)
    outcome = cluster.run()
    assert outcome.exit_code == EXIT_INTERRUPTED, outcome.why
    return cluster


def saved(cluster: SimCluster) -> int:
    """Return the step of the newest checkpoint in the record, after checking that it exists with that step."""
    record = cluster.world.store.record
    assert record is not None
    assert record.outcome == ""
    newest = record.checkpoints[-1]
    assert cluster.world.checkpoints.files[newest.name].step == newest.step
    return newest.step


def committed(cluster: SimCluster) -> int:
    return max(event.step for event in cluster.world.journal.events if isinstance(event, ev.StepCommitted))


@pytest.mark.parametrize("chunk", range(2))
def test_an_interrupted_job_saves_its_last_committed_step(chunk: int) -> None:
    for seed in range(chunk, 60, 2):
        rng = Random(seed)
        at = 1.5 + rng.uniform(0.0, 0.3)
        crash = Fault(kind=FaultKind.CRASH_COORDINATOR, time=at + rng.uniform(0.0, 0.3), duration=0.2)
        plan = FaultPlan(
            seed=seed,
            steps=10_000,
            checkpoint_every=1000,
            experts=4 if seed % 4 == 1 else 0,
            restart=seed % 5 == 2,
            faults=(crash,) if seed % 3 == 0 else (),
        )
        cluster = interrupted(plan, at)
        assert saved(cluster) == committed(cluster), f"seed {seed}"


def test_a_state_stashed_for_another_layout_is_saved() -> None:
    """A node is lost and the layout changes, so the state is temporarily only in the memory of the other nodes."""
    between = 0
    for seed in range(100, 130):
        rng = Random(seed)
        lost = Fault(kind=FaultKind.KILL_NODE, time=1.0, target=rng.randrange(64))
        at = 1.4 + rng.uniform(0.0, 0.6)
        crash = Fault(kind=FaultKind.CRASH_COORDINATOR, time=at + rng.uniform(-0.3, 0.5), duration=0.2)
        plan = FaultPlan(
            seed=seed,
            steps=10_000,
            checkpoint_every=1000,
            nodes=3,
            start_nodes=3,
            workers_per_node=2,
            layouts=((1, 2), (3, 1)),
            experts=4 if seed % 4 == 1 else 0,
            slots=4,
            faults=(lost, crash) if seed % 3 == 0 else (lost,),
        )
        cluster = interrupted(plan, at)
        assert saved(cluster) == committed(cluster), f"seed {seed}"
        record = cluster.world.store.record
        between += record is not None and record.change is not None
    assert between >= 3, "too few runs end before the new layout has a step"


def test_an_interrupted_job_with_random_faults_ends_unfinished() -> None:
    for seed in range(150):
        plan = random_plan(seed)
        faults = tuple(fault for fault in plan.faults if fault.kind is not FaultKind.DAMAGE)
        rng = Random(seed)
        interrupted(replace(plan, steps=10_000, checkpoint_every=3, faults=faults), rng.uniform(0.0, 1.5))


def test_a_late_sender_of_an_old_generation_does_not_block_a_transfer() -> None:
    """A late sender of an old generation must not block the new transfer; the joining node waited forever.

    A real receiver closes the old connection before that.
    """
    assert not failure(SimCluster(plan_of(6908450228))), "python -m tests.simulation replay 6908450228"


def test_a_worker_that_cannot_reach_the_others_saves_alone() -> None:
    """Its script had raised, which was taken as the cause of every failed group, so all retried forever."""
    assert not failure(SimCluster(plan_of(29143143743))), "python -m tests.simulation replay 29143143743"


def test_an_ending_job_does_not_wait_for_lost_nodes() -> None:
    """Nodes are lost while the user ends the job, and the remaining nodes save the state."""
    fewer = 0
    for seed in range(9217, 9227):
        rng = Random(seed * 7 + 1)
        plan = replace(storm_plan(seed), steps=10_000, checkpoint_every=rng.choice((1, 3, 1000)), on_loss="wait")
        cluster = interrupted(replace(plan, restart=False), 0.3 + rng.uniform(0.0, 3.0))
        begun = [event for event in cluster.world.journal.events if isinstance(event, ev.GenerationStarted)]
        fewer += any(event.reason == "save" and event.world_size < max(b.world_size for b in begun) for event in begun)
    assert fewer >= 2
