"""Tests of a job's file, `--set` and options: their precedence and error messages."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from holdfast.cli import app
from holdfast.cli.spec_options import SpecGroup, collect_job, job_spec
from holdfast.documents import Given
from holdfast.errors import BadInputError
from holdfast.protocol.job_spec import JobSpec

JOB = """
format = 1
name = "mine"
script = "train.py"
args = ["--steps", "5"]
min_nodes = 2
max_nodes = 3

[checkpoint]
dir = "kept"
every = 50

[recovery]
join_window = "2m"

[experiments]
emulate_compute = "0.0005/token"
"""


@pytest.fixture
def job_file(tmp_path: Path) -> str:
    path = tmp_path / "job.toml"
    path.write_text(JOB)
    return str(path)


def options(**values: str | bool) -> dict[str, Given]:
    """Return the values that the options of `holdfast run` set."""
    group = SpecGroup()
    names = [parameter.name for parameter in group.parameters()]
    assert set(values) <= set(names)
    return group.collect({name: values.get(name) for name in names})


def test_a_job_file_defines_the_job(job_file: str, tmp_path: Path) -> None:
    spec = job_spec(collect_job(job_file, (), (), options()))
    assert (spec.name, spec.args, spec.min_nodes, spec.max_nodes) == ("mine", ("--steps", "5"), 2, 3)
    assert (spec.script, spec.checkpoint.dir) == (str(tmp_path / "train.py"), str(tmp_path / "kept"))
    assert (spec.checkpoint.every, spec.recovery.join_window, spec.experiments.emulated) == (50, 120.0, (5e-4, "token"))


def test_options_override_set_and_set_overrides_the_job_file(job_file: str) -> None:
    pairs = ["checkpoint.every=60", "recovery.join_window=1h", 'args=["--x"]', "experiments.allow_faults=true"]
    spec = job_spec(collect_job(job_file, (), pairs, options(checkpoint_every="70", static_experts=True)))
    assert (spec.checkpoint.every, spec.recovery.join_window, spec.args) == (70, 3600.0, ("--x",))
    assert spec.experiments.allow_faults
    assert spec.experiments.static_experts
    assert spec.name == "mine"


def test_command_line_arguments_replace_those_of_the_job_file(job_file: str) -> None:
    assert job_spec(collect_job(job_file, ["--steps", "9"], (), options())).args == ("--steps", "9")


@pytest.mark.parametrize(("text", "least", "most"), [("5", 0, 5), ("1:5", 1, 5)])
def test_the_nodes_option_replaces_both_node_limits_of_the_job_file(
    text: str, least: int, most: int, job_file: str
) -> None:
    spec = job_spec(collect_job(job_file, (), (), options(nodes=text)))
    assert (spec.min_nodes, spec.max_nodes) == (least, most)


def test_a_script_runs_without_a_job_file() -> None:
    assert job_spec(collect_job("train.py", ["-x"], (), options())) == JobSpec(script="train.py", args=("-x",))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("format = 2\n" + JOB.replace("format = 1\n", ""), "format is 2: it must be 1"),
        (
            JOB.replace("every = 50", "every = 0"),
            "checkpoint.every is 0: it must be a whole number from 1 to 1000000000",
        ),
        (
            JOB.replace("every = 50", "evry = 50"),
            "checkpoint.evry is not known; the nearest one is checkpoint",
        ),
        (JOB.replace('"2m"', '"soon"'), "recovery.join_window is 'soon': it must be a number of seconds, or a time"),
        (JOB.replace('script = "train.py"', ""), "script is missing: give the path of a Python file"),
        ("token = 's'" + JOB, "token is not known"),
        ("wieght = 2.0" + JOB, "wieght is not known; the nearest one is weight"),
        ("weight = 0" + JOB, "weight is 0: it must be a number above 0, 1000 at most"),
        ("weight = -1.5" + JOB, "weight is -1.5: it must be a number above 0, 1000 at most"),
        (
            JOB + "\n[pace]\nstep_s = [1.5, -1.0]\n",
            "pace.step_s is [1.5, -1.0]: it must be a list of numbers from 0 to",
        ),
        ("sizes = [2, 0]" + JOB, "sizes is [2, 0]: it must be a list of whole numbers from 1 to 1000000000"),
        (JOB.replace('"0.0005/token"', "0.1"), "experiments.emulate_compute is 0.1: it must be seconds for each token"),
    ],
    ids=range(12),
)
def test_a_mistake_in_the_job_file_is_reported_in_one_line(text: str, complaint: str, tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text(text)
    result = CliRunner().invoke(app, ["run", str(path)])
    assert isinstance(result.exception, BadInputError)
    message = str(result.exception)
    assert message.startswith(str(path))
    assert complaint in message
    assert "\n" not in message


@pytest.mark.parametrize("name", ["job", "events"])
def test_schemas_are_printed(name: str) -> None:
    result = CliRunner().invoke(app, ["schema", name])
    assert result.exit_code == 0
    assert json.loads(result.stdout)["$defs"]


def test_the_schema_of_a_job_file_has_every_key() -> None:
    printed = json.loads(CliRunner().invoke(app, ["schema", "job"]).stdout)
    properties = printed["$defs"]["JobSpec"]["properties"]
    assert set(properties) == {field.name for field in msgspec.structs.fields(JobSpec)}
    assert printed["$defs"]["JobSpec"]["additionalProperties"] is False
    assert printed["$defs"]["RecoverySpec"]["properties"]["join_window"]["type"] == ["number", "string"]


def test_the_version_is_printed() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.stdout.split()[0]) == (0, "holdfast")
