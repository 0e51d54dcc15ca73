"""Scripts that are refused before a job starts."""

from __future__ import annotations

import py_compile
import runpy
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.control.launch.settings import check_script
from holdfast.errors import BadInputError


def make_zip(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("__main__.py", "DONE = True\n")


def make_bytecode(path: Path) -> None:
    source = path.with_name("source.py")
    source.write_text("DONE = True\n")
    py_compile.compile(str(source), str(path), doraise=True)


@pytest.mark.parametrize("make", [make_zip, make_bytecode])
@pytest.mark.parametrize("name", ["train", "train.py", "train.pyz"])
def test_archives_and_bytecode_are_accepted_under_any_name(
    tmp_path: Path, make: Callable[[Path], None], name: str
) -> None:
    script = tmp_path / name
    make(script)
    assert runpy.run_path(str(script))["DONE"]
    check_script(str(script))


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"x = = 1\n", "s.pyz, line 1 is not valid Python: invalid syntax"),
        (b"x = 1\n\0", "is not valid Python: source code string cannot contain null bytes"),
        (b"#!/bin/bash\nif true; then\n", "s.pyz, line 2 is not valid Python: invalid syntax"),
    ],
)
def test_a_script_with_a_syntax_error_is_refused(tmp_path: Path, content: bytes, why: str) -> None:
    script = tmp_path / "s.pyz"
    script.write_bytes(content)
    with pytest.raises(BadInputError, match=why):
        check_script(str(script))
