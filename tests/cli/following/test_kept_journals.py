"""Tests that the journals of the last jobs are kept, bounded, and found by the job's name."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.cli import app
from holdfast.cli.connection import Server
from holdfast.cli.following import kept_journals
from holdfast.cli.following.kept_journals import journal_folder, kept_journal, new_journal, newest_journal
from holdfast.cli.history.explain import explain_command
from holdfast.cli.job import run
from holdfast.errors import EXIT_FAILED, UnreachableError
from holdfast.observability.event_lines import read_events
from holdfast.protocol.events import JobFailed, ReadEvent


def failed(seq: int = 1) -> JobFailed:
    return JobFailed(time=1.0, job="a.b", term=1, generation=1, seq=seq, why="oops")


def keep(folder: Path, job: str, *events: ReadEvent) -> list[ReadEvent]:
    passed: list[ReadEvent] = []
    with kept_journal(new_journal(folder, job), passed.append) as told:
        for event in events:
            told(event)
    return passed


def test_journals_are_kept_in_the_users_state_directory(tmp_path: Path) -> None:
    assert journal_folder({"XDG_STATE_HOME": "/state"}) == Path("/state/holdfast/journals")
    assert journal_folder({"HOME": "/home/me"}) == Path("/home/me/.local/state/holdfast/journals")


def test_events_are_kept_in_a_private_journal_and_passed_on(tmp_path: Path) -> None:
    assert newest_journal(tmp_path / "new") is None
    assert keep(tmp_path / "new", "a.b", failed()) == [failed()]
    keep(tmp_path / "new", "a", failed())
    path = newest_journal(tmp_path / "new", "a.b")
    assert path is not None
    assert list(read_events(path, print)) == [failed()]
    assert path.stat().st_mode & 0o077 == 0
    assert newest_journal(tmp_path / "new", "b") is None


def test_a_journal_removed_concurrently_by_another_job_is_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both jobs remove old journals. The job that found fewer of them once kept no journal."""
    glob = Path.glob

    def glob_too_early(folder: Path, pattern: str) -> list[Path]:
        return [*glob(folder, pattern), folder / "a.removed.jsonl"]

    monkeypatch.setattr(Path, "glob", glob_too_early)
    keep(tmp_path, "a", failed())
    path = newest_journal(tmp_path, "a")
    assert path is not None
    assert list(read_events(path, print)) == [failed()]


def test_only_the_newest_journals_are_kept_and_each_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_journals, "KEPT", 3)
    monkeypatch.setattr(kept_journals, "MOST_BYTES", 1000)
    for number in range(5):
        keep(tmp_path, f"job-{number}", *map(failed, range(50)))
        newest = newest_journal(tmp_path, f"job-{number}")
        assert newest is not None
        assert 800 < newest.stat().st_size <= 1000
        os.utime(newest, (number + 1.0, number + 1.0))
    assert sorted(path.name.split(".")[0] for path in tmp_path.iterdir()) == ["job-2", "job-3", "job-4"]


def test_events_are_passed_on_if_the_journal_folder_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert keep(tmp_path / "file", "job", failed()) == [failed()]


def test_the_job_that_ended_last_is_explained_if_no_job_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The message once was that no job runs on this machine."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    with pytest.raises(UnreachableError, match="no job runs on this machine"):
        explain_command(server=Server())
    keep(journal_folder(os.environ), "a.b", failed())
    path = newest_journal(journal_folder(os.environ))
    explain_command(server=Server())
    shown = capsys.readouterr()
    assert "why: oops" in shown.out
    assert shown.out.splitlines()[-1] == f"more: holdfast explain 1 {path}"
    assert str(path) in shown.err
    with pytest.raises(UnreachableError, match="no job runs on this machine"):
        explain_command(server=Server(job="other"))


def test_a_failed_job_names_its_own_journal_despite_a_newer_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With two jobs of one user, the message of the first job once named the journal of the second."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    folder, script = journal_folder(os.environ), tmp_path / "train.py"
    script.write_text("")

    async def fail(settings: object, on_event: Callable[[ReadEvent], None], warn: object) -> int:
        on_event(failed())
        keep(folder, "other", failed())
        return EXIT_FAILED

    monkeypatch.setattr(run, "launch", fail)
    with pytest.raises(SystemExit, match="1"):
        app(["run", "--plain", str(script)])
    *_, advice = capsys.readouterr().err.splitlines()
    (own,) = folder.glob("train.*.jsonl")
    assert advice == f"holdfast: the reason, and the attempts: holdfast explain {own}"
