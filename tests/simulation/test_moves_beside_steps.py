"""Simulated rebalances: experts move during a step, despite failures, and no worker serves missing experts."""

from __future__ import annotations

from collections import Counter

import pytest

from holdfast.planning.arrays import IntArray
from holdfast.protocol import events as ev
from tests.simulation.cluster import SimCluster
from tests.simulation.faults.plans import Fault, FaultKind, FaultPlan
from tests.simulation.machines.experts.stored import StoredExperts
from tests.simulation.schedules.shrinking import failure

BOUNDARIES = ("moving", "sending", "receiving", "computing", "reducing", "reduced", "voted", "passed", "applying")
KINDS = (FaultKind.KILL_WORKER, FaultKind.KILL_NODE, FaultKind.STOP_WORKER)


def plan(seed: int, *faults: Fault) -> FaultPlan:
    return FaultPlan(seed=seed, nodes=4, start_nodes=4, steps=12, experts=4, slots=3, rebalance_every=1, faults=faults)


@pytest.fixture
def landed(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """The number of transfers received during steps, by sender."""
    counted: Counter[str] = Counter()
    land = StoredExperts.land

    def counting(self: StoredExperts, sender: str, offers: tuple[int, ...]) -> None:
        counted[sender] += 1
        land(self, sender, offers)

    monkeypatch.setattr(StoredExperts, "land", counting)
    return counted


def test_experts_move_repeatedly_during_steps(landed: Counter[str]) -> None:
    cluster = SimCluster(plan(1))
    assert not failure(cluster)
    assert len([event for event in cluster.world.journal.events if isinstance(event, ev.Rebalanced)]) > 1
    assert landed


@pytest.mark.parametrize("kind", KINDS)
def test_failures_during_a_rebalance(landed: Counter[str], kind: FaultKind) -> None:
    struck = 0
    for number, boundary in enumerate(BOUNDARIES):
        for step in (0, 4, 5, 6):
            seed = 10 * number + step
            cluster = SimCluster(plan(seed, Fault(kind=kind, target=seed, boundary=boundary, step=step, duration=0.7)))
            assert not (why := failure(cluster)), f"{kind} at {boundary} of step {step}, seed {seed}: {why}"
            struck += any(isinstance(event, ev.FailureDetected) for event in cluster.world.journal.events)
    assert struck > len(BOUNDARIES)
    assert landed.total() > 4 * len(BOUNDARIES)


def test_a_worker_that_does_not_wait_for_moving_experts_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    awaits = StoredExperts.awaits
    monkeypatch.setattr(
        StoredExperts, "awaits", lambda self, generation, sender="": bool(sender) and awaits(self, generation, sender)
    )
    assert any("experts" in failure(SimCluster(plan(seed))) for seed in range(4))


def test_a_worker_that_serves_experts_too_early_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    expect = StoredExperts.expect

    def at_once(self: StoredExperts, generation: int, coming: dict[str, IntArray]) -> None:
        self.serving = sum(coming.values(), self.serving)
        expect(self, generation, coming)

    monkeypatch.setattr(StoredExperts, "expect", at_once)
    assert any("serves" in failure(SimCluster(plan(seed))) for seed in range(4))
