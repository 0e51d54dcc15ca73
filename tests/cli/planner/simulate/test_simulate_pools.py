"""Tests of `holdfast simulate --availability` as a user runs it: drawn traces, own files, jobs and refusals."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from built_commands import BuiltCommands

from holdfast.cli import app
from holdfast.errors import EXIT_BAD_INPUT
from holdfast.planner.fleet.pool.systems import SYSTEMS
from places import EXAMPLES, RECORDED, ROOT

COMMANDS = BuiltCommands(app)
TRACE = """seconds,event,node
0,add,a
0,add,b
0,add,c
3600,remove,b
5400,fault,a
7200,add,b
36000,remove,c
"""
JOB = """
name = "{name}"
script = "train.py"
min_nodes = 1
max_nodes = 3
weight = {weight}
[output]
flop_per_sample = 1e12
[pace]
step_s = [6.0, 3.1, 2.2]
micro_batches = 12
samples = 12
"""


def run(*words: str) -> str:
    code, out, complaint = COMMANDS.run("simulate", *words)
    assert (code, complaint) in ((0, ""), (None, "")), complaint
    return out


def refused(*words: str) -> str:
    code, _, complaint = COMMANDS.run("simulate", *words)
    assert code == EXIT_BAD_INPUT, complaint
    return complaint


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.csv"
    path.write_text(TRACE)
    return path


@pytest.fixture
def jobs(tmp_path: Path) -> list[str]:
    words: list[str] = []
    for name, weight in (("first", 1.0), ("second", 1.5)):
        path = tmp_path / f"{name}.toml"
        path.write_text(JOB.format(name=name, weight=weight))
        words += ["--job", str(path)]
    return words


def test_policies_are_compared_on_a_drawn_trace_with_their_assumptions() -> None:
    said = run("--availability", "trace-a", "--policy", "waf,hit-only,megatron,bamboo")
    assert "10 nodes lost, 33 other failures; 6 jobs" in said
    for name in ("waf", "hit-only", "megatron", "bamboo"):
        assert re.search(rf"^{name} .*%", said, re.MULTILINE)
        assert all(assumed in said for assumed in SYSTEMS[name].assumes)


def test_the_same_seed_gives_the_same_document() -> None:
    words = ("--availability", "trace-b", "--policy", "waf", "--json")
    assert run(*words) == run(*words) != run(*words, "--seed", "1")


def test_policies_are_compared_on_the_users_trace_and_jobs(trace: Path, jobs: list[str]) -> None:
    said = json.loads(run("--availability", str(trace), *jobs, "--policy", "waf,equal", "--json"))
    assert said["trace"]["lost"] == 1  # the last row is the trace's end
    assert (said["trace"]["nodes"], said["trace"]["faults"], said["trace"]["seconds"]) == (3, 1, 36000.0)
    assert [job["name"] for job in said["jobs"]] == ["first", "second"]
    for policy in said["policies"].values():
        assert 0 < policy["accumulated_waf"] < said["undisturbed_waf"]
        assert sum(policy["by_job"].values()) == pytest.approx(policy["accumulated_waf"])
    longer = json.loads(run("--availability", str(trace), *jobs, "--policy", "waf", "--hours", "20", "--json"))
    assert (longer["trace"]["lost"], longer["trace"]["seconds"]) == (2, 72000.0)


def test_a_trace_with_more_nodes_than_the_cluster_is_refused(trace: Path, tmp_path: Path, jobs: list[str]) -> None:
    cluster = tmp_path / "cluster.toml"
    said = (EXAMPLES / "catalina.toml").read_text()
    for key, value in (("zones", 1), ("racks_per_zone", 1), ("gpus_per_rack", 4), ("gpus_per_tray", 2)):
        said = re.sub(rf"^{key} = \d+", f"{key} = {value}", said, flags=re.MULTILINE)
    cluster.write_text(said)
    complaint = refused(str(cluster), "--availability", str(trace), *jobs)
    assert "line 4: c would be node 3: the cluster has 2" in complaint


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ("0,add,a\n5,add,b\n4,remove,a\n", "line 4: 4 s come after 5 s: sort by time"),
        ("0,add,a\n5,remove,b\n", "line 3: b is removed, but it is not there"),
        ("0,add,a\n5,fault,b\n", "line 3: b has a fault, but it is not there"),
        ("0,add,a\n0,add,b\n", "line 3: the trace ends at 0 s, when it begins: give --hours"),
        ("0,add,a\n1e308,fault,a\n", "line 3: 1e+308 s are too long for a trace"),
        ("3,add,a\n5,add,b\n", "line 2: no node is there at 0 s"),
        ("0,add,a\n5,dies,a\n", "line 3: the event is 'dies': it must be add, remove or fault"),
        ("", "the trace has only a header"),
    ],
)
def test_an_invalid_trace_is_refused_with_its_line_number(tmp_path: Path, rows: str, said: str) -> None:
    path = tmp_path / "bad.csv"
    path.write_text("seconds,event,node\n" + rows)
    assert said in refused("--availability", str(path))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--policy", "waf"), "--policy is only for a pool"),
        (("--job", "a.toml"), "--job is only for a pool"),
        (("--availability", "trace-a", "--policy", "best"), "--policy best: it must be one of"),
        (("--availability", "trace-a", "--policy", "waf,waf"), "name each once"),
        (("--availability", "trace-a", "--mtbf", "9"), "--mtbf is 9: it has no effect with --availability"),
        (("--availability", "trace-a", "--replications", "3"), "--replications is 3"),
        (("--availability", "trace-a", "--hours", "9"), "trace-a has its own length"),
        (("--availability", "trace-a", "--scale"), "leave out --availability, or --scale"),
        (("--availability", "trace-a", "--nodes", "5000"), "5,000 nodes are too many"),
        (("--availability", "trace-a", "--nodes", "4"), "4 nodes are too few: together the 6 jobs need at least 6"),
        (("--availability", "trace-a", "--seed", "-1"), "--seed is -1: it must be 0 or more"),
        (("--availability", "a.csv", "--hours", "nan"), "--hours is nan: give when the trace ends, above 0"),
        (("--availability", "a.csv", "--hours", "inf"), "--hours is inf: give when the trace ends, above 0"),
        (("--availability", "a.csv", "--hours", "0"), "--hours is 0: give when the trace ends, above 0"),
        (("--availability", "nowhere.csv"), "the trace nowhere.csv cannot be read"),
    ],
)
def test_options_without_effect_and_invalid_values_are_refused(words: tuple[str, ...], said: str) -> None:
    assert said in refused(*words)


def test_a_job_without_step_times_or_flop_is_refused(trace: Path, tmp_path: Path) -> None:
    path = tmp_path / "bare.toml"
    path.write_text('name = "bare"\nscript = "train.py"\n')
    assert "pace says nothing of how long a step takes" in refused("--availability", str(trace), "--job", str(path))
    path.write_text(JOB.format(name="bare", weight=1.0).replace("1e12", "0"))
    assert "output.flop_per_sample is 0" in refused("--availability", str(trace), "--job", str(path))


@pytest.mark.skipif(not (RECORDED / "spot").is_dir(), reason="the recordings are not there")
def test_a_recorded_spot_trace_may_add_nodes_later() -> None:
    words = ("--availability", str(RECORDED / "spot" / "bamboo_aws_p3.csv"), "--policy", "waf,hit-only", "--json")
    said = json.loads(run(*words))
    assert said["trace"]["nodes"] < said["trace"]["most_nodes"] == 32
    assert all(0 < one["accumulated_waf"] < said["undisturbed_waf"] for one in said["policies"].values())


def test_the_page_names_every_policy() -> None:
    page = (ROOT / "docs" / "fleet.md").read_text()
    assert all(f"`{name}`" in page for name in SYSTEMS)
