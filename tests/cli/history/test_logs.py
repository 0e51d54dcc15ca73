"""Tests that `holdfast logs` reads the workers' files and continues at its last position."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from holdfast.cli import app
from holdfast.cli.history.logs import Tails
from holdfast.errors import BadInputError, UnreachableError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "node-0.0.log").write_text("one\ntwo\nhalf")
    (tmp_path / "node-1.0.log").write_text("\x1b[2Janother\n")
    (tmp_path / "of.another.log").write_text("program\n")
    (tmp_path / "node-1.1.log").write_text("its neighbour\n")
    (tmp_path / "notes.txt").write_text("no output\n")
    return tmp_path


def test_each_line_is_prefixed_with_its_node_and_local_rank(folder: Path) -> None:
    done = CliRunner().invoke(app, ["logs", str(folder)])
    assert done.stdout.splitlines() == [
        *("[node-0] one", "[node-0] two", "[node-1] \\x1b[2Janother", "[node-1.1] its neighbour", "[node-0] half")
    ]


def test_the_node_option_shows_only_lines_of_that_node(folder: Path) -> None:
    done = CliRunner().invoke(app, ["logs", str(folder), "--node", "node-0"])
    assert done.stdout.splitlines() == ["[node-0] one", "[node-0] two", "[node-0] half"]
    as_json = CliRunner().invoke(app, ["logs", str(folder), "--node", "node-0", "--json"])
    assert json.loads(as_json.stdout.splitlines()[1]) == {"node": "node-0", "place": 0, "line": "two"}


def test_new_lines_are_read_from_the_last_position(folder: Path) -> None:
    said: list[str] = []
    tails = Tails(folder, ["node-0"], lambda node, place, line: said.append(f"{node} {place} {line}"))
    assert tails.print_new_lines() == 1
    with (folder / "node-0.0.log").open("a") as file:
        file.write(" a line\n\x1b[2Jthree\n")
    tails.print_new_lines()
    tails.print_rest()
    assert said == ["node-0 0 one", "node-0 0 two", "node-0 0 half a line", "node-0 0 \x1b[2Jthree"]
    (folder / "node-0.0.log").write_text("anew\n")
    tails.print_new_lines()
    assert said[-1] == "node-0 0 anew"


def test_an_unknown_node_or_folder_is_reported(folder: Path) -> None:
    nobody = CliRunner().invoke(app, ["logs", str(folder), "--node", "node-7"])
    assert isinstance(nobody.exception, UnreachableError)
    assert "no worker of node-7 has printed anything" in str(nobody.exception)
    nowhere = CliRunner().invoke(app, ["logs", str(folder / "none")])
    assert isinstance(nowhere.exception, BadInputError)
