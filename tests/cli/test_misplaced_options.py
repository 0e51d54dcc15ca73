"""Tests of command options after the script: they are passed to the script, with a warning."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.cli.job.run import run
from holdfast.cli.job.servers import agent
from holdfast.cli.options import option_names, warn_of_misplaced
from holdfast.cli.pool.jobs import submit


def test_the_option_names_of_a_command_are_found() -> None:
    assert {"--nodes", "--checkpoint-dir", "--from", "--json", "--set", "--module", "--plain"} <= option_names(run)
    assert {"--advertise", "--node-name", "--address", "--job"} <= option_names(agent)
    assert {"--nodes", "--follow", "--job"} <= option_names(submit)
    assert not {"--script", "--args", "--begin", "--as-json"} & option_names(run)


@pytest.mark.parametrize(
    ("args", "warned"),
    [
        (["--nodes", "3"], ["--nodes"]),
        (["--nodes=3", "--json", "--nodes", "4"], ["--nodes", "--json"]),
        (["--steps", "3", "nodes", "-j", "x"], []),
        (["--name", "mine"], []),  # the script's own
        (["--", "--nodes", "3"], []),
    ],
)
def test_each_misplaced_option_is_warned_about_once(
    args: list[str], warned: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text("parser.add_argument('--name')\n")
    warn_of_misplaced(run, "run", str(script), args)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[1] for line in lines] == warned
    assert all("before train.py" in line and "`holdfast run`" in line for line in lines)
