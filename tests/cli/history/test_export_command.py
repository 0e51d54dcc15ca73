"""Tests of `holdfast export`: rows of a journal, and a warning if it was truncated."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from holdfast.cli import app
from holdfast.errors import BadInputError
from made_events import made


def export(*arguments: str) -> tuple[str, str]:
    result = CliRunner().invoke(app, ["export", *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.stdout, result.stderr


def test_a_truncated_journal_is_exported_up_to_its_last_complete_line(tmp_path: Path) -> None:
    events, rows = tmp_path / "events.jsonl", tmp_path / "rows.jsonl"
    lines = [
        msgspec.json.encode(made("step_committed", float(step), seq=step, step=step, loss=1.0)) for step in (1, 2, 3)
    ]
    events.write_bytes(b"\n".join(lines)[:-7])
    said, warned = export(str(events), "-o", str(rows))
    assert said == f"{rows}: 2 steps were read\n"
    assert warned.startswith(f"holdfast: {events}, line 3 is left out: it is incomplete")
    assert [json.loads(line)["step"] for line in rows.read_text().splitlines()] == [1, 2]


def test_a_file_that_cannot_be_read_is_reported(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match=r"nowhere cannot be read .*: No such file or directory; give the"):
        export(str(tmp_path / "nowhere"), "-o", str(tmp_path / "rows.jsonl"))
