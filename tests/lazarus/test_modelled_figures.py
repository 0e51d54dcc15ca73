"""Tests of figures 6, 7, 9, 11, 12 and 14: each script runs once in small, and reproduces the paper's values."""

from __future__ import annotations

from pathlib import Path

import figure_10a
import figures_6_7
import figures_9_11
import figures_12_14
import figures_measured
import pytest
from modelled_job import CAUSES
from setting import MODELS
from testbed import PRINTED_DS, PRINTED_LAZARUS, Hardware

from made_events import joined, made


def test_the_fitted_constants_reproduce_the_printed_rates(recorded: Path) -> None:
    testbed = Hardware(model=MODELS["M"], data=recorded)
    steps = range(100, 2700, 10)
    for policy, printed in (
        (testbed.elastic("Lazarus"), PRINTED_LAZARUS),
        (testbed.static("DS", live=False), PRINTED_DS),
    ):
        formation = policy.form(tuple(map(str, range(10))), 100)
        assert formation is not None
        seconds = 0.0
        for step in steps:
            formation = policy.rebalance(formation, step) if step % 200 == 0 else formation
            seconds += formation.step_s(step)
        assert formation.samples * len(steps) / seconds == pytest.approx(printed, rel=1e-6)


def test_recovery_costs_follow_from_printed_values(recorded: Path) -> None:
    testbed = Hardware(model=MODELS["L"], data=recorded)
    ds = testbed.costs(testbed.static("DS", live=False), 10, rare=4)
    ours = testbed.costs(testbed.elastic("holdfast"), 10)
    assert (ds.checkpoint_every, ds.rebalance_every) == (200, 0)
    assert (ours.checkpoint_every, ours.rebalance_every) == (250, 200)
    assert ds.save_s == pytest.approx(1.7e9 * 14 / 1.25e9)
    assert ours.restart_s > ds.restart_s  # six slots to fill instead of four


def test_lazarus_is_faster_than_the_baselines_as_in_the_paper(recorded: Path) -> None:
    found = figures_6_7.compare(recorded, 6, "L", 1)
    samples = {name: figures_6_7.mean_samples(lived) for name, lived in found.items()}
    assert samples["Lazarus"] > 1.5 * max(samples["DS"], samples["DS(FT)"])
    assert samples["holdfast"] == pytest.approx(samples["Lazarus"], rel=0.05)


def test_the_modelled_job_survives_the_spot_trace(recorded: Path, tmp_path: Path) -> None:
    found = figures_9_11.compare(recorded, "S", figures_9_11.TRACES[0])
    for lived in found.values():
        assert sum(lived.seconds.values()) == pytest.approx(figures_9_11.SECONDS)
        assert set(lived.seconds) <= set(CAUSES)
    assert found["Lazarus"].share("effective") > found["DS"].share("effective")
    figures_9_11.draw(tmp_path, {"S": found})
    assert {path.name for path in tmp_path.iterdir()} == {"figure_9.png", "figure_11.png"}


def test_tutel_is_slower_because_of_padding(recorded: Path) -> None:
    found = figures_12_14.compare(recorded, 12, "S", 1)
    samples = {name: figures_6_7.mean_samples(lived) for name, lived in found.items()}
    assert samples["Lazarus"] > samples[figures_12_14.NO_PADDING] > max(samples["Tutel(FT)"], samples["Tutel"])


@pytest.mark.parametrize("script", [figures_6_7, figures_9_11, figures_12_14, figures_measured])
def test_missing_data_of_a_modelled_figure_is_reported(
    script: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert script.main(["--data", str(tmp_path), "--out", str(tmp_path)]) == 2
    assert "give --data DIR" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("script", "words", "told"),
    [
        (figures_6_7, ("--orders", "0"), "--orders: 0 is not an integer of at least 1"),
        (figures_6_7, ("--restart-s", "nan"), "--restart-s: nan is not a finite number of 0 or more"),
        (figures_6_7, ("--restart-s", "inf"), "--restart-s: inf is no"),
        (figures_12_14, ("--orders", "few"), "--orders: few is not an integer"),
        (figures_measured, ("--seconds-per-token", "-1"), "--seconds-per-token: -1 is not a finite number above 0"),
        (figure_10a, ("--seconds-per-token", "0"), "--seconds-per-token: 0 is no"),
        (figure_10a, ("--seconds-per-token", "soon"), "--seconds-per-token: soon is no"),
        (figure_10a, ("--tokens", "0"), "--tokens: 0 is no"),
        (figure_10a, ("--repeats", "0"), "--repeats: 0 is no"),
    ],
)
def test_invalid_options_of_a_modelled_figure_are_refused(
    script: object, words: tuple[str, str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        script.main(words)
    assert ended.value.code == 2
    assert told in capsys.readouterr().err


def test_time_shares_of_a_measured_job_start_at_its_first_step() -> None:
    events = [joined("a"), made("generation_started", world_size=1)]
    events += [made("step_committed", 5.0 + step, step=step, samples=10, world_size=1, step_s=1.0) for step in range(9)]
    shares = figures_measured.time_shares(events)
    assert sum(shares.values()) == pytest.approx(1.0)
    assert shares["effective"] == pytest.approx(1.0)
    seconds, samples = figures_measured.progress(events, 60.0)
    assert seconds == [60.0 * number for number in range(9)]
    assert samples == [10.0 * number for number in range(9)]
