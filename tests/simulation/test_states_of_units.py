"""One unit alone can finish a step, and sends it to all others; it is lost before each place has it."""

from __future__ import annotations

from random import Random

import pytest

from holdfast.simulation.cluster import SimCluster
from holdfast.simulation.faults.plans import Fault, FaultKind, FaultPlan
from holdfast.simulation.schedules.enumeration import plan_of
from holdfast.simulation.schedules.shrinking import failure


def lone_sender(seed: int) -> FaultPlan:
    """A node stands still as a step is reduced, so that few have it; then a place, or a node, in the step after it."""
    random = Random(seed)
    step, nodes = random.randint(2, 3), random.choice([3, 4, 5])
    kinds = [FaultKind.STOP_WORKER, FaultKind.KILL_NODE, FaultKind.HANG]
    still = Fault(kind=FaultKind.STOP_NODE, boundary="reduced", step=step, target=random.randrange(nodes), duration=1.5)
    lost = Fault(
        kind=random.choice(kinds),
        boundary=random.choice(["sending", "proposing", "proposing"]),
        step=step + 1,
        target=random.randrange(nodes),
        duration=4.0,
    )
    return FaultPlan(
        seed=seed, nodes=nodes, start_nodes=nodes, workers_per_node=2, places=2, micro_batches=4, faults=(still, lost)
    )


@pytest.mark.parametrize("seed", [12, 85, 96, 154, 183, 223, *range(300, 330)])
def test_the_places_of_a_unit_take_a_newer_step_together_or_keep_the_one_before(seed: int) -> None:
    """Each took what it was sent: one place of all units had the newer step, the other the older one (first six)."""
    assert failure(SimCluster(lone_sender(seed))) == ""


@pytest.mark.parametrize("number", [29_347_309_898])
def test_as_it_was_found(number: int) -> None:
    """A place of the sender stood still, the other one sent; then both were replaced."""
    assert failure(SimCluster(plan_of(number))) == ""
