"""Tests of the sparing commands as a user runs them."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from holdfast.cli import app, main
from holdfast.errors import EXIT_BAD_INPUT, BadInputError
from holdfast.planner.reliability.sparing.evaluation import evaluate
from holdfast.planner.reliability.sparing.reference import catalina
from places import EXAMPLES

EXAMPLE = str(EXAMPLES / "catalina.toml")
COMMANDS = ("plan", "map", "validate", "fit")


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["spares", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def run_json(*arguments: str):
    return json.loads(run(*arguments, "--json"))


@pytest.fixture
def small(tmp_path: Path) -> str:
    """Return the file of a cluster that is simulated quickly."""
    text = Path(EXAMPLE).read_text()
    text = text.replace("racks_per_zone = 256", "racks_per_zone = 72").replace("zones = 4 ", "zones = 1 ")
    path = tmp_path / "small.toml"
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_each_command_has_usage_and_examples(command: str) -> None:
    text = run(command, "--help")
    assert "Usage" in text
    assert "Examples:" in text


def test_plan_json_has_the_unrounded_evaluation() -> None:
    printed = run_json("plan", EXAMPLE)
    evaluation = evaluate(catalina())
    assert printed["best"] == int(evaluation.best)
    needed = {
        "block_gpus", "working_gpus", "spare_gpus", "spare_blocks", "stranded_blocks", "block_mtbf_hours", "p_blocked",
        "beta", "gamma", "cett", "hardware_gain", "model_gain", "goodput_gpus",
    }  # fmt: skip
    for row, outcome in zip(printed["strategies"], evaluation.strategies, strict=True):
        assert needed <= set(row)
        assert row["cett"] == float(outcome.cett)
        assert row["goodput_gpus"] == float(outcome.goodput_gpus)
        assert row["no_goodput_reason"] is None
        assert sum(row["losses"].values()) + row["cett"] == pytest.approx(1.0)


def test_plan_prints_its_recommendation_and_draws_plots(tmp_path: Path) -> None:
    text = run("plan", EXAMPLE, "--plot", str(tmp_path / "plots"))
    for words in ("Best: 72/64", "Runner-up: 72/72", "1.0242 times", "Keep 4 of each zone's 256 blocks idle"):
        assert words in text
    assert {path.name for path in (tmp_path / "plots").iterdir()} == {"losses.png", "spare_blocks.png"}
    assert max(len(line) for line in text.splitlines() if line.count("  ") > 3) <= 80, "tables fit a terminal"


def test_plan_gives_the_reason_if_no_strategy_has_goodput(tmp_path: Path, small: str) -> None:
    path = tmp_path / "hopeless.toml"
    text = Path(small).read_text()
    path.write_text(text.replace("= 20_000\nmtbf_rack", "= 0.5\nmtbf_rack").replace("= 10_000", "= 0.1"))
    assert "No strategy leaves any goodput" in run("plan", str(path))
    for row in run_json("plan", str(path))["strategies"]:
        assert row["goodput_gpus"] == pytest.approx(0.0, abs=1e-9)
        assert row["no_goodput_reason"]


def test_every_plot_has_a_title(small: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    titles: dict[str, str] = {}

    def note(figure: Any, directory: Path, name: str) -> Path:
        titles[name] = figure.get_suptitle()
        return directory / name

    monkeypatch.setattr("holdfast.cli.planner.spares.plots._save", note)
    run("plan", EXAMPLE, "--plot", str(tmp_path))
    run("map", EXAMPLE, "--points", "9", "--plot", str(tmp_path))
    assert titles.keys() == {"losses.png", "spare_blocks.png", "map.png"}
    assert all(titles.values())


def test_map_shows_the_best_strategy_over_mtbf_and_mttr(tmp_path: Path) -> None:
    arguments = ("map", EXAMPLE, "--points", "9", "--mtbf", "1:1e5", "--plot", str(tmp_path))
    maps = run_json(*arguments)
    assert len(maps) == 4
    assert len(maps[0]["best"]) == len(maps[0]["best"][0]) == 9
    for one in maps:
        assert sum(one["shares"]) + one["no_goodput_share"] == pytest.approx(1.0)
    assert (tmp_path / "map.png").stat().st_size > 10_000
    assert "both gains and placement" in run(*arguments[:4])


def test_validate_compares_simulation_and_closed_form(small: str) -> None:
    arguments = ("validate", small, "--replications", "4", "--hours", "1000")
    printed = run_json(*arguments)
    assert len(printed["comparisons"]) == 6 * 4
    assert len(printed["repair_mixes"]) == 5
    assert all(row["cett"]["low"] < row["cett"]["mean"] < row["cett"]["high"] for row in printed["comparisons"])
    text = run(*arguments)
    assert "closed-form values lie within" in text


def test_fit_reports_the_trace_and_the_recommended_strategy(small: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    rows = [f"{at * 40000 + at % 3},{at * 40000 + at % 3 + 3600 * (1 + at % 7)},n{at % 20}" for at in range(200)]
    trace.write_text("start_s,end_s,node\n" + "\n".join(rows) + "\n")
    # Two strategies are enough, and quicker.
    two = tmp_path / "two.toml"
    two.write_text("[[strategy]]".join(Path(small).read_text().split("[[strategy]]")[:4]))
    arguments = ("fit", str(trace), "--nodes", "3000", "--cluster", str(two), "--replications", "2")
    printed = run_json(*arguments, "--plot", str(tmp_path))
    assert printed["fit"]["failures"] == 200
    assert printed["fit"]["mttr_hours"]["mean"] == pytest.approx(4.0, rel=0.02)
    assert len(printed["consequence"]["strategies"]) == 2
    assert (tmp_path / "fit.png").exists()
    text = run(*arguments)
    assert "MTBF per node" in text
    assert "The closed form recommends" in text


def test_plan_recommends_the_number_of_standbys_with_most_goodput() -> None:
    printed = run_json("plan", EXAMPLE)["standbys"]
    goodput = {plan["standbys"]: plan["goodput_nodes"] for plan in printed["plans"]}
    assert goodput[printed["best"]] == max(goodput.values())
    assert goodput[printed["best"]] - goodput[0] == pytest.approx(printed["gain_nodes"])
    assert "No standby pays" in run("plan", EXAMPLE, "--down-with", "60", "--down-without", "60")


def test_a_cluster_unusable_with_any_number_of_standbys_is_reported(tmp_path: Path) -> None:
    """The output once was "26,176 standbys, 1161.43 % more goodput"."""
    hopeless = tmp_path / "hopeless.toml"
    text = Path(EXAMPLE).read_text()
    hopeless.write_text(re.sub(r"(mtbf_tray_hours *= *)[0-9_.e]+", r"\g<1>1", text))
    options = ("plan", str(hopeless), "--down-with", "60", "--down-without", "600")
    said = run(*options)
    assert "No number of standbys makes this cluster usable: at most " in said
    assert "more goodput than with none" not in said
    assert run_json(*options)["standbys"]["hopeless"]
    assert not run_json("plan", EXAMPLE)["standbys"]["hopeless"]


def test_fit_counts_node_failures_as_tray_failures(small: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    starts = [at * 40_000 + at * 37 % 101 * 60 for at in range(1, 200)]
    rows = [f"{start},{start + 3600 + 60 * (at % 7)},n{at % 20}" for at, start in enumerate(starts)]
    trace.write_text("start_s,end_s,node\n" + "\n".join(rows) + "\n")
    arguments = ("fit", str(trace), "--nodes", "3000", "--cluster", small, "--replications", "2")
    text = run(*arguments)
    assert "Interruptions of a job on all observed nodes: 199 in the log, 199 by the fit." in text
    assert "Of whole racks: 0 (0.0 %; nothing in the log says that a whole rack failed" in text
    given = run_json(*arguments, "--rack-share", "0.5")["consequence"]["interruptions"]
    assert given == {"log": 199.0, "fit": pytest.approx(199.0), "of_racks": 99.5, "evidence": "given"}
    all_racks = run_json(*arguments, "--rack-share", "1")["consequence"]["interruptions"]
    assert all_racks["fit"] == pytest.approx(199.0)


def test_a_node_larger_than_a_rack_is_refused(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("start_s,end_s,node\n0,3600,a\n7200,14400,b\n")
    result = CliRunner().invoke(app, ["spares", "fit", str(trace), "--nodes", "9", "--node-gpus", "73"])
    assert "--node-gpus = 73: a rack of this cluster has 72 GPUs" in str(result.exception)
    assert result.exit_code != 0


def test_plan_compares_checkpoint_periods() -> None:
    printed = run_json("plan", EXAMPLE)["checkpoint"]
    frozen = {row["method"]: row["gamma_frozen"] for row in printed["periods"]}
    assert min(frozen, key=frozen.__getitem__) == "best, clock frozen"
    assert frozen["in CLUSTER.toml"] == pytest.approx(float(evaluate(catalina()).strategies[1].gamma))
    options = ("--job-mtbf-hours", "1", "--save-seconds", "10", "--detect-seconds", "0", "--restart-seconds", "60")
    assert "Daly" in run("plan", *options)
    assert list(run_json("plan", *options)) == ["checkpoint"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("plan", "none.toml"), "cannot be read"),
        (("map", EXAMPLE, "--mtbf", "5"), "--mtbf = '5': must be two numbers"),
        (("map", EXAMPLE, "--mttr", "9:1"), "--mttr = '9:1': FROM must be above 0 and below TO"),
        (("map", EXAMPLE, "--mttr", "0:1"), "FROM must be above 0"),
        (("map", EXAMPLE, "--points", "1"), "--points = 1"),
        (("map", EXAMPLE, "--points", "100000"), "--points = 100000: must be 2 or more, and at most 1,000"),
        (("validate", EXAMPLE, "--replications", "1"), "replications = 1: must be 2 or more"),
        (("validate", EXAMPLE, "--replications", "1000000000"), "replications = 1000000000: must be at most 100,000"),
        (("validate", EXAMPLE, "--hours", "inf"), "hours = inf: must be a finite number"),
        (("validate", EXAMPLE, "--ticket-hours", "inf"), "--ticket-hours = inf: must be a finite number"),
        (("plan", EXAMPLE, "--down-without", "inf"), "down_seconds_without = inf: must be a finite number"),
        (("plan", EXAMPLE, "--save-seconds", "inf"), "--save-seconds = inf: must be a finite number"),
        (("validate", EXAMPLE, "--auto-hours", "-1"), "--auto-hours = -1: must be greater than 0"),
        (("plan", EXAMPLE, "--down-with", "500"), "down_seconds_with = 500: must be at most"),
        (("plan",), "CLUSTER.toml is missing"),
        (("plan", "--down-with", "5"), "CLUSTER.toml is missing"),
        (("plan", "--job-mtbf-hours", "5"), "--save-seconds: is missing"),
        (("plan", EXAMPLE, "--save-seconds", "0"), "--save-seconds = 0: must be greater than 0"),
        (("plan", EXAMPLE, "--plot", "/dev/null/x"), "--plot /dev/null/x: cannot be written"),
    ],
)
def test_bad_input_is_reported_in_one_line_with_exit_code_2(
    arguments: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["holdfast", "spares", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == EXIT_BAD_INPUT
    errors = capsys.readouterr().err.strip().splitlines()
    assert len(errors) == 1
    assert message in errors[0]


def test_validate_refuses_a_recovery_scheme_it_cannot_simulate(tmp_path: Path) -> None:
    path = tmp_path / "elastic.toml"
    scheme = 'scheme = "elastic"\ndown_seconds = 60  #'
    path.write_text(Path(EXAMPLE).read_text().replace('scheme = "synchronous"', scheme))
    with pytest.raises(BadInputError, match=r"only .synchronous. can be simulated"):
        run("validate", str(path))


def test_importing_the_command_line_does_not_import_matplotlib() -> None:
    import subprocess

    code = "import sys, holdfast.cli; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
