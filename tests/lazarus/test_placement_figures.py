"""Tests of figures 2, 4, 5, 8, 10b and Table 2: hand calculations, and one run of each script."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import figure_2
import figure_8
import figures_4_5
import numpy as np
import pytest
import table_2
from setting import MODELS, NODES, Recording, make_testbed_plan

from holdfast.planning import PlacementProblem, recovery_curve, strategy_named


def test_the_peak_share_of_two_experts_is_searched_from_an_iteration() -> None:
    tokens = np.array([[[5, 5, 0]], [[6, 2, 2]], [[4, 3, 3]]])
    shares = figure_2.shares_of(tokens)
    iterations = np.array([1, 11, 21])
    assert figure_2.find_peak(shares, iterations, 0, 0) == figure_2.Peak(share=1.0, iteration=1)
    assert figure_2.find_peak(shares, iterations, 0, 2) == figure_2.Peak(share=0.8, iteration=11)


@pytest.mark.parametrize("case", figures_4_5.PRINTED, ids=lambda case: case.name)
def test_the_printed_placements_survive_the_losses_given_in_the_paper(case: figures_4_5.Case) -> None:
    pairs = figures_4_5.surviving_sets(case.counts)
    assert len(pairs) == (4 if case.paper is None else case.paper)
    if case.name == "plan A":
        assert pairs == [(1, 2), (1, 3), (1, 4), (2, 4), (2, 5)]
    cases = [one for one in figures_4_5.PRINTED if one.figure == case.figure]
    assert {tuple(one.counts.sum(axis=1)) for one in cases} == {tuple(case.counts.sum(axis=1))}
    assert len(figures_4_5.surviving_sets(figures_4_5.place_by_best(case).counts)) == figures_4_5.count_best_survivals(
        case
    )


def test_a_hot_expert_receives_a_multiple_of_its_even_share() -> None:
    for ratio in (1, 2, 4):
        tokens = figure_8.hot_expert_loads(ratio)[0]
        assert tokens[0] * 8 == ratio * tokens.sum()
        assert len(set(tokens[1:])) == 1


def test_survival_by_number_of_lost_nodes_matches_enumeration(recorded: Path) -> None:
    loads = Recording(recorded, MODELS["L"]).tokens_at(200)
    counts = figure_8.spread_by_number(make_testbed_plan(loads, NODES, "spread").replicas)
    alive = [counts[:, :, left].any(axis=2).all() for left in combinations(range(NODES), NODES - figure_8.PAPER_LOST)]
    assert figure_8.survival(counts)[figure_8.PAPER_LOST] == pytest.approx(np.mean(alive))
    # The paper's value for spread.
    assert round(float(np.mean(alive)), 2) == 0.12


def test_unaligned_layers_survive_fewer_losses() -> None:
    replicas = np.tile([2, 2, 2], (3, 1))
    problem = PlacementProblem(replicas=replicas, slots=np.full(3, 2), fault_threshold=1)
    counts = strategy_named("mro").place(problem)
    assert (figure_8.mean_unaligned_survival(counts) <= recovery_curve(counts).probability + 1e-12).all()


def test_a_placement_repair_moves_only_missing_replicas() -> None:
    loads = np.array([[900, 300, 200, 100, 100, 100, 50, 50]])
    before = make_testbed_plan(loads, NODES, "best").counts
    left = (0, 1, 2, 4, 5, 6, 7, 8)
    after = table_2.repair_placement(before[:, :, left], loads)
    assert (after.sum(axis=1) == 6).all()
    assert (after > 0).sum(axis=2).min() >= 2
    assert ((after > 0) & (before[:, :, left] == 0)).sum() <= 2


def test_only_survivable_losses_are_enumerated() -> None:
    counts = np.zeros((1, 2, 3), dtype=np.int64)
    counts[0, 0, :2] = counts[0, 1, 1:] = 1
    assert table_2.losses(counts, 2) == [(1,)]
    assert table_2.losses(counts, 1) == [(0, 1), (0, 2), (1, 2)]


@pytest.mark.parametrize("script", [figure_2, figures_4_5, figure_8], ids=lambda script: script.__name__)
def test_a_figure_script_prints_a_table_and_draws_pictures(script: object, recorded: Path, tmp_path: Path) -> None:
    words = ["--data", str(recorded), "--out", str(tmp_path)]
    assert script.main(words) == 0
    assert all(picture.stat().st_size > 10_000 for picture in tmp_path.glob("*.png"))
    assert list(tmp_path.glob("*.png"))


@pytest.mark.parametrize("script", [figure_2, figure_8, table_2], ids=lambda script: script.__name__)
def test_missing_data_of_a_placement_figure_is_reported(
    script: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert script.main(["--data", str(tmp_path), "--out", str(tmp_path)]) == 2
    assert "give --data DIR" in capsys.readouterr().err
