"""Tests of figure 13: shallowsim's own examples, preemptions, and a small cluster."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

import figure_13
import numpy as np
import pytest
from perf_model import PerfModel


@pytest.fixture(scope="module")
def numbers(recorded: Path) -> Path:
    return recorded / "perfmodel" / "dsv3_perfmodel.json"


@pytest.mark.parametrize("gpu", ["H200", "H800"])
def test_the_performance_model_reproduces_the_examples_of_shallowsim(numbers: Path, gpu: str) -> None:
    times = PerfModel.read(numbers, gpu).layer(4383, tp=4, dp=8, kv_hit=0.563)
    printed = json.loads(numbers.read_text())["example_ms"][gpu]
    found = {
        "MLA": times.attention,
        "TP_MLA": times.attention_tp,
        "DenseMLP": times.dense,
        "SharedExpert": times.shared,
        "RoutedExpert": times.routed,
        "Dispatch": times.dispatch,
        "Combine": times.combine,
        "Sum": 3 * (times.attention + times.dense) + 58 * (times.attention_tp + times.shared + times.routed),
    }
    assert found == pytest.approx({name: printed[name] for name in found}, rel=1e-9)


def test_preemptions_have_the_requested_rate() -> None:
    window = figure_13.preemptions(8, 0.1, 1)
    assert window.seconds == 3600.0 * figure_13.MOST_HOURS
    gone = [batch.seconds for batch in window.batches if not batch.events[0].add]
    there = 8 * figure_13.MOST_HOURS * 0.5 / 0.6  # half of the absent nodes return within an hour
    assert len(gone) / there == pytest.approx(0.1, rel=0.1)
    assert all(a.seconds <= b.seconds for a, b in zip(window.batches, window.batches[1:], strict=False))


def test_replicas_reduce_the_cost_of_an_imbalance(numbers: Path) -> None:
    loads = figure_13.zipf(0.8)
    pace = figure_13.Pace(times=PerfModel.read(numbers).layer(4096, tp=8, dp=8))
    even = pace.step_s(np.ones(58), np.ones(58))
    ours = figure_13.Sized(pace=pace, loads=loads).step_s(16)
    assert even <= ours < figure_13.chunks_of(pace, loads).seconds


def test_holdfast_is_fastest_in_a_small_cluster_with_preemptions(numbers: Path) -> None:
    pace = figure_13.Pace(times=PerfModel.read(numbers).layer(4096, tp=8, dp=8))
    players = figure_13.compared_policies(pace, figure_13.zipf(0.5)[:2])
    options = Namespace(trials=2, restart_s=180.0)
    taken = {name: figure_13.hours_taken(policy, 20, 0.05, options) for name, policy in players.items()}
    assert (taken["holdfast"] < taken["DS(FT)"]).all()
    assert (taken["holdfast"] < taken["DS"]).all()
    options.trials = 1
    ours = players["holdfast"]
    undisturbed = figure_13.hours_taken(ours, 20, 1e-9, options)
    expected = figure_13.SAMPLES / (20 * figure_13.SEQUENCES) * ours.step_s(20) / 3600
    assert undisturbed[0] == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--trials", "1"), "--trials: 1 is not an integer of at least 2"),
        (("--zipf", "nan"), "--zipf: nan is not a finite number of 0 or more"),
        (("--zipf", "-1"), "--zipf: -1 is no"),
        (("--restart-s", "-1"), "--restart-s: -1 is no"),
    ],
)
def test_invalid_options_of_figure_13_are_refused(
    words: tuple[str, str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        figure_13.main(words)
    assert ended.value.code == 2
    assert told in capsys.readouterr().err
