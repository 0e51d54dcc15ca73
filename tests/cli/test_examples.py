"""Tests of `holdfast examples`: the list, and that a copied example is complete."""

from __future__ import annotations

import errno
import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from holdfast.cli import app
from holdfast.cli.examples import example_file, example_names, imported_files
from holdfast.errors import BadInputError


def examples(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["examples", *arguments])
    if result.exception is not None:
        raise result.exception
    return result.stdout


def test_every_example_is_listed_in_one_line_of_80_columns() -> None:
    lines = examples("list").splitlines()
    assert [line.split()[0] for line in lines[: lines.index("")]] == example_names()
    assert {"moe_gpt", "nanogpt", "catalina.toml"} <= set(example_names())
    assert not [line for line in lines if len(line) > 80 or line.endswith("  ")]
    assert list(json.loads(examples("list", "--json"))) == example_names()


@pytest.mark.parametrize("name", example_names())
def test_a_copied_example_has_all_modules_that_it_imports(tmp_path: Path, name: str) -> None:
    copied = [Path(line) for line in examples("copy", name, "--to", str(tmp_path)).splitlines() if line.startswith("/")]
    assert copied[0].name == example_file(name).name
    assert all(file.is_file() for file in copied)
    assert {file.relative_to(copied[0].parent) for file in copied} >= {
        file.relative_to(example_file(name).parent) for file in imported_files(example_file(name))
    }


def test_a_copied_example_runs(tmp_path: Path) -> None:
    examples("copy", "gan", "--to", str(tmp_path))
    command = [sys.executable, str(tmp_path / "gan.py"), "--steps", "2"]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=300, capture_output=True)


def test_existing_files_are_not_overwritten(tmp_path: Path) -> None:
    examples("copy", "moe_gpt", "--to", str(tmp_path))
    examples("copy", "fsdp_gpt", "--to", str(tmp_path))  # both examples contain the same dense_gpt.py
    mine = tmp_path / "dense_gpt.py"
    mine.write_text("mine")
    (tmp_path / "fsdp_gpt.py").unlink()
    with pytest.raises(BadInputError, match=r"dense_gpt.py exists and differs: move it, or copy .* --to DIR"):
        examples("copy", "fsdp_gpt", "--to", str(tmp_path))
    assert mine.read_text() == "mine"
    assert not (tmp_path / "fsdp_gpt.py").exists(), "nothing is copied unless all of it can be"


def test_an_unknown_example_or_unwritable_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match=r"no example 'nope': `holdfast examples list`"):
        examples("copy", "nope")
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below", tmp_path / ("d" * 300)):
        with pytest.raises(BadInputError, match=r"cannot be written: .*; give another --to DIR"):
            examples("copy", "gan", "--to", str(folder))


def test_no_file_is_written_through_a_symbolic_link(tmp_path: Path) -> None:
    (tmp_path / "gan.py").symlink_to(tmp_path / "elsewhere.py")
    with pytest.raises(BadInputError, match=r"gan.py exists and differs"):
        examples("copy", "gan", "--to", str(tmp_path))
    assert not (tmp_path / "elsewhere.py").exists()


def test_an_existing_file_that_cannot_be_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(file: Path) -> bytes:
        raise PermissionError(errno.EACCES, "Permission denied", str(file))

    examples("copy", "gan", "--to", str(tmp_path))
    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(BadInputError, match=r"gan.py cannot be written: Permission denied; give another --to DIR"):
        examples("copy", "gan", "--to", str(tmp_path))


def test_the_printed_run_command_is_quoted_for_the_shell(tmp_path: Path) -> None:
    *_, command = examples("copy", "gan", "--to", str(tmp_path / "my scripts")).splitlines()
    assert shlex.split(command) == ["holdfast", "run", "--nodes", "2", str(tmp_path / "my scripts" / "gan.py")]
