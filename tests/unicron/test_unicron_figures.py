"""Tests of Unicron's figures: fitted and predicted values match, and no baseline's plan beats holdfast's."""

from __future__ import annotations

from pathlib import Path

import pytest
from evaluation import GPUS, PAPERS_RATIOS
from figure_8_redone import MICRO_BATCHES, STAGES, disturbed, undisturbed
from figure_11 import COMPARED, FITTED, Totals, fit_efficiencies, simulate_totals
from figures_9_10 import apportion, case_of
from tables_2_3 import DETECTED, TABLE_2, plan_rows, read_detected

from holdfast.errors import BadInputError
from holdfast.planner.fleet.pool.gpt_tasks import TABLE_3
from holdfast.planner.fleet.pool.outages import TRACE_A, TRACE_B
from holdfast.planner.fleet.pool.systems import SYSTEMS

SEEDS = 10


@pytest.fixture(scope="module")
def totals() -> tuple[Totals, Totals]:
    systems = [SYSTEMS[name] for name in COMPARED]
    return simulate_totals(TRACE_A, SEEDS, systems), simulate_totals(TRACE_B, SEEDS, systems)


def test_the_fit_matches_trace_a_and_predicts_trace_b_within_a_tenth(totals: tuple[Totals, Totals]) -> None:
    on_a, on_b = totals
    efficiencies = fit_efficiencies(on_a)
    for name in FITTED:
        assert 0.1 < efficiencies[name] < 0.5
        assert on_a.ratio(name, efficiencies[name]).mean() == pytest.approx(PAPERS_RATIOS["trace a"][name])
        assert on_b.ratio(name, efficiencies[name]).mean() == pytest.approx(PAPERS_RATIOS["trace b"][name], rel=0.1)


def test_predicted_megatron_ratios_agree_with_the_paper(totals: tuple[Totals, Totals]) -> None:
    for found, name in zip(totals, PAPERS_RATIOS, strict=True):
        without, spare = (float(found.ratio(system).mean()) for system in ("megatron", "megatron-spare"))
        assert 1.0 < spare < without
        assert without == pytest.approx(PAPERS_RATIOS[name]["megatron"], rel=0.2)


def test_no_baseline_plan_is_better_than_ours_on_table_3() -> None:
    for case in TABLE_3:
        wafs, ways = case_of(case)
        assert wafs["holdfast"] == max(wafs.values())
        assert all(sum(way) <= GPUS for way in ways.values())
    for row in plan_rows():
        shares = [float(cell) for cell in row[4:]]
        assert shares[0] == 1.0 >= max(shares)


def test_proportional_shares_use_every_gpu() -> None:
    assert apportion([1.0] * 6, 128) == [22, 22, 21, 21, 21, 21]
    assert apportion([1.0, 3.0], 4) == [1, 3]


def test_detection_times_are_read_from_the_output_of_the_benchmark(tmp_path: Path) -> None:
    printed = tmp_path / "detect.txt"
    printed.write_text(
        "".join(f"{case:16s} {'5.6 s':>11s} {'5.7 s':>8s} {0.1:8.3f}  0.01 (0..1)\n" for *_, case in TABLE_2)
    )
    assert {read_detected(printed)[case] for *_, case in TABLE_2} == {"0.01 (0..1)"}
    printed.write_text("nothing\n")
    with pytest.raises(BadInputError, match="has no line of 'lost node'"):
        read_detected(printed)
    assert read_detected(DETECTED)["step"].startswith("median step")


def test_each_micro_batch_of_figure_8_is_computed_once_after_a_loss() -> None:
    work, shares = disturbed()
    assert sorted(one for share in shares for one in share) == list(range(MICRO_BATCHES))
    for stage in range(STAGES):
        done = [one.micro_batch for lane in work[:-1] for one in lane if (one.what, one.stage) == ("B", stage)]
        assert sorted(done) == list(range(MICRO_BATCHES))
    for lane in (*work, *undisturbed()):
        for one in lane:
            others = [other for other in lane if other.stage == one.stage and other is not one]
            assert all(other.end <= one.begin or one.end <= other.begin for other in others), (
                "a stage runs one task at a time"
            )
