"""Tests of `--help`: every page fits 80 columns, and every example is an existing command."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from holdfast.cli import app
from holdfast.cli import command_table as table
from holdfast.cli.help import COMMON, EXAMPLES


def walk(command: Any, *words: str) -> Iterator[tuple[str, Any]]:
    if not hasattr(command, "list_commands"):
        yield " ".join(words), command
        return
    for name in command.list_commands(None):
        yield from walk(command.get_command(None, name), *words, name)


COMMANDS = dict(walk(typer.main.get_command(app)))
GROUPS = ("", "examples", "checkpoints", "experts", "spares")


def page(words: str, option: str = "--help") -> list[str]:
    result = CliRunner().invoke(app, [*words.split(), option], prog_name="holdfast")
    assert result.exit_code == 0, result.exception
    return result.stdout.splitlines()


@pytest.mark.parametrize("words", [*GROUPS, *COMMANDS])
def test_every_help_page_fits_80_columns(words: str) -> None:
    pages = [page(words), page(words, "--help-all")] if words in COMMANDS else [page(words)]
    assert not [line for lines in pages for line in lines if len(line) > 80]


@pytest.mark.parametrize("words", COMMANDS)
def test_every_command_has_two_examples_with_existing_options(words: str) -> None:
    known = {name for parameter in COMMANDS[words].params for name in parameter.opts} | {"--help"}
    assert len(EXAMPLES[words]) == 2
    for example in EXAMPLES[words]:
        assert f"  {example}" in page(words)
        assert example.startswith(f"holdfast {words}")
        given = shlex.split(example.removeprefix(f"holdfast {words}").split(" -- ")[0].split("train.py")[0])
        assert {word for word in given if re.match(r"--?[a-z]", word)} <= known


@pytest.mark.parametrize("name", table.COMMANDS)
def test_the_command_table_has_the_first_sentence_of_each_help_text(name: str) -> None:
    command: Any = typer.main.get_command(app)
    found = command.get_command(None, name)
    assert found.help.split("\n\n")[0].split(". ")[0].rstrip(".").replace("\n", " ") == table.COMMANDS[name].summary


def test_help_imports_no_command_module() -> None:
    program = "import sys; from holdfast.cli import main\ntry: main()\nfinally: print(*sys.modules, file=sys.stderr)"
    shown = subprocess.run([sys.executable, "-c", program, "--help"], capture_output=True, text=True, check=True)
    assert "Start here:" in shown.stdout
    ours = {name for name in shown.stderr.split() if name.startswith("holdfast.")}
    packages = ("holdfast.cli", "holdfast.errors", "holdfast.environment", "holdfast.units")
    assert not [name for name in ours if not name.startswith(packages)]
    assert not ours & {f"holdfast.cli.{row.module}" for row in table.COMMANDS.values()}
    assert "asyncio" not in shown.stderr.split(), "importing asyncio takes as long as the whole page"


@pytest.mark.parametrize("words", COMMON)
def test_the_short_help_has_common_options_and_refers_to_the_full_help(words: str) -> None:
    shown = "\n".join(page(words))
    assert all(f"{option} " in shown or f"{option}\n" in shown for option in COMMON[words])
    assert f"holdfast {words} --help-all" in shown


@pytest.mark.parametrize("words", COMMANDS)
def test_the_full_help_has_every_option(words: str) -> None:
    shown = "\n".join(page(words, "--help-all"))
    for parameter in COMMANDS[words].params:
        if parameter.param_type_name == "option":
            assert all(f"{name} " in shown or f"{name}," in shown or f"{name}\n" in shown for name in parameter.opts)


@pytest.mark.parametrize(
    ("words", "usage"),
    [
        ("run", "holdfast run [OPTIONS] SCRIPT|JOB.toml|MOD [ARGS]..."),
        ("explain", "holdfast explain [OPTIONS] [SEQ] [EVENTS]"),
        ("drain", "holdfast drain [OPTIONS] [NODE]..."),
        ("undrain", "holdfast undrain [OPTIONS] NODE..."),
        ("examples copy", "holdfast examples copy [OPTIONS] NAME"),
    ],
)
def test_usage_shows_optional_arguments_in_brackets(words: str, usage: str) -> None:
    assert page(words)[0] == f"Usage: {usage}"


def test_help_lists_the_values_of_choice_options() -> None:
    lines = page("run", "--help-all")
    place = lines.index("  --on-node-failure CHOICE  How to continue after the loss of a node")
    assert lines[place + 1].strip() == "auto, standby, shrink, wait, restart-all"
    assert "  --format safetensors|torch  Format of the file (default: safetensors)" in page("checkpoints export")
    assert "  --stragglers ask|move|off  Reaction to slow nodes (default: ask)" in lines


@pytest.mark.parametrize("words", COMMANDS)
def test_option_names_in_the_help_have_balanced_brackets(words: str) -> None:
    names = [line.split("  ")[1] for line in page(words, "--help-all") if line.startswith("  -")]
    assert not [name for name in names if name.count("[") != name.count("]")]


@pytest.mark.parametrize("words", COMMANDS)
def test_the_full_help_contains_no_backslashes(words: str) -> None:
    assert "\\" not in "\n".join(page(words, "--help-all"))
