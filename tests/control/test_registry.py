"""The registry of jobs on this machine: it finds live jobs, drops dead ones, and rejects entries of other users."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.control.registry import JobEntry, find_job, live_jobs, register, registry_directory, unregister
from holdfast.errors import BadInputError, UnreachableError


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "registry"


@pytest.fixture
def other_process() -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE, text=True)
    yield process
    process.kill()
    process.communicate()


def _entry(pid: int = 0, url: str = "http://127.0.0.1:1000") -> JobEntry:
    return JobEntry(url=url, token="secret", job="j", pid=pid or os.getpid())


def test_a_registered_job_is_found(directory: Path) -> None:
    path = register(directory, _entry())
    found = find_job(directory)
    assert (found.url, found.token, found.job, found.pid) == ("http://127.0.0.1:1000", "secret", "j", os.getpid())
    assert path.stat().st_mode & 0o777 == 0o600
    assert directory.stat().st_mode & 0o777 == 0o700
    unregister(path)
    unregister(path)
    assert live_jobs(directory) == []
    assert list(directory.iterdir()) == []


def test_a_search_without_a_running_job_fails(directory: Path) -> None:
    with pytest.raises(UnreachableError, match="no job runs"):
        find_job(directory)


def test_two_jobs_require_a_url_to_select_one(directory: Path, other_process: subprocess.Popen[str]) -> None:
    register(directory, _entry())
    register(directory, _entry(other_process.pid, "http://127.0.0.1:2000"))
    with pytest.raises(BadInputError, match=r"2 jobs.*http://127.0.0.1:1000.*http://127.0.0.1:2000"):
        find_job(directory)
    assert find_job(directory, "http://127.0.0.1:2000/").pid == other_process.pid


def test_entries_of_dead_processes_are_ignored_and_removed(
    directory: Path, other_process: subprocess.Popen[str]
) -> None:
    register(directory, _entry())
    dead = register(directory, _entry(other_process.pid, "http://127.0.0.1:2000"))
    other_process.kill()
    other_process.wait()
    assert find_job(directory).pid == os.getpid()
    assert not dead.exists()


def test_a_zombie_process_counts_as_dead(directory: Path, other_process: subprocess.Popen[str]) -> None:
    register(directory, _entry(other_process.pid))
    other_process.kill()
    os.waitid(os.P_PID, other_process.pid, os.WEXITED | os.WNOWAIT)
    assert live_jobs(directory) == []


def test_another_process_with_the_same_pid_is_not_the_job(directory: Path) -> None:
    path = register(directory, _entry())
    path.write_bytes(path.read_bytes().replace(b'"birth":"', b'"birth":"9'))
    assert live_jobs(directory) == []
    assert not path.exists()


def test_a_broken_file_is_ignored(directory: Path) -> None:
    register(directory, _entry())
    (directory / "1.json").write_bytes(b"{")
    (directory / "2.json").write_bytes(b'{"url": "\xb5"}')
    assert find_job(directory).pid == os.getpid()


def test_an_unregistered_url_needs_a_token(directory: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(BadInputError, match="--token-file"):
            find_job(directory, url)
    with pytest.raises(
        UnreachableError, match=f"no coordinator answers at {url}: check the address, and give its token"
    ):
        find_job(directory, url)
    for none in ("http://127.0.0.1:port", "127.0.0.1", "http://[::1", "http://127.0.0.1"):
        with pytest.raises(BadInputError, match="--token-file"):
            find_job(directory, none)
    found = find_job(directory, "http://10.0.0.1:1/", "t")
    assert (found.url, found.token) == ("http://10.0.0.1:1", "t")


def test_a_given_token_overrides_the_registered_token(directory: Path) -> None:
    register(directory, _entry())
    assert find_job(directory, "http://127.0.0.1:1000", "mine").token == "mine"


def test_a_directory_that_others_can_enter_is_refused(directory: Path, tmp_path: Path) -> None:
    register(directory, _entry())
    directory.chmod(0o755)
    for use in (lambda: find_job(directory), lambda: register(directory, _entry())):
        with pytest.raises(BadInputError, match="must be a directory of this user"):
            use()
    directory.chmod(0o700)
    link = tmp_path / "link"
    link.symlink_to(directory)
    with pytest.raises(BadInputError, match="must be a directory of this user"):
        find_job(link)


def test_a_file_at_the_path_of_the_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "registry").write_text("")
    with pytest.raises(BadInputError, match=r"cannot be written.*XDG_RUNTIME_DIR"):
        register(tmp_path / "registry", _entry())


def test_the_default_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    private = Path(f"/tmp/holdfast-{os.getuid()}")
    assert registry_directory({"XDG_RUNTIME_DIR": str(tmp_path)}) == tmp_path / "holdfast"
    assert registry_directory({}) == private
    assert registry_directory({"XDG_RUNTIME_DIR": str(tmp_path / "missing")}) == private
    assert not (tmp_path / "missing").exists()
    (tmp_path / "file").write_text("")
    assert registry_directory({"XDG_RUNTIME_DIR": str(tmp_path / "file")}) == private
    # A test that runs as root can write everywhere, so access() answers here as on a read-only file system.
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK)
    assert registry_directory({"XDG_RUNTIME_DIR": str(tmp_path)}) == private
