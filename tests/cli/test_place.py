"""`holdfast place`: its JSON, its pictures, and one clear line for every bad input."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from holdfast.cli import app
from holdfast.errors import EXIT_BAD_INPUT, BadInputError

LOADS = [[50, 10, 10, 10], [10, 10, 20, 40]]


@pytest.fixture
def loads(tmp_path: Path) -> Path:
    path = tmp_path / "loads.json"
    path.write_text(json.dumps(LOADS))
    return path


def place(*arguments: object) -> str:
    result = CliRunner().invoke(app, ["place", *map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def bad(*arguments: object) -> str:
    with pytest.raises(BadInputError) as error:
        place(*arguments)
    assert error.value.exit_code == EXIT_BAD_INPUT == 2
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("strategy", ["best", "mro", "spread", "compact"])
def test_json_has_the_promised_shape(loads, strategy):
    plan = json.loads(place("--loads", loads, "--nodes", 5, "--slots", 3, "--strategy", strategy, "--json"))
    assert set(plan) == {"layers", "recovery", "fault_threshold"}
    assert set(plan["recovery"]) == {"model", "layers"}
    assert len(plan["layers"]) == len(plan["recovery"]["layers"]) == 2
    for layer in plan["layers"]:
        assert [len(held) for held in layer["nodes"]] == [3] * 5
        assert sum(layer["replicas"]) == 15
        placed = np.bincount(np.concatenate(layer["nodes"]), minlength=4)
        assert placed.tolist() == layer["replicas"]
    for curve in [plan["recovery"]["model"], *plan["recovery"]["layers"]]:
        assert list(curve) == ["1", "2", "3", "4", "5"]
    model, layers = plan["recovery"]["model"], plan["recovery"]["layers"]
    assert all(model[lost] <= min(layer[lost] for layer in layers) + 1e-12 for lost in model)
    given = plan["fault_threshold"]["given"]
    assert plan["fault_threshold"]["asked"] == 2
    assert given == (1 if strategy == "compact" else 2)
    fewest = min(len({n for n, held in enumerate(y["nodes"]) if e in held}) for y in plan["layers"] for e in range(4))
    assert fewest >= given


def test_best_is_the_default_strategy(loads):
    arguments = ("--loads", loads, "--nodes", 5, "--slots", 3, "--json")
    assert place(*arguments) == place(*arguments, "--strategy", "best")


def test_csv_json_and_npz_give_the_same_plan(loads, tmp_path):
    table, recording = tmp_path / "loads.csv", tmp_path / "loads.npz"
    table.write_text("a,b,c,d\n" + "\n".join(",".join(map(str, row)) for row in LOADS) + "\n")
    np.savez(recording, iterations=[1, 11], tokens=[np.zeros((2, 4), int), LOADS])
    size = ("--nodes", 4, "--slots", 3, "--json")
    plans = [place("--loads", loads, *size), place("--loads", table, *size)]
    plans.append(place("--loads", recording, "--iteration", 11, *size))
    assert len(set(plans)) == 1


def test_slots_may_differ_per_node(loads):
    plan = json.loads(place("--loads", loads, "--slots", "2,3,4,5", "--json"))
    assert [len(held) for held in plan["layers"][0]["nodes"]] == [2, 3, 4, 5]


def test_a_threshold_that_does_not_fit_is_lowered_and_said(loads):
    arguments = ("--loads", loads, "--nodes", 2, "--slots", 4, "--fault-threshold", 3)
    assert json.loads(place(*arguments, "--json"))["fault_threshold"] == {"asked": 3, "given": 2}
    assert "asked 3, given 2" in place(*arguments)


def test_layers_without_load_are_uniform_and_said(tmp_path):
    path = tmp_path / "loads.json"
    path.write_text("[[0, 0, 0], [1, 1, 1]]")
    plan = json.loads(place("--loads", path, "--nodes", 3, "--slots", 2, "--json"))
    assert plan["uniform_layers"] == [0]
    assert plan["layers"][0]["replicas"] == [2, 2, 2]
    assert "planned as uniform: layers 0" in place("--loads", path, "--nodes", 3, "--slots", 2)


def test_racks_are_spread_over_and_reported(loads, tmp_path):
    names, listed = tmp_path / "racks.txt", tmp_path / "racks.json"
    names.write_text("a\na\nb\nb\n")
    listed.write_text('["a", "a", "b", "b"]')
    size = ("--loads", loads, "--nodes", 4, "--slots", 3)
    plan = json.loads(place(*size, "--racks", names, "--json"))
    assert plan["recovery"]["racks"] == {"1": 1.0, "2": 0.0}
    assert plan == json.loads(place(*size, "--racks", listed, "--json"))
    assert "lost racks" in place(*size, "--racks", names)


def test_failure_weights_are_taken(loads):
    size = ("--loads", loads, "--nodes", 5, "--slots", 3, "--json")
    plan = json.loads(place(*size, "--failure-weights", "1:0.5,3:0.5"))
    assert plan["recovery"]["model"]["1"] == 1.0


def test_table_compares_all_strategies(loads):
    table = place("--loads", loads, "--nodes", 5, "--slots", 3)
    header = next(line for line in table.splitlines() if line.strip().startswith("lost"))
    assert header.split() == ["lost", "best", "mro", "spread", "compact"]
    assert "node 4:" in table


def test_plot_writes_a_picture(loads, tmp_path):
    picture = tmp_path / "placement.png"
    place("--loads", loads, "--nodes", 4, "--slots", 3, "--plot", picture, "--json")
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size > 10_000


def test_too_few_slots_say_what_to_change(loads):
    message = bad("--loads", loads, "--nodes", 1, "--slots", 3)
    assert message == "4 experts need 4 slots, but 1 node has 3: raise slots to 4 a node, or nodes to 2"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[[1, -2]]", "expert 1 is -2"),
        ("[[1, NaN]]", "expert 1 is nan"),
        ("[[1, 2], [3]]", "not a table"),
        ("[[[1]]]", "shape (1, 1, 1)"),
        ("{}", "not a table"),
        ("[[1,", "line 1: not JSON"),
        ("[]", "shape (1, 0)"),
    ],
)
def test_bad_loads_are_named(tmp_path, text, words):
    path = tmp_path / "loads.json"
    path.write_text(text)
    assert words in bad("--loads", path, "--nodes", 2, "--slots", 3)


@pytest.mark.parametrize(
    ("text", "words"),
    [("1,2\n3\n", "line 2: 1 experts"), ("1,2\nx,3\n", "line 2"), ("a,b\n", "holds no layer"), ("", "holds no layer")],
)
def test_bad_csv_is_named_with_its_line(tmp_path, text, words):
    path = tmp_path / "loads.csv"
    path.write_text(text)
    assert words in bad("--loads", path, "--nodes", 2, "--slots", 3)


def test_bad_recordings_are_named(tmp_path):
    path = tmp_path / "loads.npz"
    np.savez(path, iterations=[1, 11], tokens=np.ones((2, 1, 3), int))
    size = ("--nodes", 2, "--slots", 3)
    assert "7 is not recorded: choose one of 1, 11" in bad("--loads", path, "--iteration", 7, *size)
    assert "--iteration is missing" in bad("--loads", path, *size)
    np.savez(path, iterations=[1], tokens=np.ones((2, 1, 3), int))
    assert "shape (2, 1, 3) with 1 iterations" in bad("--loads", path, "--iteration", 1, *size)
    np.savez(path, other=[1])
    assert "tokens[iteration, layer, expert]" in bad("--loads", path, *size)
    path.write_bytes(b"PK\x03\x04 nonsense")
    assert "not a .npz file" in bad("--loads", path, *size)
    path.write_bytes(b"nonsense")
    assert "needs numbers named tokens" in bad("--loads", path, *size)


def test_other_bad_options_are_named(loads, tmp_path):
    size = ("--loads", loads, "--nodes", 2, "--slots", 3)
    assert "cannot be read" in bad("--loads", tmp_path / "none.json", "--nodes", 2, "--slots", 3)
    assert "must end in .npz, .csv or .json" in bad("--loads", tmp_path / "x.txt", "--nodes", 2, "--slots", 3)
    assert "for .npz recordings only" in bad(*size, "--iteration", 1)
    assert "choose one of best, mro" in bad(*size, "--strategy", "magic")
    assert "fault threshold is 0" in bad(*size, "--fault-threshold", 0)
    assert "--slots is 'x'" in bad("--loads", loads, "--nodes", 2, "--slots", "x")
    assert "3 numbers for 2 nodes" in bad("--loads", loads, "--nodes", 2, "--slots", "1,2,3")
    assert "at least 1 slot" in bad("--loads", loads, "--nodes", 2, "--slots", "0")
    assert "--nodes is missing" in bad("--loads", loads, "--slots", "3")
    assert "nodes is 0" in bad("--loads", loads, "--nodes", 0, "--slots", "3")
    assert "must end in .png" in bad(*size, "--plot", tmp_path / "x.gif")
    assert "cannot be written" in bad(*size, "--plot", tmp_path / "none" / "x.png")


def test_bad_weights_and_racks_are_named(loads, tmp_path):
    size = ("--loads", loads, "--nodes", 2, "--slots", 3)
    assert "sum to 0.7" in bad(*size, "--failure-weights", "1:0.5,2:0.2")
    assert "only 2 nodes" in bad(*size, "--failure-weights", "3:1")
    assert "LOST:SHARE" in bad(*size, "--failure-weights", "half")
    assert "LOST:SHARE" in bad(*size, "--failure-weights", "1:0.5,1:0.5")
    assert "is nan" in bad(*size, "--failure-weights", "1:nan")
    racks = tmp_path / "racks.txt"
    assert "cannot be read" in bad(*size, "--racks", racks)
    racks.write_text("a\n")
    assert "names 1 racks for 2 nodes" in bad(*size, "--racks", racks)
    listed = tmp_path / "racks.json"
    listed.write_text("{}")
    assert "list of rack names" in bad(*size, "--racks", listed)
