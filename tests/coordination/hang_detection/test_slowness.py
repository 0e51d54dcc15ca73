"""Tests that the sequential test finds the nodes that compute slower than the others, and no other nodes."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest

from holdfast.coordination.hang_detection.slow_nodes import SLOWER, SlowNodes

NODES = ("a", "b", "c", "d")


def run(
    words: int, factor: Callable[[int], float], *, noise: float, seed: int = 0, nodes: tuple[str, ...] = NODES
) -> list[int]:
    """Return the reports at which node `a`, slower by `factor`, counts as slow; check that no other node does."""
    rng, slow, found = random.Random(seed), SlowNodes(), list[int]()
    for word in range(words):
        for name in nodes:
            took = 0.1 * (factor(word) if name == "a" else 1.0) * rng.lognormvariate(0.0, noise)
            slow.on_report(name, {f"{name}/0": (5, 5 * took)})
            assert slow.slow_nodes.keys() <= {"a"}
        if "a" in slow.slow_nodes:
            found.append(word)
    return found


@pytest.mark.parametrize("noise", [0.0, 0.01, 0.05, 0.15])
def test_equally_fast_nodes_are_never_slow(noise: float) -> None:
    for seed in range(4):
        assert run(5000, lambda _: 1.0, noise=noise, seed=seed) == []


@pytest.mark.parametrize("noise", [0.0, 0.01, 0.03])
def test_a_node_a_fifth_slower_is_found_within_a_few_reports(noise: float) -> None:
    for seed in range(20):
        found = run(60, lambda word: 1.2 if word >= 30 else 1.0, noise=noise, seed=seed)
        assert found, seed
        assert 30 <= found[0] <= 36, seed


def test_a_slow_node_among_noisy_nodes_is_found_later() -> None:
    found = run(2000, lambda word: 1.3 if word >= 500 else 1.0, noise=0.2)
    assert found
    assert found[0] >= 500


def test_single_slow_reports_do_not_make_a_node_slow() -> None:
    assert run(300, lambda word: 10.0 if word % 100 == 50 else 1.0, noise=0.02) == []


def test_a_node_that_recovers_is_no_longer_slow() -> None:
    found = run(400, lambda word: 1.5 if 100 <= word < 200 else 1.0, noise=0.02)
    assert found[0] <= 106
    assert found[-1] <= 215
    assert found == list(range(found[0], found[-1] + 1)), "the verdict does not alternate"


def test_a_node_at_the_threshold_does_not_flap() -> None:
    found = run(4000, lambda _: (1.0 + SLOWER) / 2, noise=0.03)
    changes = sum(1 for before, after in itertools.pairwise(found) if after != before + 1)
    assert changes <= 60, "with a report every five seconds, that is one change in some minutes, and one event an hour"


def test_two_nodes_are_compared_with_each_other() -> None:
    assert run(100, lambda word: 1.25 if word >= 50 else 1.0, noise=0.02, nodes=("a", "b"))[0] >= 50


def test_a_node_without_another_to_compare_with_is_not_slow() -> None:
    slow = SlowNodes()
    slow.on_report("a", {"a/0": (5, 50.0)})
    slow.on_report("b", {"b/0": (0, 0.0)})
    assert slow.slow_nodes == {}


def test_a_forgotten_node_is_learned_again() -> None:
    slow = SlowNodes()
    for _ in range(30):
        slow.on_report("a", {"a/0": (5, 1.0)})
        slow.on_report("b", {"b/0": (5, 0.5)})
    assert slow.slow_nodes.keys() == {"a"}
    slow.forget_node("a")
    assert slow.slow_nodes == {}
    slow.keep_nodes({"b"})
    slow.on_report("b", {"b/0": (5, 0.5)})
    assert slow.slow_nodes == {}
