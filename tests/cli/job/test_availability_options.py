"""Tests of `holdfast run --availability`: bad input is refused before any change."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from holdfast.cli import app
from holdfast.errors import BadInputError
from places import CONTROL_SCRIPTS

SCRIPT = CONTROL_SCRIPTS / "fake_training.py"
GOOD = "seconds,event,node\n0,add,a\n10,add,b\n"


@pytest.mark.parametrize(
    ("trace", "words", "says"),
    [
        (None, [], "cannot be read: No such file"),
        (b"\xff\xfe", [], "cannot be read"),
        ("seconds,nodes\n0,1\n", [], "line 1: the header is 'seconds,nodes'"),
        ("seconds,event,node\n0,add,a\n3,remove,b\n", [], "line 3: b is removed, but it is not there"),
        ("seconds,event,node\n5,add,a\n", [], "no node is there at 0 s: give --from 5"),
        (GOOD, ["--speed", "0"], "--speed is 0"),
        (GOOD, ["--speed", "nan"], "--speed is nan"),
        (GOOD, ["--from", "-1"], "--from is -1"),
        (GOOD, ["--from", "20"], "before it begins at 20 s"),
        (GOOD, ["--until", "inf"], "--until is inf"),
        (GOOD, ["--join-window", "-1"], "--join-window is -1"),
        (GOOD, ["--expert-slots", "0"], "--expert-slots is 0"),
        (GOOD, ["--nodes", "2"], "leave out --nodes"),
    ],
)
def test_bad_input_is_refused_and_changes_no_files(
    trace: str | bytes | None, words: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    file = tmp_path / "trace.csv"
    if trace is not None:
        file.write_bytes(trace if isinstance(trace, bytes) else trace.encode())
    before = sorted(tmp_path.rglob("*"))
    result = CliRunner().invoke(app, ["run", "--availability", str(file), *words, str(SCRIPT)])
    assert isinstance(result.exception, BadInputError), result.output
    assert says in str(result.exception)
    assert "\n" not in str(result.exception)
    assert sorted(tmp_path.rglob("*")) == before
