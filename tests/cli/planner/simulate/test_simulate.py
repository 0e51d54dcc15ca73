"""Tests of `holdfast simulate` as a user runs it, and of its documentation page."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from built_commands import BuiltCommands

from holdfast.cli import app
from holdfast.documents import Given, build_struct, keys_of
from holdfast.errors import EXIT_BAD_INPUT
from holdfast.planner.fleet.case import FleetCase, default_sources
from holdfast.planner.fleet.recovery import PARTS
from holdfast.planner.fleet.scale import OF_NO_EFFECT, SIZES, make_scale_rows
from places import EXAMPLES, ROOT

COMMANDS = BuiltCommands(app)
SMALL = ("--nodes", "32", "--mtbf", "200", "--hours", "200", "--replications", "3")
PAGE = (ROOT / "docs" / "scale.md").read_text()


def run(*words: str) -> str:
    code, out, complaint = COMMANDS.run("simulate", *words)
    assert (code, complaint) in ((0, ""), (None, "")), complaint
    return out


def test_the_report_shows_the_lost_time_and_its_largest_causes() -> None:
    said = run(*SMALL)
    for words in ("32 nodes; each fails every 8.33 days", "99 % confidence intervals", "ETTR", "goodput", "±"):
        assert words in said
    assert re.search(r"Of a recovery, \w+ takes most", said)
    assert re.search(r"most is this: [\w ,:']+, [\d.]+ ?% of all time", said)
    assert all(f"{part}:" in said for part in PARTS)
    tables = [line for line in said.splitlines() if not re.match("Of a recovery|Live recovery", line)]
    assert max(map(len, tables)) <= 80


def test_a_job_whose_restarts_never_make_progress_is_described_fully() -> None:
    said = run("--nodes", "4096", "--mtbf", "0.5", "--mttr", "1", "--hours", "2", "--replications", "2")
    assert "A job that restarts never makes progress" in said
    assert "Of a recovery," in said
    assert "Of all time that is lost," in said


def test_json_has_confidence_intervals_and_the_source_of_every_constant() -> None:
    printed = json.loads(run(*SMALL, "--set", "recovery.lease_s=5", "--json"))
    for way in ("holdfast", "restarts"):
        for name in ("ettr", "goodput", "failures_per_day", "rollbacks_per_day"):
            assert printed[way][name].keys() == {"mean", "low", "high"}
    assert printed["holdfast"]["per_failure_s"].keys() == set(PARTS)
    assert printed["dominant_part"] in PARTS
    assert printed["model"]["recovery"]["lease_s"] == 5.0
    assert printed["sources"].keys() == keys_of(FleetCase).keys()


def test_the_same_seed_gives_the_same_numbers() -> None:
    assert run(*SMALL) == run(*SMALL) != run(*SMALL, "--seed", "1")


def test_scale_shows_every_part_of_a_recovery_at_every_size() -> None:
    said = run("--scale", "--set", "recovery.groups=gloo")
    rows = [line.split() for line in said.splitlines() if re.match(r"[\d,]+ ", line)]
    assert [int(row[0].replace(",", "")) for row in rows] == list(SIZES)
    printed = json.loads(run("--scale", "--set", "recovery.groups=gloo", "--json"))
    assert [row["nodes"] for row in printed["rows"]] == list(SIZES)
    for row in printed["rows"]:
        assert row["total_s"] == pytest.approx(sum(row[f"{part}_s"] for part in PARTS))


def test_keys_refused_with_scale_would_not_change_its_table() -> None:
    shown, changed = make_scale_rows(FleetCase()), 0
    for name, key in keys_of(FleetCase).items():
        if not {name, name.split(".")[0]} & {*OF_NO_EFFECT}:
            continue
        assert isinstance(key.default, float | int)
        assert make_scale_rows(build_struct(FleetCase, {name: Given(2 * key.default + 1, name)})) == shown
        changed += 1
    assert changed > len(OF_NO_EFFECT)


def test_a_cluster_file_sets_the_model_and_options_override_it() -> None:
    words = (str(EXAMPLES / "catalina.toml"), "--scale", "--json")
    model = json.loads(run(*words))["model"]
    assert (model["nodes"], model["workers_per_node"], model["rack_nodes"]) == (36864, 2, 36)
    assert (model["mtbf_hours"], model["mtbf_rack_hours"], model["mttr_hours"]) == (20000.0, 10000.0, 24.0)
    assert (model["checkpoint"]["period_s"], model["restart"]["restart_s"]) == (250.0, 360.0)
    said = ("--set", "nodes=12", "--nodes", "100", "--mtbf", "30d", "--mttr", "90m")
    model = json.loads(run(words[0], *said, *SMALL[4:], "--json"))["model"]
    assert (model["nodes"], model["mtbf_hours"], model["mttr_hours"]) == (100, 720.0, 1.5)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--nodes", "0"], "--nodes is 0: it must be a whole number from 1 to 100000"),
        (["--nodes", "many"], "--nodes is 'many': it must be a whole number from 1 to 100000"),
        (["--mtbf", "-3"], "--mtbf is -3: it must be a number of hours, or a time such as 90m, 300h or 40d, above 0"),
        (["--mtbf", "0"], "--mtbf is 0: it must be"),
        (["--mttr", "nan"], "--mttr is nan: it must be"),
        (["--standbys", "-1"], "--standbys is -1: it must be a whole number from 0 to 100000"),
        (["--hours", "0"], "hours = 0: must be greater than 0"),
        (["--hours", "inf"], "hours = inf: must be a finite number"),
        (["--replications", "1"], "replications = 1: must be 2 or more"),
        (["--seed", "-1"], "seed = -1: must be 0 or more"),
        (["--mtbf", "0.0001", "--hours", "10000"], "failures per replication"),
        (["--set", "recovery.lease_s"], "--set is 'recovery.lease_s': write KEY=VALUE, such as recovery.lease_s=5"),
        (["--set", "recovery.leese_s=1"], "--set recovery.leese_s is not known; the nearest one is recovery.lease_s"),
        (["--set", "xyzzy=1"], "--set xyzzy is not known; docs/scale.md lists the keys"),
        (["--set", "recovery.lease_s=-1"], "--set recovery.lease_s is -1: it must be a number of seconds"),
        (["--set", "recovery.groups=mpi"], "--set recovery.groups is 'mpi': it must be one of nccl, gloo"),
        (["--set", "job.rounds=1.5"], "--set job.rounds is 1.5: it must be a whole number"),
        (["--set", "job.step_s=0"], "--set job.step_s is 0: it must be a number of seconds"),
        (["--scale", "--nodes", "5"], "--nodes is 5: --scale shows jobs of 4 to 16,384 nodes; leave one of them out"),
        (["--scale", "--set", "nodes=7"], "--set nodes is 7: --scale shows jobs of 4 to 16,384 nodes"),
        (["--scale", "--mtbf", "30d"], "--mtbf is 30d: --scale shows how long a recovery takes in jobs of 4 to 16,384"),
        (["--scale", "--standbys", "3"], "--standbys is 3: --scale shows how long a recovery takes"),
        (["--scale", "--set", "restart.detect_s=3"], "--set restart.detect_s is 3: --scale shows how long"),
        (["--scale", "--seed", "0"], "--seed is 0: --scale shows how long a recovery takes"),
        (["--scale", "--hours", "10"], "--hours is 10.0: --scale shows how long a recovery takes"),
        (["--set", "min_nodes=2000"], "min_nodes is 2000: it must be at most nodes, 1024"),
        (["no-such.toml"], "no-such.toml: cannot be read: No such file or directory"),
    ],
)
def test_bad_input_is_reported_in_one_line_with_key_value_and_rule(words: list[str], said: str) -> None:
    code, out, complaint = COMMANDS.run("simulate", *words)
    assert code == EXIT_BAD_INPUT
    assert out == ""
    assert said in complaint
    assert "\n" not in complaint


def test_an_invalid_cluster_file_is_refused_with_its_name_and_key(tmp_path: Path) -> None:
    text = (EXAMPLES / "catalina.toml").read_text()
    for old, new, said in (
        ("[failures]", "[failurs]", "failurs is not known; the nearest one is failures"),
        ("mttr_hours = 24", "mttr_hours = 0", "failures.mttr_hours = 0: must be greater than 0"),
        ("node_gpus = 2", "node_gpus = 5", "standbys.node_gpus = 5: must divide the cluster's 73728 GPUs"),
        ("node_gpus = 2", "node_gpus = 144", "standbys.node_gpus = 144: must divide gpus_per_rack = 72"),
    ):
        path = tmp_path / "cluster.toml"
        path.write_text(text.replace(old, new))
        code, _, complaint = COMMANDS.run("simulate", str(path))
        assert (code, complaint) == (EXIT_BAD_INPUT, f"{path}: {said}")


def test_the_page_lists_every_constant_with_its_default_and_source() -> None:
    for name, key in keys_of(FleetCase).items():
        (row,) = [row for row in PAGE.splitlines() if row.startswith(f"| `{name}` |")]
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        default = key.default if isinstance(key.default, str) else f"{key.default:,}".removesuffix(".0").lower()
        assert cells == [f"`{name}`", default, key.description, default_sources()[name]], name


@pytest.mark.parametrize("groups", ["nccl", "gloo"])
def test_the_page_shows_the_current_table_of_recovery_times_by_size(groups: str) -> None:
    for row in json.loads(run("--scale", "--set", f"recovery.groups={groups}", "--json"))["rows"]:
        numbers = (row[key] for key in ("detected_s", *(f"{part}_s" for part in PARTS), "total_s"))
        cells = [f"{row['nodes']:,} nodes x 8, {groups}", *(f"{number:.3g}" for number in numbers)]
        assert f"| {' | '.join(cells)} |" in PAGE.splitlines()


def test_every_constant_has_a_measurement_command_or_a_stated_source() -> None:
    for name, source in default_sources().items():
        measured = source.startswith("measured: ")
        assert measured or re.match(r"stated|the coordinator's$|TrainMover, |Llama 3: |stepfun-ai/", source), name
        assert not measured or re.search(r"benchmarks/\w+\.py|the same", source), name
