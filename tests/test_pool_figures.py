"""The figures that `make bench-pool` computes from journals."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType
from typing import Any

import pytest

from places import BENCHMARKS


@pytest.fixture(scope="module")
def figures() -> ModuleType:
    spec = importlib.util.spec_from_file_location("pool_figures", BENCHMARKS / "pool_figures.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def step(time: float, step_s: float) -> dict[str, Any]:
    return {"event": "step_committed", "time": time, "step_s": step_s}


def world(time: float, size: int) -> dict[str, Any]:
    return {"event": "generation_started", "time": time, "world_size": size}


#: A step takes 0.5 s with two workers and 1 s with one; it is delayed once by 0.25 s and once by 0.75 s.
STORY = [
    world(0.0, 2),
    *(step(number / 2, 0.5) for number in range(1, 21)),
    world(10.0, 1),
    step(11.25, 1.25),
    *(step(11.25 + number, 1.0) for number in range(1, 20)),
    world(31.0, 2),
    step(32.0, 1.75),
    *(step(32.0 + number / 2, 0.5) for number in range(1, 20)),
]


def test_the_delay_of_a_change_is_the_excess_of_its_longest_step(
    figures: ModuleType,
) -> None:
    assert figures.measure_delays(STORY, 5.0) == ([0.25], [0.75])
    assert figures.measure_delays(STORY, 20.0) == ([], [0.75])
    beside = [step(float(number), 1.0 if number != 32 else 1.5) for number in range(60)]
    assert figures.measure_delays(STORY, 5.0, steps_of=beside) == ([0.0], [0.5])


def test_a_world_size_is_regained_only_after_it_was_lost(figures: ModuleType) -> None:
    assert figures.find_world_regained(STORY, 5.0, 2) == 31.0
    assert figures.find_world_regained(STORY, 31.5, 2) is None
    assert figures.find_world_regained(STORY[:25], 5.0, 2) is None


def test_a_figure_without_measurements_is_printed_as_none(figures: ModuleType) -> None:
    assert "none" in str(figures.Figures("x", []))
    assert "0.200 (0.100..0.300; 3)" in str(figures.Figures("x", [0.1, 0.3, 0.2]))
