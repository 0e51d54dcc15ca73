"""The spot benchmark's bookkeeping of the nodes' time, checked by hand."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from holdfast.protocol.events import ReadEvent
from made_events import joined, made
from places import BENCHMARKS

FILE = BENCHMARKS / "spot.py"


@pytest.fixture(scope="module")
def spot() -> ModuleType:
    spec = importlib.util.spec_from_file_location("spot_benchmark", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def events(*steps: tuple[float, int], restart: bool) -> list[ReadEvent]:
    """Return the events of two nodes, one of which is idle after the failure."""
    out: list[ReadEvent] = [joined(name) for name in ("a", "b", "c")]
    out.append(made("generation_started", world_size=3))
    out += [made("step_committed", time, step=step, samples=10) for time, step in steps]
    out += [made("failure_detected", 4.5, node="c"), made("node_left", 4.5, node="c")]
    out.append(made("generation_started", 4.5, world_size=1 if restart else 2))
    if restart:
        out.append(made("rolled_back", 4.5, to_step=2))
    return sorted(out, key=lambda event: event.time)


def test_time_is_counted_as_down_idle_or_busy(spot: ModuleType) -> None:
    ours = spot.account(events(*[(float(t), t) for t in range(1, 11)], restart=False), 10.0)
    assert (ours.samples, ours.steps, ours.undone, ours.down, ours.idle) == (90, 10, 0, 0.0, 0.0)
    assert ours.busy == 3.5 * 3 + 5.5 * 2
    redone = [(1.0, 1), (2.0, 2), (3.0, 3), (4.0, 4), (6.0, 3), (7.0, 4), (8.0, 5), (9.0, 6), (10.0, 7)]
    other = spot.account(events(*redone, restart=True), 10.0)
    # Steps 4 and 5 were four seconds apart instead of one, with one node in the world.
    assert (other.samples, other.steps, other.undone, other.down) == (60, 7, 2, 3.0)
    assert other.idle == 5.5
    assert other.down + other.idle + other.busy == ours.busy
    parts = spot.gain_shares(ours, other)
    assert sum(parts.values()) == pytest.approx(1.0)
    rate = 90 / 21.5
    assert parts["restarts"] == pytest.approx(rate * 3.0 / 30)
    # 21.5 node-seconds; a sample has 32 tokens in 2 layers, and the backward pass takes twice as long as the forward
    # pass.
    assert ours.at_most(0.01) == other.at_most(0.01) == pytest.approx(21.5 / (32 * 2 * 3 * 0.01))


def test_a_run_with_only_disturbed_steps_has_a_usual_step_time(spot: ModuleType) -> None:
    lived = spot.account(events((1.0, 1), (6.0, 2), restart=False), 7.0)
    assert (lived.steps, lived.down) == (2, 0.0)


def test_a_missing_data_directory_is_reported(
    spot: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before, sys.argv = sys.argv, ["spot.py", "--data", str(tmp_path)]
    try:
        assert spot.main() == 2
    finally:
        sys.argv = before
    assert "give --data DIR" in capsys.readouterr().err


def test_the_trace_of_single_failures_removes_half_of_the_nodes(spot: ModuleType, tmp_path: Path) -> None:
    lines = spot.single_failures(tmp_path).read_text().splitlines()
    gone = [line.split(",")[2] for line in lines if ",remove," in line]
    assert len(gone) == len(set(gone)) == 5
    assert lines[11] == "300,remove,node3"
