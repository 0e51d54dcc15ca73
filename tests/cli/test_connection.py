"""Which job is meant, and with which secret."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from holdfast.cli.connection import Server, read_token
from holdfast.control.registry import JobEntry, register, registry_directory
from holdfast.environment import TOKEN, TOKEN_FILE
from holdfast.errors import BadInputError, UnreachableError


@pytest.fixture(autouse=True)
def _private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A registry of the test's own, and no secret."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv(TOKEN, raising=False)
    monkeypatch.delenv(TOKEN_FILE, raising=False)


def secret(folder: Path, name: str) -> Path:
    path = folder / name
    path.write_text(f"{name}\n")
    return path


def test_an_options_file_comes_first_then_the_token_then_the_variables_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert read_token(None) is None
    monkeypatch.setenv(TOKEN_FILE, str(secret(tmp_path, "from-variable")))
    assert read_token(None) == "from-variable"
    monkeypatch.setenv(TOKEN, "itself")
    assert read_token(None) == "itself"
    assert read_token(secret(tmp_path, "from-option")) == "from-option"


@pytest.mark.parametrize("content", [b"", b" \n", b"x" * 5000, b"\xff\xfe"])
def test_a_file_without_a_token_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_bytes(content)
    with pytest.raises(BadInputError, match="the token file"):
        read_token(path)


def test_a_job_is_chosen_by_its_name() -> None:
    entry = JobEntry(url="http://127.0.0.1:1000", token="t", job="mine", pid=os.getpid())
    register(registry_directory(os.environ), entry)
    assert Server(job="mine").entry().url == entry.url
    assert Server(address=entry.url, job="mine").entry().url == entry.url
    with pytest.raises(UnreachableError, match="there is no job 'yours' on this machine: those that run are mine"):
        Server(job="yours").entry()
    with pytest.raises(UnreachableError, match=r"there is no job 'yours' at .*: the one there is 'mine'"):
        Server(address=entry.url, job="yours").entry()


def test_the_job_elsewhere_is_compared_with_the_name() -> None:
    server = Server(address="http://10.0.0.1:1", job="mine")
    server.check_job("mine")
    with pytest.raises(UnreachableError, match=r"there is no job 'mine' at \S+: the one there is 'other'"):
        server.check_job("other")
