"""A user ends jobs in which things go wrong: what all members had is saved, and nothing says that the job is done."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from holdfast.errors import EXIT_INTERRUPTED
from holdfast.protocol import events as ev
from holdfast.protocol.messages.worker import CheckpointWritten, Entered
from holdfast.simulation.cluster import SimCluster
from holdfast.simulation.faults.plans import Fault, FaultKind, FaultPlan, random_plan


def interrupted(plan: FaultPlan, at_s: float) -> SimCluster:
    """A run whose user asks for its end at a time."""
    cluster = SimCluster(plan)
    cluster.world.timeline.after(at_s, cluster.interrupt)
    outcome = cluster.run()
    assert outcome.exit_code == EXIT_INTERRUPTED, outcome.why
    return cluster


def saved(cluster: SimCluster) -> int:
    """The step of the newest checkpoint that the record knows; it lies in the directory with that step's state."""
    record = cluster.world.store.record
    assert record is not None
    assert record.outcome == ""
    newest = record.checkpoints[-1]
    assert cluster.world.checkpoints.files[newest.name].step == newest.step
    return newest.step


def committed(cluster: SimCluster) -> int:
    return max(event.step for event in cluster.world.journal.events if isinstance(event, ev.StepCommitted))


@pytest.mark.parametrize("chunk", range(2))
def test_all_that_is_committed_is_saved(chunk: int) -> None:
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


def test_the_last_step_may_have_been_saved_before_its_last_generation_is_entered() -> None:
    """A slow member holds up the entering for longer than the first one takes to save what a FORWARD has applied."""
    faults = (
        Fault(kind=FaultKind.STOP_WORKER, time=1.1025467853975437, target=4, duration=0.5),
        Fault(kind=FaultKind.LAG_DOWN, time=0.6225817290609734, target=15, duration=0.6),
        Fault(kind=FaultKind.INTERRUPT, time=0.65),
    )
    plan = FaultPlan(
        seed=55858726,
        nodes=5,
        start_nodes=5,
        steps=4,
        micro_batches=9,
        micro_batch=4,
        checkpoint_every=1,
        start_spread=0.0,
        faults=faults,
    )
    cluster = SimCluster(plan, keep_trace=True)
    assert cluster.run().exit_code == EXIT_INTERRUPTED
    story = [line[2] for line in cluster.world.story or () if len(line) == 3]
    written = next(n for n, said in enumerate(story) if isinstance(said, CheckpointWritten) and said.step == 4)
    entered = max(n for n, said in enumerate(story) if isinstance(said, Entered) and said.applied == 4)
    assert written < entered, "this is not the schedule that the test is about"
    assert saved(cluster) == committed(cluster) == 4


def test_whatever_goes_wrong_the_job_ends_and_is_not_done() -> None:
    for seed in range(150):
        plan = random_plan(seed)
        faults = tuple(fault for fault in plan.faults if fault.kind is not FaultKind.DAMAGE)
        rng = Random(seed)
        interrupted(replace(plan, steps=10_000, checkpoint_every=3, faults=faults), rng.uniform(0.0, 1.5))
