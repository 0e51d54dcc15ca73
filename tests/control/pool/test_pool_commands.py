"""What a pool's users are told who ask for what cannot be: what is wrong, with which value, and what to do."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from pool_bench import PATIENCE_S, PoolProcess, hear, hello, say

from holdfast.cli import main
from holdfast.protocol.messages.pool import NodeAlive, NodeGrant

Call = Callable[..., tuple[int, str]]


@contextmanager
def nodes(pool: PoolProcess, *names: str) -> Generator[None]:
    """Have nodes that are there, and start nothing."""
    over = threading.Event()

    def live(name: str) -> None:
        with pool.node() as node:
            say(node, hello(name))
            while not over.wait(0.5):
                say(node, NodeAlive())

    threads = [threading.Thread(target=live, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + PATIENCE_S
    while sum(node["here"] for node in pool.ask("GET", "/pool").json()["nodes"]) < len(names):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PoolProcess]:
    """One server with two nodes, on which a job waits for processes that never come."""
    with PoolProcess(tmp_path_factory.mktemp("pool")) as pool, nodes(pool, "n0", "n1"):
        yield pool


@pytest.fixture
def call(
    pool: PoolProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Call:
    """Run a command here; return its exit code and all that it prints."""
    monkeypatch.setenv("HOLDFAST_ADDRESS", pool.entry.url)
    monkeypatch.setenv("HOLDFAST_TOKEN", pool.entry.token)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("")

    def called(*args: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["holdfast", *args])
        with pytest.raises(SystemExit) as ended:
            main()
        said = capsys.readouterr()
        code = ended.value.code
        return code if isinstance(code, int) else 0, said.out + said.err

    return called


@pytest.mark.parametrize(
    ("args", "code", "said"),
    [
        (("submit", "--nodes", "9", "train.py"), 2, "needs 9 nodes, and the pool has 2 nodes: 2 would fit (--nodes 2)"),
        (("submit", "--nodes", "1:2", "--set", "sizes=[3,4]", "train.py"), 2, "sizes is 3, 4: none lies within"),
        (
            ("submit", "--set", "weight=0", "train.py"),
            2,
            "--set weight is 0: it must be a number above 0, 1000 at most",
        ),
        (("submit", "--set", "weight=-2", "train.py"), 2, "--set weight is -2: it must be a number above 0"),
        (("submit", "--set", "wieght=2", "train.py"), 2, "weight"),
        (("submit", "--set", "priority=1e30", "train.py"), 2, "priority"),
        (
            ("submit", "--set", "preemptible=true", "train.py"),
            2,
            "preemptible is true: each time others need its nodes",
        ),
        (("submit", "--name", "a/b", "train.py"), 2, "--name is 'a/b'"),
        (("submit", "nowhere.py"), 2, "there is no script"),
        (("submit", "nowhere.toml"), 2, "nowhere.toml"),
        (("stop", "-j", "nobody"), 3, "nobody"),
        (("suspend", "-j", "nobody"), 3, "there is no job 'nobody': the jobs are"),
        (("suspend",), 2, "no job is named: say which one is meant (-j NAME)"),
        (("update", "-j", "nobody", "--weight", "2"), 3, "there is no job 'nobody'"),
        (("update", "-j", "nobody"), 2, "nothing is to be changed: give --weight"),
        (("jobs", "--address", "http://127.0.0.1:1"), 3, "127.0.0.1:1"),
    ],
)
def test_what_cannot_be_is_refused(call: Call, args: tuple[str, ...], code: int, said: str) -> None:
    found, told = call(*args)
    assert (found, told.count("\n")) == (code, 1), told
    assert told.startswith("holdfast: ")
    assert said in told


def test_a_key_that_there_is_not_is_said_with_the_nearest_one_and_its_file(call: Call) -> None:
    Path("job.toml").write_text('script = "train.py"\nwieght = 2\n')
    code, told = call("submit", "job.toml")
    assert code == 2
    assert "job.toml" in told
    assert "wieght" in told
    assert "weight" in told.replace("wieght", "")
    Path("job.toml").write_text('script = "train.py"\nweight = 0\n')
    code, told = call("submit", "job.toml")
    assert code == 2
    assert "job.toml: weight is 0: it must be a number above 0" in told


def test_what_is_done_to_a_job_that_is_there_and_to_one_that_is_over(call: Call) -> None:
    code, told = call("submit", "--nodes", "1:2", "--name", "one", "train.py")
    assert code == 0
    assert "one  runs on" in told
    code, told = call("submit", "--name", "one", "train.py")
    assert code == 2
    assert "name is 'one': a job of this name is admitted; give another (--name), or stop that one first" in told
    code, told = call("suspend", "-j", "one")
    assert code == 4
    assert "job one keeps no checkpoints: suspended, it would begin anew." in told
    assert "--force" in told
    code, told = call("update", "-j", "one", "--weight", "-1")
    assert code == 2
    assert "weight" in told
    code, told = call("update", "-j", "one", "--min-nodes", "3")
    assert code == 2
    assert "min_nodes is 3: it must be max_nodes (2) at the most" in told
    code, told = call("suspend", "-j", "one", "--force", "--no-wait")
    assert code == 0
    assert "suspend" in told
    code, told = call("stop", "-j", "one", "--no-wait")
    assert code == 0
    deadline = time.monotonic() + PATIENCE_S
    while "stopped" not in call("jobs")[1]:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    for command in ("stop", "suspend", "resume"):
        code, told = call(command, "-j", "one")
        assert code == 4, told
        assert "job one is over: stopped (a person has stopped it)" in told


def test_a_wrong_token_is_said(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_TOKEN", "wrong")
    code, told = call("jobs")
    assert code == 2
    assert "token" in told


def test_a_node_that_is_refused_was_told_why(pool: PoolProcess) -> None:
    with pool.node() as node:
        say(node, hello("n0", "b"))
        told = hear(node)
        assert not isinstance(told, NodeGrant)
        assert "--node-name" in told.why
