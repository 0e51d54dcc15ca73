"""The control plane benchmark: all its scenes with one small job, and its table from given numbers."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

import pytest

from places import BENCHMARKS


@pytest.fixture(scope="module")
def control_plane() -> ModuleType:
    spec = importlib.util.spec_from_file_location("control_plane_benchmark", BENCHMARKS / "control_plane.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_a_small_job_produces_all_figures(control_plane: ModuleType) -> None:
    samples = control_plane.measure_job(2, workers=2, losses=1, processes=1, step_s=0.02)
    found = {name: values[0] for name, values in samples.items()}
    assert set(found) == set(control_plane.FIGURES) - {"gloo", "gloo_cpu"}
    assert found["lost_steps"] == 0
    assert 0 < found["told"] <= found["entered"]
    assert 0 < found["told_cpu"] <= found["entered_cpu"]
    # The remaining node received at least Stop and Begin, and sent at least its workers' positions.
    assert found["down"] >= 2
    assert found["up"] >= 2


def test_the_table_shows_the_growth_and_whether_targets_are_met(control_plane: ModuleType) -> None:
    samples = {128: {"step": [0.004, 0.006, 0.0045], "down": [3.0]}, 1024: {"step": [0.036], "down": [3.0]}}
    lines = {line.split("  ")[0].strip(): line for line in control_plane.table(samples).splitlines()}
    step = next(line for name, line in lines.items() if name.startswith("a step adds"))
    assert "4.5 (4..6)" in step
    assert step.endswith("8 x")
    text = "\n".join(control_plane.table(samples).splitlines())
    assert "reached at 128 nodes: at most 5 ms" in text
    assert "NOT reached at 1024 nodes: at most 20 ms" in text
    assert next(line for name, line in lines.items() if name.startswith("a generation: messages")).endswith("1 x")


def test_bad_input_is_refused(control_plane: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        control_plane.main(["--nodes", "3", "--losses", "3"])
    assert ended.value.code == 2
    assert "--losses 3: of 3 nodes, one must be left" in capsys.readouterr().err
