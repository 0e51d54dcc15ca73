"""Tests that a job without failures ends no worker, expels no node and repeats no step."""

from __future__ import annotations

import random

import pytest

from tests.simulation.fakes.played_steps import PlayedSteps

#: medians in seconds and the spread of the times of the recovery benchmark's job on a busy machine
KINDS = {
    "script": (1e-3, 0.5),
    "compute": (0.05, 0.4),
    "reducing": (0.02, 0.5),
    "voted": (4e-3, 0.6),
    "applying": (6e-3, 0.5),
    "saving": (0.3, 0.5),
    "paused": (4.0, 0.3),
}


def times(seed: int) -> dict[str, list[float]]:
    rng = random.Random(seed)
    return {kind: [s * rng.lognormvariate(0.0, by) for _ in range(600)] for kind, (s, by) in KINDS.items()}


@pytest.mark.parametrize("seed", [1, 2])
def test_a_job_without_failures_raises_no_alarms(seed: int) -> None:
    found = PlayedSteps(times(seed), seed=seed).run(1500)
    assert found.alarms == []
    assert found.probes > 10  # evaluations and checkpoints lead to probes


def test_each_slow_micro_batch_ends_at_most_one_process() -> None:
    slow = {(step, step % 8): 10.0 for step in range(100, 400, 100)}
    found = PlayedSteps(times(3), slow=slow).run(400)
    assert 0 < len(found.alarms) <= len(slow)
    assert all("while others wait for it" in alarm for alarm in found.alarms)


@pytest.mark.parametrize("nodes", [(2,), (0, 1, 2, 3)], ids=["one", "all"])
@pytest.mark.parametrize("times_as_long", [4.0, 12.0])
def test_other_load_on_a_node_raises_no_alarm(nodes: tuple[int, ...], times_as_long: float) -> None:
    """The limits come from a quiet machine, and the kernel counts a wait for a core only after it ends."""
    found = PlayedSteps(times(4), loaded=dict.fromkeys(nodes, (60, times_as_long))).run(160)
    assert found.alarms == []


@pytest.mark.parametrize("load", [1.0, 4.0], ids=["quiet", "loaded"])
def test_a_hang_on_a_loaded_node_is_detected_as_early(load: float) -> None:
    played = PlayedSteps(times(5), loaded={2: (60, load)}, hangs=(90, 2))
    (alarm, *_) = played.run(95).alarms
    assert "'applying' of step 90 for 0." in alarm
