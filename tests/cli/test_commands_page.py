"""Tests that docs/commands.md names exactly the existing commands, options, defaults, exit codes and variables."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import typer

from holdfast import environment, errors
from holdfast.cli import app
from holdfast.cli.spec_options import SPEC_OPTIONS
from holdfast.coordination.job.injection import FAULTS
from holdfast.documents import keys_of
from holdfast.protocol.job_spec import JobSpec
from places import ROOT

PAGE = (ROOT / "docs" / "commands.md").read_text()
#: pages that explain the options of these commands
OWN_PAGES = {
    "experts plan": "placement.md",
    "simulate": "scale.md",
    **dict.fromkeys(("checkpoints list", "checkpoints verify", "checkpoints export"), "checkpoints.md"),
    **dict.fromkeys(("spares plan", "spares map", "spares validate", "spares fit"), "spares.md"),
}


def commands(group: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield all commands with their full names."""
    for name in group.list_commands(None):
        command = group.get_command(None, name)
        if hasattr(command, "list_commands"):
            yield from commands(command, f"{prefix}{name} ")
        else:
            yield f"{prefix}{name}", command


ALL = dict(commands(typer.main.get_command(app)))


def options(command: Any) -> set[str]:
    return {name for param in command.params for name in param.opts if name.startswith("--")} - {"--help", "--help-all"}


def test_the_set_of_commands_is_fixed() -> None:
    assert set(ALL) == {
        *(
            "run",
            "status",
            "events",
            "logs",
            "explain",
            "report",
            "audit",
            "export",
            "scale",
            "stop",
            "checkpoint",
            "move",
            "drain",
            "undrain",
            "inject",
        ),
        *("submit", "jobs", "nodes", "whatif", "calibrate", "suspend", "resume", "update"),
        *("coordinator", "agent", "pool", "schema"),
        *("checkpoints list", "checkpoints verify", "checkpoints export"),
        *("experts plan", "simulate", "demo", "examples list", "examples copy"),
        *("spares plan", "spares map", "spares validate", "spares fit"),
    }


@pytest.mark.parametrize("name", sorted(ALL))
def test_every_command_is_on_the_page(name: str) -> None:
    table = PAGE[PAGE.index("## Commands") : PAGE.index("## What a job is")]
    words = name.split()
    assert any(all(word in row for word in words) for row in table.splitlines() if row.startswith(f"| `{words[0]}"))


@pytest.mark.parametrize("name", sorted(name for name in ALL if " " not in name and name not in OWN_PAGES))
def test_every_option_is_on_the_page(name: str) -> None:
    missing = {option for option in options(ALL[name]) if not re.search(rf"`(-., )?{option}\b", PAGE)}
    missing -= {option for option in missing if re.search(rf"`{option}[ `]", PAGE)}
    assert not missing


@pytest.mark.parametrize("name", sorted(OWN_PAGES))
def test_options_of_commands_with_their_own_page_are_documented_there(name: str) -> None:
    page = (ROOT / "docs" / OWN_PAGES[name]).read_text() + PAGE
    assert not {option for option in options(ALL[name]) if option not in page}


def test_every_option_on_the_page_exists() -> None:
    known = {option for command in ALL.values() for option in options(command)} | {"--version", "--help", "--help-all"}
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", re.sub(r'"--steps"', "", PAGE))) <= known


def test_job_file_keys_and_their_defaults_are_on_the_page() -> None:
    keys = keys_of(JobSpec)
    assert set(keys) <= set(re.findall(r"`([a-z_]+(?:\.[a-z_]+)?)`", PAGE))
    for option in SPEC_OPTIONS:
        (row,) = [row for row in PAGE.splitlines() if re.match(rf"\| `{option.name}[ `]", row)]
        default = keys[option.key].default
        if default and default is not True:
            assert f"{default}" in row.replace("\\|", "/").split("|")[3], row


def test_exit_codes_are_on_the_page() -> None:
    codes = {value for name, value in vars(errors).items() if name.startswith("EXIT_") and isinstance(value, int)}
    assert {int(code) for code in re.findall(r"^\| (\d+) \|", PAGE, re.MULTILINE)} == codes


def test_every_injectable_fault_is_in_the_documented_table() -> None:
    page = (ROOT / "docs" / "failures.md").read_text()
    table = page[page.index("## Faults to inject") :]
    assert re.findall(r"^\| `([a-z-]+)` \|", table, re.MULTILINE) == list(FAULTS)


def test_environment_variables_are_on_the_page() -> None:
    assert set(re.findall(r"`(HOLDFAST_[A-Z_]+)`", PAGE)) == {*environment.PUBLIC, environment.WORKER}


def test_every_command_that_prints_results_can_print_json() -> None:
    without = {name for name, command in ALL.items() if "--json" not in options(command)}
    assert without == {
        "coordinator",
        "agent",
        "pool",
        "schema",
        "demo",
    }  # they print nothing, only JSON, or a live view
