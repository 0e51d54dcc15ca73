"""An interrupted step is finished by a rank that has reduced it, or else from the survivors' gradients."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random

import pytest

from holdfast.coordination.worker.machine import WorkerMachine
from holdfast.errors import EXIT_DONE
from holdfast.protocol import events as ev
from tests.simulation.cluster import SimCluster
from tests.simulation.families.storm_plans import ready_plan
from tests.simulation.faults.plans import Fault, FaultKind, FaultPlan
from tests.simulation.schedules.enumeration import FIRST_READY_SEED
from tests.simulation.schedules.shrinking import failure
from tests.simulation.world import Parts

SCHEDULES = 60
KILLS = 40
EACH = 8
#: Four ranks with eight micro-batches each.
CALM = FaultPlan(seed=5, nodes=4, start_nodes=4, steps=6, micro_batches=4 * EACH, start_spread=0.0)
#: The boundaries for half of the kills; the other kills are at random times.
STRUCK = ("computing", "reducing", "reduced", "voted", "passed")


@pytest.mark.parametrize("chunk", range(2))
def test_random_schedules_that_finish_steps(chunk: int) -> None:
    struck: set[str] = set()
    for seed in range(FIRST_READY_SEED + chunk, FIRST_READY_SEED + SCHEDULES, 2):
        cluster = SimCluster(ready_plan(seed))
        assert not failure(cluster), f"python -m tests.simulation replay {seed}"
        struck |= {phase for _, phase in cluster.injector.seen}
    assert {"reduced", "receiving", "adopting"} <= struck


def computed(plan: FaultPlan) -> tuple[list[tuple[str, int, int]], list[ev.AnyEvent]]:
    """Return each started micro-batch as (worker, step, micro-batch), in order, and the job's events."""
    begun: list[tuple[str, int, int]] = []

    class Counting(WorkerMachine):
        def begin_micro_batch(self, micro_batch: int) -> bool:
            here = super().begin_micro_batch(micro_batch)
            if here:
                begun.append((self.worker, self.step, micro_batch))
            return here

    cluster = SimCluster(plan, Parts(worker=Counting))
    outcome = cluster.run()
    assert outcome.exit_code == EXIT_DONE, outcome.why
    return begun, cluster.world.journal.events


def kill(number: int) -> Fault:
    rng = Random(number)
    boundary = rng.choice(STRUCK) if number // 4 % 2 else ""
    at = rng.uniform(0.5, 1.5)
    return Fault(kind=FaultKind.KILL_NODE, time=at, target=rng.randrange(4), boundary=boundary, step=rng.randint(1, 5))


@pytest.mark.parametrize("chunk", range(4))
def test_survivors_recompute_only_the_lost_ranks_work_and_only_without_a_ready_rank(chunk: int) -> None:
    decisions: Counter[str] = Counter()
    for number in range(chunk, KILLS, 4):
        begun, events = computed(replace(CALM, seed=number, faults=(kill(number),)))
        (lost,) = [event.node for event in events if isinstance(event, ev.FailureDetected)]
        again = {key for key, times in Counter((step, one) for _, step, one in begun).items() if times > 1}
        firsts = {key: next(worker for worker, *rest in begun if tuple(rest) == key) for key in again}
        assert {worker.partition("/")[0] for worker in firsts.values()} <= {lost}, number
        assert len(again) <= EACH, number
        started = [event for event in events if isinstance(event, ev.GenerationStarted)]
        (after,) = started[1:]
        decisions[after.decision] += 1
        if after.decision == "forward":
            (recovered,) = [event for event in events if isinstance(event, ev.Recovered)]
            assert (recovered.micro_batches_kept, recovered.micro_batches_redone) == (4 * EACH, 0), number
            steps = [event for event in events if isinstance(event, ev.StepCommitted)]
            finished = next(event.step for event in steps if event.time > after.time)
            assert {step for step, _ in again} <= {finished + 1}, "a micro-batch of a finished step was computed again"
    assert set(decisions) == {"forward", "redo"}, decisions


def test_survivors_redo_a_step_from_kept_sums_if_the_ready_rank_dies() -> None:
    """One rank dies in the reduction; a READY rank finishes the step and dies while it sends the state."""
    histories: list[str] = []
    for seed in range(200):
        faults = (
            Fault(kind=FaultKind.KILL_NODE, target=0, boundary="reduced", step=3),
            Fault(kind=FaultKind.KILL_NODE, target=1, boundary="sending"),
        )
        begun, events = computed(replace(CALM, seed=seed, nodes=4, faults=faults))
        assert not [event for event in events if isinstance(event, ev.RolledBack)], seed
        decisions = [event.decision for event in events if isinstance(event, ev.GenerationStarted)]
        histories += [" ".join(decisions)]
        survivors = Counter(
            (step, one) for worker, step, one in begun if worker.partition("/")[0] not in lost_nodes(events)
        )
        if "forward redo" in histories[-1]:
            assert max(survivors.values()) == 1, "a survivor computed a micro-batch twice"
            return
    pytest.fail(f"no READY rank died while it sent: {Counter(histories)}")


def lost_nodes(events: list[ev.AnyEvent]) -> set[str]:
    """Return the lost nodes."""
    return {event.node for event in events if isinstance(event, ev.FailureDetected)}
