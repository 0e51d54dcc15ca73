"""Only one replica group can finish a step; it is lost before it has sent the state to every worker."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.protocol.layouts.proposals import adoption
from tests.simulation.cluster import SimCluster
from tests.simulation.faults.plans import Fault, FaultKind, FaultPlan
from tests.simulation.machines.unit import Consent, SimUnit
from tests.simulation.schedules.enumeration import plan_of
from tests.simulation.schedules.shrinking import failure


def lone_sender(seed: int) -> FaultPlan:
    """A node pauses during a reduction, so that few workers have the step; then a fault strikes in the next step."""
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
def test_a_replica_group_adopts_a_newer_step_together_or_not_at_all(seed: int) -> None:
    """In the first six schedules one local rank of all replica groups had the newer step, the other the older one."""
    assert failure(SimCluster(lone_sender(seed))) == ""


@pytest.mark.parametrize("number", [29_347_309_898])
def test_a_replica_group_adopts_a_newer_step_in_the_schedule_that_failed(number: int) -> None:
    """One worker of the sending group paused, the other sent its state, then both were replaced."""
    assert failure(SimCluster(plan_of(number))) == ""


def test_a_worker_whose_replica_group_raised_is_not_a_copy_of_the_state() -> None:
    """All workers of one replica group had the step and one raised; in another only one of the same role had it."""
    faults = (
        Fault(kind=FaultKind.STOP_NODE, target=2, duration=1.5, boundary="reduced", step=3),
        Fault(kind=FaultKind.KILL_WORKER, target=1, boundary="voted", step=3),
        Fault(kind=FaultKind.STOP_WORKER, duration=4.0, boundary="receiving"),
        Fault(kind=FaultKind.RAISE, target=3, boundary="begun", step=3),
    )
    plan = FaultPlan(
        seed=1642,
        nodes=4,
        start_nodes=4,
        steps=3,
        workers_per_node=2,
        places=2,
        micro_batches=1,
        stops_at=3,
        faults=faults,
    )
    assert failure(SimCluster(plan)) == ""


def test_a_proposal_that_is_no_longer_wanted_is_withdrawn_at_once() -> None:
    """A real process checks while it waits; the simulated one waited until the next order."""
    later, calls = list[Callable[[], object]](), list[str]()

    def after(_: str, __: object, action: Callable[..., object], *args: Any) -> None:
        later.append(partial(action, *args))

    def boundary(_: str) -> bool:
        return False

    world = SimpleNamespace(after=after)
    worker: Any = SimpleNamespace(
        id="n0/0/a", world=world, hung=False, busy="", boundary=boundary, advance=lambda: calls.append("goes on")
    )
    page = SimUnit(2)
    Consent(worker, page).ask(
        adoption(2),
        wanted=lambda: False,
        agreed=lambda: calls.append("agreed"),
        withdrawn=lambda: calls.append("withdrawn"),
    )
    while later:
        later.pop(0)()
    assert calls == ["withdrawn", "goes on"]
    assert worker.busy == ""
    assert not page.withdraw(worker.id), "its proposal is still on the page"
