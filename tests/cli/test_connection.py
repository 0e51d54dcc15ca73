"""Tests of how commands choose a job and its secret."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from holdfast.cli.connection import Server, read_token
from holdfast.control.pool_client import PoolClient
from holdfast.control.registry import JobEntry, register, registry_directory
from holdfast.environment import TOKEN, TOKEN_FILE
from holdfast.errors import BadInputError, UnreachableError


@pytest.fixture(autouse=True)
def _private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use a private registry without a secret."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv(TOKEN, raising=False)
    monkeypatch.delenv(TOKEN_FILE, raising=False)


def secret(folder: Path, name: str) -> Path:
    path = folder / name
    path.write_text(f"{name}\n")
    return path


def test_the_token_file_option_overrides_the_environment_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert read_token(None) is None
    monkeypatch.setenv(TOKEN_FILE, str(secret(tmp_path, "from-variable")))
    assert read_token(None) == "from-variable"
    monkeypatch.setenv(TOKEN, "itself")
    assert read_token(None) == "itself"
    assert read_token(secret(tmp_path, "from-option")) == "from-option"


@pytest.mark.parametrize("content", [b"", b" \n", b"x" * 5000, b"\xff\xfe"])
def test_a_file_without_a_valid_token_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_bytes(content)
    with pytest.raises(BadInputError, match="the token file"):
        read_token(path)


def test_a_job_is_selected_by_its_name() -> None:
    entry = JobEntry(url="http://127.0.0.1:1000", token="t", job="mine", pid=os.getpid())
    register(registry_directory(os.environ), entry)
    assert Server(job="mine").entry().url == entry.url
    assert Server(address=entry.url, job="mine").entry().url == entry.url
    with pytest.raises(UnreachableError, match="there is no job 'yours' on this machine: the running jobs are mine"):
        Server(job="yours").entry()
    with pytest.raises(UnreachableError, match=r"there is no job 'yours' at .*: the one there is 'mine'"):
        Server(address=entry.url, job="yours").entry()


def test_a_remote_job_with_another_name_is_refused() -> None:
    server = Server(address="http://10.0.0.1:1", job="mine")
    server.check_job("mine")
    with pytest.raises(UnreachableError, match=r"there is no job 'mine' at \S+: the one there is 'other'"):
        server.check_job("other")


@pytest.fixture
def alone() -> Iterator[str]:
    """Yield the URL of a server that claims to be job `alone`."""

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = b'{"job": "alone"}' if self.path == "/status" else b""
            self.send_response(200 if body else 404)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_pool_commands_refuse_the_address_of_a_job(alone: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command once asked the job, and reported HTTP 404."""
    entry = JobEntry(url="http://127.0.0.1:1000", token="t", job="mine", pid=os.getpid())
    register(registry_directory(os.environ), entry)
    with pytest.raises(BadInputError, match=rf"at {entry.url} is job mine, and no pool: give the --address of a pool"):
        Server(address=entry.url).pool()
    monkeypatch.setenv(TOKEN, "t")
    with pytest.raises(BadInputError, match=rf"at {alone} is job alone, and no pool"):
        Server(address=alone).pool()
    with (
        Server(address="http://127.0.0.1:9").pool() as nobody,
        pytest.raises(UnreachableError, match="no pool answers"),
    ):
        nobody.status()


def test_the_local_pools_jobs_are_listed_if_no_job_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message once was that no job runs on this machine."""
    monkeypatch.setattr(PoolClient, "status", lambda self: {"pool": "big", "jobs": [{"job": "b"}, {"job": "a"}]})
    entry = JobEntry(url="http://127.0.0.1:1000", token="t", job="", pid=os.getpid(), pool="big")
    register(registry_directory(os.environ), entry)
    with pytest.raises(BadInputError, match=r"a pool \('big'\) runs on this machine: name .* -j NAME; its jobs: a, b"):
        Server().entry()
    assert Server(job="a").entry().url == f"{entry.url}/jobs/a/job"
