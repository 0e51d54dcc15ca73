"""Tests that `holdfast demo` keeps files that are not from an earlier demo. tests/integration/test_wheel.py runs it."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from holdfast.cli import app
from holdfast.cli.demo import await_event
from holdfast.errors import BadInputError
from holdfast.protocol.events import JobStarted
from made_events import made

EVENT = msgspec.json.encode(made("job_started", 1.0, job="moe_gpt", term=1, generation=0, seq=1)) + b"\n"


class Started(Exception):
    """The demo has started its job."""


@pytest.fixture(autouse=True)
def no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*_: Any, **__: Any) -> None:
        raise Started

    monkeypatch.setattr(subprocess, "Popen", start)


def demo(folder: Path) -> None:
    result = CliRunner().invoke(app, ["demo", "--out", str(folder)])
    if result.exception is not None:
        raise result.exception


@pytest.mark.parametrize("events", [EVENT, b""])
def test_the_files_of_an_earlier_demo_are_removed(tmp_path: Path, events: bytes) -> None:
    (tmp_path / "demo.jsonl").write_bytes(events)
    (tmp_path / "demo.png").write_bytes(b"picture")
    with pytest.raises(Started):
        demo(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["demo.jsonl", "demo.png"])
@pytest.mark.parametrize("is_folder", [False, True])
def test_files_not_from_an_earlier_demo_are_kept(tmp_path: Path, name: str, is_folder: bool) -> None:
    mine = tmp_path / name
    if is_folder:
        mine.mkdir()
    else:
        mine.write_text('{"text": "my training data"}\n')
    with pytest.raises(BadInputError, match=rf"{name} is not from an earlier demo: move it, or give .* --out DIR"):
        demo(tmp_path)
    assert mine.exists()


@pytest.mark.parametrize("folder", ["file", "file/below", "d" * 300])
def test_a_folder_that_cannot_be_created_is_refused(tmp_path: Path, folder: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInputError, match=r"^--out .*; give another folder$"):
        demo(tmp_path / folder)


def test_a_file_that_cannot_be_removed_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(file: Path, **_: Any) -> None:
        raise PermissionError(13, "Permission denied", str(file))

    (tmp_path / "demo.jsonl").write_bytes(EVENT)
    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(BadInputError, match=r"demo.png: Permission denied; give another folder"):
        demo(tmp_path)


def test_waiting_for_an_event_tolerates_a_missing_or_empty_file(tmp_path: Path) -> None:
    file = tmp_path / "demo.jsonl"
    answers = iter((lambda: None, file.touch, lambda: file.write_bytes(EVENT), lambda: None))

    def is_running() -> bool:
        next(answers)()
        return True

    assert isinstance(await_event(file, lambda event: isinstance(event, JobStarted), is_running), JobStarted)
