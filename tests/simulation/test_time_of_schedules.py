"""The time ledger over journals of simulated jobs: every second has exactly one cause."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest

from holdfast.observability.accounts.time_ledger import TimeLedger
from holdfast.observability.accounts.time_spans import Cause
from holdfast.observability.history.episodes import episodes
from holdfast.observability.history.explanation import explain
from holdfast.observability.history.job_condition import find_condition
from holdfast.protocol.events import (
    AnyEvent,
    FailureDetected,
    GenerationStarted,
    JobWaiting,
    Recovered,
    StepCommitted,
)
from tests.simulation.cluster import SimCluster
from tests.simulation.schedules.enumeration import FAMILIES, plan_of

FEW = 4


@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - {"large"}))
def test_the_causes_add_up_to_the_wall_time(family: str) -> None:
    rng = Random(family)
    for number in [rng.choice(FAMILIES[family]) for _ in range(FEW)]:
        cluster = SimCluster(plan_of(number))
        cluster.run()
        events, ledger = cluster.world.journal.events, TimeLedger()
        for event in events:
            ledger.add_event(event)
        account = ledger.account()
        assert account.wall_s == max(event.time for event in events) - events[0].time
        assert sum(account.seconds.values()) == pytest.approx(account.wall_s, rel=1e-9), f"schedule {number}"
        assert min(account.seconds.values()) >= 0.0, f"schedule {number}"
        assert account.seconds[Cause.WAITING] >= waited(events) - 1e-9, f"schedule {number}"
        # Only first commits of steps and the unfinished step at the end can count as training.
        first = {event.step: event for event in reversed(events) if isinstance(event, StepCommitted)}.values()
        steps = [event for event in events if isinstance(event, StepCommitted)]
        begin_s = steps[0].time - events[0].time if steps else account.wall_s
        end_s = account.wall_s - begin_s - sum(event.step_s for event in steps)
        trained = account.seconds[Cause.EFFECTIVE] + account.seconds[Cause.SUB_HEALTHY]
        assert trained <= sum(event.step_s for event in first) + begin_s + end_s + 1e-9, f"schedule {number}"


def waited(events: Sequence[AnyEvent]) -> float:
    """Return the total time of reported waits for nodes that no step interrupted."""
    total, since = 0.0, None
    for event in events:
        if isinstance(event, JobWaiting) and since is None:
            since = event.time
        elif isinstance(event, GenerationStarted) and since is not None:
            total, since = total + event.time - since, None
        elif isinstance(event, StepCommitted):
            since = None
    return total


@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - {"large"}))
def test_every_event_can_be_explained_and_belongs_to_one_episode(family: str) -> None:
    rng = Random(f"explain {family}")
    for number in [rng.choice(FAMILIES[family]) for _ in range(2)]:
        cluster = SimCluster(plan_of(number))
        cluster.run()
        events = cluster.world.journal.events
        parts = [event.seq for episode in episodes(events) for event in episode.events]
        assert len(parts) == len(set(parts)), f"schedule {number}"
        expected = {event.seq for event in events if isinstance(event, FailureDetected | Recovered | GenerationStarted)}
        assert expected <= set(parts), f"schedule {number}"
        for event in events:
            found = explain(events, event.seq)
            assert found.seconds is None or min(found.seconds.values(), default=0.0) >= 0.0, f"schedule {number}"
        assert find_condition(events).job == "sim"
