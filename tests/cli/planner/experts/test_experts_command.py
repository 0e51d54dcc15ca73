"""Tests of `holdfast experts plan`: its JSON, its pictures, and one clear line for every bad input."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
from built_commands import BuiltCommands
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from holdfast.cli import app
from holdfast.cli.planner.experts.inputs import read_loads
from holdfast.errors import EXIT_BAD_INPUT, BadInputError

PROPERTY = settings(derandomize=True, deadline=None)
LOADS = [[50, 10, 10, 10], [10, 10, 20, 40]]


@pytest.fixture
def loads(tmp_path: Path) -> Path:
    path = tmp_path / "loads.json"
    path.write_text(json.dumps(LOADS))
    return path


def place(*arguments: object) -> str:
    result = CliRunner().invoke(app, ["experts", "plan", *map(str, arguments)])
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
def test_json_output_has_the_documented_structure(loads, strategy):
    plan = json.loads(
        place("--loads", loads, "--nodes", 5, "--expert-slots", 3, "--expert-placement", strategy, "--json")
    )
    assert set(plan) == {"layers", "recovery", "fault_threshold", "busiest_node"}
    assert 1 <= plan["busiest_node"]["mean"] <= plan["busiest_node"]["worst_layer"]
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
    arguments = ("--loads", loads, "--nodes", 5, "--expert-slots", 3, "--json")
    assert place(*arguments) == place(*arguments, "--expert-placement", "best")


def test_csv_json_and_npz_give_the_same_plan(loads, tmp_path):
    table, recording = tmp_path / "loads.csv", tmp_path / "loads.npz"
    table.write_text("a,b,c,d\n" + "\n".join(",".join(map(str, row)) for row in LOADS) + "\n")
    np.savez(recording, iterations=[1, 11], tokens=[np.zeros((2, 4), int), LOADS])
    size = ("--nodes", 4, "--expert-slots", 3, "--json")
    plans = [place("--loads", loads, *size), place("--loads", table, *size)]
    plans.append(place("--loads", recording, "--iteration", 11, *size))
    assert len(set(plans)) == 1


def test_nodes_can_have_different_numbers_of_slots(loads):
    plan = json.loads(place("--loads", loads, "--expert-slots", "2,3,4,5", "--json"))
    assert [len(held) for held in plan["layers"][0]["nodes"]] == [2, 3, 4, 5]


def test_an_infeasible_fault_threshold_is_lowered_and_reported(loads):
    arguments = ("--loads", loads, "--nodes", 2, "--expert-slots", 4, "--fault-threshold", 3)
    assert json.loads(place(*arguments, "--json"))["fault_threshold"] == {"asked": 3, "given": 2}
    assert "asked 3, given 2" in place(*arguments)


def test_layers_without_load_are_planned_as_uniform_and_reported(tmp_path):
    path = tmp_path / "loads.json"
    path.write_text("[[0, 0, 0], [1, 1, 1]]")
    plan = json.loads(place("--loads", path, "--nodes", 3, "--expert-slots", 2, "--json"))
    assert plan["uniform_layers"] == [0]
    assert plan["layers"][0]["replicas"] == [2, 2, 2]
    assert "planned as uniform: layers 0" in place("--loads", path, "--nodes", 3, "--expert-slots", 2)


def test_replicas_are_spread_over_racks_and_rack_losses_are_reported(loads, tmp_path):
    names, listed = tmp_path / "racks.txt", tmp_path / "racks.json"
    names.write_text("a\na\nb\nb\n")
    listed.write_text('["a", "a", "b", "b"]')
    size = ("--loads", loads, "--nodes", 4, "--expert-slots", 3)
    plan = json.loads(place(*size, "--racks", names, "--json"))
    assert plan["recovery"]["racks"] == {"1": 1.0, "2": 0.0}
    assert plan == json.loads(place(*size, "--racks", listed, "--json"))
    assert "lost racks" in place(*size, "--racks", names)


def test_failure_weights_are_accepted(loads):
    size = ("--loads", loads, "--nodes", 5, "--expert-slots", 3, "--json")
    plan = json.loads(place(*size, "--failure-weights", "1:0.5,3:0.5"))
    assert plan["recovery"]["model"]["1"] == 1.0


def test_the_table_compares_all_strategies(loads):
    table = place("--loads", loads, "--nodes", 5, "--expert-slots", 3)
    header = next(line for line in table.splitlines() if line.strip().startswith("lost"))
    assert header.split() == ["lost", "best", "mro", "spread", "compact"]
    assert "node 4:" in table


def test_plot_writes_a_png_image(loads, tmp_path):
    picture = tmp_path / "placement.png"
    place("--loads", loads, "--nodes", 4, "--expert-slots", 3, "--plot", picture, "--json")
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size > 10_000


def test_too_few_slots_are_refused_with_a_remedy(loads):
    message = bad("--loads", loads, "--nodes", 1, "--expert-slots", 3)
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
        ("[[1" + "0" * 400 + "]]", "not a table"),
        ("[[1" + "0" * 5000 + "]]", "thousands of digits"),
        ("[" * 100_000 + "]" * 100_000, "too deep"),
        ("[" * 100 + "1" + "]" * 100, "not a table"),
    ],
)
def test_invalid_json_loads_are_refused_with_the_reason(tmp_path, text, words):
    path = tmp_path / "loads.json"
    path.write_text(text)
    assert words in bad("--loads", path, "--nodes", 2, "--expert-slots", 3)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("1,2\n3\n", "line 2: 1 experts"),
        ("1,2\nx,3\n", "line 2, column 1: 'x' is not a number"),
        ("1O,20\n30,40\n", "line 1, column 1: '1O' is not a number"),
        ("a,b\n\n1,2\n3,4O\n", "line 4, column 2: '4O' is not a number"),
        ("a,b\nc,d\n1,2\n", "line 2, column 1: 'c' is not a number"),
        ("1,2,\n", "line 1, column 3: '' is not a number"),
        ("1,2\n3,\x004\n", "line 2: holds a NUL byte"),
        ("x" * 200_000 + ",1\n", "line 1: not CSV"),
        ("9" * 400 + ",1\n", "expert 0 is inf"),
        ("a,b\n", "holds no layer"),
        ("", "holds no layer"),
    ],
)
def test_invalid_csv_loads_are_refused_with_the_reason(tmp_path, text, words):
    path = tmp_path / "loads.csv"
    path.write_text(text)
    assert words in bad("--loads", path, "--nodes", 2, "--expert-slots", 3)


@pytest.mark.parametrize("ending", ["csv", "json"])
def test_a_byte_order_mark_is_ignored(tmp_path, ending):
    # Spreadsheets write one; it once turned the first line into a header, and layer 0 was lost.
    plain, marked = tmp_path / f"plain.{ending}", tmp_path / f"marked.{ending}"
    text = json.dumps(LOADS) if ending == "json" else "\n".join(",".join(map(str, row)) for row in LOADS)
    plain.write_text(text)
    marked.write_text("\ufeff" + text)
    size = ("--nodes", 4, "--expert-slots", 3, "--json")
    assert place("--loads", marked, *size) == place("--loads", plain, *size)


def test_loads_near_the_largest_float_keep_their_proportions(tmp_path):
    small, large = tmp_path / "small.csv", tmp_path / "large.csv"
    small.write_text("3,1,1,1\n")
    large.write_text("1.5e308,5e307,5e307,5e307\n")
    size = ("--nodes", 4, "--expert-slots", 3, "--json")
    assert place("--loads", large, *size) == place("--loads", small, *size)


def test_invalid_recordings_are_refused_with_the_reason(tmp_path):
    path = tmp_path / "loads.npz"
    np.savez(path, iterations=[1, 11], tokens=np.ones((2, 1, 3), int))
    size = ("--nodes", 2, "--expert-slots", 3)
    assert "7 is not recorded: choose one of 1, 11" in bad("--loads", path, "--iteration", 7, *size)
    assert "--iteration is missing" in bad("--loads", path, *size)
    np.savez(path, iterations=[1], tokens=np.ones((2, 1, 3), int))
    assert "shape (2, 1, 3) with 1 iterations" in bad("--loads", path, "--iteration", 1, *size)
    np.savez(path, other=[1])
    assert "tokens[iteration, layer, expert]" in bad("--loads", path, *size)
    path.write_bytes(b"PK\x03\x04 nonsense")
    assert "not a .npz file" in bad("--loads", path, *size)
    path.write_bytes(b"nonsense")
    assert "not a .npz file" in bad("--loads", path, *size)
    with path.open("wb") as file:
        np.save(file, np.ones((1, 3)))
    assert "not a .npz file" in bad("--loads", path, *size)
    for tokens in (np.ones((1, 3), complex), np.array([["1", "2"]]), np.array([[True]])):
        np.savez(path, tokens=tokens)
        assert "they must be numbers" in bad("--loads", path, *size)
    np.savez(path, tokens=np.array([[{}]]))
    assert "not a .npz file of numbers" in bad("--loads", path, *size)
    np.savez(path, tokens=np.zeros((0, 1, 3)), iterations=np.zeros(0))
    assert "shape (0, 1, 3)" in bad("--loads", path, *size)


def test_other_invalid_options_are_refused_with_the_reason(loads, tmp_path):
    size = ("--loads", loads, "--nodes", 2, "--expert-slots", 3)
    wide = tmp_path / "wide.json"
    wide.write_text(json.dumps([[1] * 4200] * 2))
    assert "cannot be read" in bad("--loads", tmp_path / "none.json", "--nodes", 2, "--expert-slots", 3)
    assert "must end in .npz, .csv, .json, .pt, .pth, .safetensors, .npy" in bad(
        "--loads", tmp_path / "x.txt", "--nodes", 2, "--expert-slots", 3
    )
    assert "for .npz recordings only" in bad(*size, "--iteration", 1)
    assert "choose one of best, mro" in bad(*size, "--expert-placement", "magic")
    assert "fault threshold is 0" in bad(*size, "--fault-threshold", 0)
    assert "--expert-slots is 'x'" in bad("--loads", loads, "--nodes", 2, "--expert-slots", "x")
    assert "3 numbers for 2 nodes" in bad("--loads", loads, "--nodes", 2, "--expert-slots", "1,2,3")
    assert "at most 4194304 in all" in bad("--loads", loads, "--nodes", 2, "--expert-slots", "5000000000000")
    assert "at most 4194304 on all" in bad("--loads", loads, "--nodes", 2, "--expert-slots", "9" * 30)
    assert "at most 16384" in bad("--loads", loads, "--nodes", 10**9, "--expert-slots", 3)
    assert "too many to plan at once" in bad("--loads", wide, "--nodes", 16_384, "--expert-slots", 200)
    assert "at least 1 slot" in bad("--loads", loads, "--nodes", 2, "--expert-slots", "0")
    assert "--nodes is missing" in bad("--loads", loads, "--expert-slots", "3")
    assert "nodes is 0" in bad("--loads", loads, "--nodes", 0, "--expert-slots", "3")
    assert "must end in .png" in bad(*size, "--plot", tmp_path / "x.gif")
    assert "cannot be written" in bad(*size, "--plot", tmp_path / "none" / "x.png")


def test_invalid_failure_weights_and_racks_are_refused_with_the_reason(loads, tmp_path):
    size = ("--loads", loads, "--nodes", 2, "--expert-slots", 3)
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
    listed.write_text("[" * 100_000)
    assert "too deep" in bad(*size, "--racks", listed)
    racks.write_bytes(b"\xff\xfe")
    assert "not text in UTF-8" in bad(*size, "--racks", racks)
    listed.write_text("[[1], {}]")
    assert "list of rack names" in bad(*size, "--racks", listed)
    listed.write_text("{}")
    assert "list of rack names" in bad(*size, "--racks", listed)


@pytest.fixture(scope="module")
def commands():
    return BuiltCommands(app)


ANY_FILE = st.binary(max_size=60) | st.text(alphabet="019.,-+eE\"'[]{}:\n\r\t\0\ufeffnaifO ", max_size=40).map(
    str.encode
)


@settings(PROPERTY, suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=300)
@given(data=st.data(), content=ANY_FILE, ending=st.sampled_from([".csv", ".json", ".npz"]))
def test_any_input_gives_a_plan_or_an_error_of_one_line(tmp_path, commands, data, content, ending):
    path = tmp_path / f"any{ending}"
    path.write_bytes(_mangled(data, content) if ending == ".npz" else content)
    number = st.integers(-2, 9).map(str) | st.sampled_from(["", "x", "1,2", "3,,4", "1e3", "5000000000000", "9" * 5000])
    size = ["--nodes", str(data.draw(st.integers(-1, 5))), "--expert-slots", data.draw(number)]
    weights = data.draw(st.none() | st.sampled_from(["1:1", "1:inf", "0:1", "1:0.5,2:0.5", ":", "9" * 5000 + ":1"]))
    if weights is not None:
        size += ["--failure-weights", weights]
    code, said, complaint = commands.run("experts", "plan", "--loads", str(path), *size, "--json")
    if code == 0:
        assert json.loads(said)["layers"]
    else:
        assert code == EXIT_BAD_INPUT
        assert len(complaint.splitlines()) <= 1  # the parser itself reports a value that is not a number


def _mangled(data: st.DataObject, content: bytes) -> bytes:
    """Return a recording with some bytes replaced."""
    file = io.BytesIO()
    np.savez_compressed(file, iterations=[1], tokens=np.ones((1, 2, 3), int))
    whole = file.getvalue()
    place_of = data.draw(st.integers(0, len(whole)))
    return whole[:place_of] + content + whole[place_of + len(content) * data.draw(st.integers(0, 2)) :]


def test_pareto_options_are_shown_and_the_balance_weight_selects_one(tmp_path):
    path = tmp_path / "loads.json"
    path.write_text(json.dumps([[9000, 4000, *[50] * 14]]))
    size = ("--loads", path, "--nodes", 10, "--expert-slots", 6)
    shown = place(*size, "--pareto")
    assert "the busiest node's work over the mean node's" in shown
    assert "chosen by --balance-weight" in shown
    front = json.loads(place(*size, "--pareto", "--json"))["pareto"]
    assert len(front) > 1
    assert [option["busiest_node"] for option in front] == sorted(option["busiest_node"] for option in front)
    even, safe = (json.loads(place(*size, "--balance-weight", weight, "--json")) for weight in (100, 0))
    assert even["busiest_node"]["mean"] == pytest.approx(front[0]["busiest_node"])
    assert safe["recovery"]["model"] == pytest.approx(front[-1]["survives_at_least"])
    assert "passed_over" in even
    assert "passed_over" not in safe
    assert "even work counts for more" in place(*size, "--balance-weight", 100)
    assert "balance weight is -1" in bad(*size, "--balance-weight", -1)
    assert "balance weight is nan" in bad(*size, "--balance-weight", "nan")


def test_nodes_can_have_different_failure_rates(loads, tmp_path):
    rates, listed = tmp_path / "rates.txt", tmp_path / "rates.json"
    rates.write_text("5\n1\n1\n1\n5\n")
    listed.write_text("[5, 1, 1, 1, 5]")
    size = ("--loads", loads, "--nodes", 5, "--expert-slots", 3)
    plan = json.loads(place(*size, "--failure-rates", rates, "--json"))
    assert plan == json.loads(place(*size, "--failure-rates", listed, "--json"))
    assert plan["recovery"]["model"]["1"] == 1.0
    assert "which fail at their rates" in place(*size, "--failure-rates", rates)
    for text, words in (
        ("1\n2\n", "gives 2 rates for 5 nodes"),
        ("a\n" * 5, "list of numbers"),
        ("", "list of numbers"),
    ):
        rates.write_text(text)
        assert words in bad(*size, "--failure-rates", rates)
    rates.write_text("1\n" * 4 + "-1\n")
    assert "node 4 is -1" in bad(*size, "--failure-rates", rates)
    listed.write_text("{}")
    assert "list of numbers" in bad(*size, "--failure-rates", listed)


@pytest.mark.parametrize(
    ("text", "column"),
    [
        ("layer,e0,e1\n0,5,7\n1,6,8\n", "'layer'"),
        (",0th,1st\n0,5,7\n1,6,8\n", "numbers the layers"),
        ("0,5,7\n1,6,8\n2,9,9\n", "numbers the layers"),
        ("1,5,7\n2,6,8\n3,9,9\n", "numbers the layers"),
    ],
)
def test_a_column_of_layer_numbers_is_refused(tmp_path: Path, text: str, column: str) -> None:
    path = tmp_path / "loads.csv"
    path.write_text(text)
    with pytest.raises(BadInputError, match=f"column 1.*{column}.*leave it out"):
        read_loads(path, None)


def test_ascending_loads_are_accepted_if_the_header_names_the_first_expert(tmp_path: Path) -> None:
    path = tmp_path / "loads.csv"
    path.write_text("e0,e1\n0,5\n1,6\n2,9\n")
    assert read_loads(path, None) == [[0.0, 5.0], [1.0, 6.0], [2.0, 9.0]]
