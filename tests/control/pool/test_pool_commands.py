"""Errors for impossible requests to a pool: the problem, the value, and the remedy."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from pool_bench import PATIENCE_S, PoolProcess, hello, receive_message, send_message
from websockets.exceptions import ConnectionClosed

from holdfast.cli import main
from holdfast.protocol.messages.agent import Hello, Refused, Welcome
from holdfast.protocol.messages.pool import NodeAlive, NodeGrant
from holdfast.protocol.names import PROTOCOL

Call = Callable[..., tuple[int, str]]


def until(holds: Callable[[], object]) -> None:
    """Wait until the condition holds."""
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@contextmanager
def nodes(pool: PoolProcess, *names: str) -> Generator[None]:
    """Connect nodes that stay alive but start nothing."""
    over = threading.Event()

    def live(name: str) -> None:
        with pool.node() as node:
            send_message(node, hello(name))
            while not over.wait(0.5):
                send_message(node, NodeAlive())

    threads = [threading.Thread(target=live, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    until(lambda: sum(node["here"] for node in pool.ask("GET", "/pool").json()["nodes"]) == len(names))
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
    """Run a command here; return its exit code and all of its output."""
    monkeypatch.setenv("HOLDFAST_ADDRESS", pool.entry.url)
    monkeypatch.setenv("HOLDFAST_TOKEN", pool.entry.token)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("")

    def called(*args: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["holdfast", *args])
        with pytest.raises(SystemExit) as ended:
            main()
        captured = capsys.readouterr()
        code = ended.value.code
        return code if isinstance(code, int) else 0, captured.out + captured.err

    return called


@pytest.mark.parametrize(
    ("args", "code", "expected"),
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
            "preemptible is true, without checkpoint.dir",
        ),
        (("submit", "--name", "a/b", "train.py"), 2, "--name is 'a/b'"),
        (("submit", "nowhere.py"), 2, "there is no script"),
        (("submit", "nowhere.toml"), 2, "nowhere.toml"),
        (("stop", "-j", "nobody"), 3, "nobody"),
        (("suspend", "-j", "nobody"), 3, "there is no job 'nobody': the jobs are"),
        (("suspend",), 2, "no job is named: say which one is meant (-j NAME)"),
        (("update", "-j", "nobody", "--weight", "2"), 3, "there is no job 'nobody'"),
        (
            ("update", "-j", "nobody", "--weight", "nan"),
            2,
            "--weight is nan: it must be a number above 0, 1000 at most",
        ),
        (("update", "-j", "nobody", "--max-nodes", "0"), 2, "--max-nodes is 0: it must be a whole number from 1 to"),
        (("suspend", "-j", "a/stop#"), 3, "it does not know this resource (HTTP 404)"),
        (("scale", "3"), 3, "if it is a pool, name the job (-j NAME)"),
        (("update", "-j", "nobody"), 2, "no change is given: give --weight"),
        (("jobs", "--address", "http://127.0.0.1:1"), 3, "127.0.0.1:1"),
    ],
)
def test_an_impossible_command_is_refused_in_one_line(
    call: Call, args: tuple[str, ...], code: int, expected: str
) -> None:
    found, output = call(*args)
    assert (found, output.count("\n")) == (code, 1), output
    assert output.startswith("holdfast: ")
    assert expected in output


def test_an_unknown_key_is_refused_with_its_file_and_the_nearest_key(call: Call) -> None:
    Path("job.toml").write_text('script = "train.py"\nwieght = 2\n')
    code, output = call("submit", "job.toml")
    assert code == 2
    assert "job.toml" in output
    assert "wieght" in output
    assert "weight" in output.replace("wieght", "")
    Path("job.toml").write_text('script = "train.py"\nweight = 0\n')
    code, output = call("submit", "job.toml")
    assert code == 2
    assert "job.toml: weight is 0: it must be a number above 0" in output


def test_impossible_commands_for_running_and_finished_jobs_are_refused(call: Call) -> None:
    code, output = call("submit", "--nodes", "1:2", "--name", "one", "train.py")
    assert code == 0
    assert "one  runs on" in output
    code, output = call("submit", "--name", "one", "train.py")
    assert code == 2
    assert "name is 'one': a job of this name is admitted; give another (--name), or stop that one first" in output
    code, output = call("suspend", "-j", "one")
    assert code == 4
    assert "job one keeps no checkpoints: after a suspension it would start from scratch." in output
    assert "--force" in output
    code, output = call("update", "-j", "one", "--weight", "-1")
    assert code == 2
    assert "weight" in output
    code, output = call("update", "-j", "one", "--min-nodes", "3")
    assert code == 2
    assert "min_nodes is 3: it must be at most max_nodes (2)" in output
    code, output = call("suspend", "-j", "one", "--force", "--no-wait")
    assert code == 0
    assert "suspend" in output
    code, output = call("stop", "-j", "one", "--no-wait")
    assert code == 0
    until(lambda: "stopped" in call("jobs")[1])
    for command in ("stop", "suspend", "resume"):
        code, output = call(command, "-j", "one")
        assert code == 4, output
        assert "job one is over: stopped (a person has stopped it)" in output


def agent_says(
    pool: PoolProcess, job: str, node: str, grant: int, digest: str, unfit: str = ""
) -> Refused | Welcome | None:
    """Send a Hello to a job's coordinator as a node's agent; return the reply, or None if the connection closes."""
    message = Hello(
        protocol=PROTOCOL,
        job=job,
        node=node,
        session="0" * 16,
        term=0,
        agent_pid=1,
        workers=1,
        digest=digest,
        grant=grant,
        unfit=unfit,
    )
    with pool.node(path=f"/jobs/{job}/job/agent", token=pool.token_of(job)) as agent:
        agent.send(msgspec.msgpack.encode(message))
        try:
            data = agent.recv(timeout=PATIENCE_S)
        except ConnectionClosed:
            return None
    assert isinstance(data, bytes)
    return msgspec.msgpack.decode(data, type=Refused | Welcome)


def test_agents_with_another_script_or_an_invalid_grant_are_refused(pool: PoolProcess, call: Call) -> None:
    assert call("submit", "--nodes", "2", "--name", "pair", "train.py")[0] == 0
    grants: dict[str, int] = {}

    def granted() -> bool:
        output = pool.ask("GET", "/pool").json()["nodes"]
        grants.update({node["node"]: node["grant"] for node in output if node["job"] == "pair"})
        return len(grants) == 2 and pool.ask("GET", "/jobs/pair/job/status").status_code == 200

    until(granted)
    assert agent_says(pool, "pair", "n0", grants["n0"] - 1, "one") is None, "an old grant must be refused"
    assert agent_says(pool, "pair", "n1", grants["n0"], "one") is None, "the grant of another node must be refused"
    assert agent_says(pool, "pair", "n0", 0, "one") is None, "a missing grant must be refused"
    assert isinstance(agent_says(pool, "pair", "n0", grants["n0"], "one"), Welcome)
    refused = agent_says(pool, "pair", "n1", grants["n1"], "another")
    assert isinstance(refused, Refused)
    assert refused.exit_code == 2
    assert "script or arguments of node n1 differ from those of the job" in refused.why
    until(lambda: pool.ask("GET", "/jobs/pair").json()["state"] == "failed")
    code, output = call("explain", "-j", "pair")
    assert code == 0
    assert "job pair is failed: too few usable nodes in the pool (needs 2): n1: script or arguments of" in output


def test_explain_shows_the_reason_of_an_unusable_node(pool: PoolProcess, call: Call) -> None:
    script = str(Path("train.py").absolute())
    assert call("submit", "--nodes", "1:2", "--name", "some", "train.py")[0] == 0
    until(lambda: len(pool.ask("GET", "/jobs/some").json()["nodes"]) == 2)
    until(lambda: pool.ask("GET", "/jobs/some/job/status").status_code == 200)
    grants = {node["node"]: node["grant"] for node in pool.ask("GET", "/pool").json()["nodes"]}
    assert isinstance(agent_says(pool, "some", "n1", grants["n1"], "", "its disk is full"), Refused)
    until(lambda: pool.ask("GET", "/jobs/some").json()["refuses"] == {"n1": "its disk is full"})
    assert pool.ask("GET", "/jobs/some").json()["nodes"] == ["n0"], (
        "the node was given back and must not be offered again"
    )
    code, output = call("explain", "-j", "some")
    assert code == 0
    assert "n1 cannot be used: its disk is full" in output
    assert f"a node needs {script}, the same as on the job's other nodes" in output
    code, output = call("drain", "n0", "--dry-run")
    assert code == 0
    assert "n0 (job some): no other node is available, and the job needs at least 1" in output
    code, output = call("drain", "--rolling", "--dry-run")
    assert code == 2
    assert "--dry-run is for nodes that are named: leave out --rolling" in output
    assert call("stop", "-j", "some", "--now", "--no-wait")[0] == 0
    until(lambda: pool.ask("GET", "/jobs/some").json()["state"] == "stopped")


def test_a_job_fails_if_no_node_has_its_script(pool: PoolProcess, call: Call) -> None:
    assert call("submit", "--nodes", "1", "--name", "lost", "train.py")[0] == 0
    until(lambda: pool.ask("GET", "/jobs/lost/job/status").status_code == 200)
    why = "there is no script /somewhere/train.py on it that can be read"
    tried: list[str] = []
    for _ in range(2):
        until(lambda: pool.ask("GET", "/jobs/lost").json()["nodes"] not in ([], tried[-1:]))
        node = pool.ask("GET", "/jobs/lost").json()["nodes"][0]
        (grant,) = (one["grant"] for one in pool.ask("GET", "/pool").json()["nodes"] if one["node"] == node)
        refused = agent_says(pool, "lost", node, grant, "", why)
        assert isinstance(refused, Refused)
        assert why in refused.why
        tried.append(node)
    assert sorted(tried) == ["n0", "n1"], "the other node must be tried"
    until(lambda: pool.ask("GET", "/jobs/lost").json()["state"] == "failed")
    code, output = call("explain", "-j", "lost")
    assert code == 0
    assert f"job lost is failed: too few usable nodes in the pool (needs 1): {tried[0]}: {why}; " in output


def test_a_wrong_token_is_reported(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_TOKEN", "wrong")
    code, output = call("jobs")
    assert code == 2
    assert "token" in output


def test_a_node_with_a_name_in_use_is_refused_with_the_remedy(pool: PoolProcess) -> None:
    with pool.node() as node:
        send_message(node, hello("n0", "b"))
        reply = receive_message(node)
        assert not isinstance(reply, NodeGrant)
        assert "--node-name" in reply.why


@pytest.mark.parametrize("words", [("submit",), ("whatif", "submit")])
@pytest.mark.parametrize(
    ("pace", "expected"),
    [
        ("step_s = []\nmicro_batches = 8\nsamples = 8", "pace.step_s is empty, with 8 micro_batches of 8 samples"),
        ("step_s = [0, 0]\nmicro_batches = 8\nsamples = 8", "pace says nothing of a step with 8 micro_batches"),
        ("step_s = [2.0]", "pace says nothing of a step with 0 micro_batches of 0 samples that takes 2 s"),
        (
            "step_s = [2.0, -1.0]\nmicro_batches = 8\nsamples = 8",
            "pace.step_s is [2.0, -1.0]: it must be a list of numbers from 0 to 1000000000",
        ),
        ("step_s = [nan]\nmicro_batches = 8\nsamples = 8", "pace.step_s is [nan]: it must be a list of numbers from 0"),
        ("step_s = [2.0]\nmicro_batches = -8\nsamples = 8", "pace.micro_batches is -8"),
    ],
)
def test_an_invalid_throughput_table_is_refused(call: Call, words: tuple[str, ...], pace: str, expected: str) -> None:
    Path("job.toml").write_text(f'script = "train.py"\n[pace]\n{pace}\n')
    found, output = call(*words, "job.toml")
    assert found == 2, output
    assert expected in output
    assert output.count("\n") == 1


def test_a_throughput_table_that_decreases_is_accepted_with_a_warning(call: Call) -> None:
    table = "step_s = [4.0, 2.0, 2.5, 0, 1.5]\nmicro_batches = 8\nsamples = 8"
    Path("job.toml").write_text(
        f'script = "train.py"\nname = "humped"\nmin_nodes = 1\nmax_nodes = 2\n[pace]\n{table}\n'
    )
    found, output = call("submit", "job.toml")
    assert found == 0, output
    assert "with 3 nodes a step of humped takes 2.5 s, and with 2 only 2 s: the policy waf leaves it 2" in output
    assert "with 5 nodes" not in output
    assert call("stop", "-j", "humped", "--now", "--no-wait")[0] == 0


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--allow-starving",), "--allow-starving is for --policy waf, and the policy is equal"),
        (("--reserve", "auto", "--policy", "weighted"), "--reserve auto is for --policy waf"),
        (("--reserve", "-1"), "--reserve is -1: give a number from 0 to 256, or auto"),
        (("--reserve", "some"), "--reserve is some: give a number from 0 to 256, or auto"),
    ],
)
def test_a_pool_with_impossible_options_is_refused(call: Call, words: tuple[str, ...], expected: str) -> None:
    found, output = call("pool", *words)
    assert found == 2, output
    assert expected in output


@pytest.fixture(scope="module")
def weighing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PoolProcess]:
    """A pool that distributes its two nodes by weighted achieved FLOP/s."""
    with PoolProcess(tmp_path_factory.mktemp("waf"), policy="waf") as pool, nodes(pool, "n0", "n1"):
        yield pool


def test_whatif_names_the_job_starved_by_a_submission(
    weighing: PoolProcess, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_ADDRESS", weighing.entry.url)
    monkeypatch.setenv("HOLDFAST_TOKEN", weighing.entry.token)
    table = "[pace]\nstep_s = [8.0, 4.0]\nmicro_batches = 8\nsamples = 8\n[output]\nflop_per_sample = 1e12\n"
    for name, weight in (("light", 1.0), ("heavy", 3.0)):
        about = f'script = "train.py"\nname = "{name}"\nweight = {weight}\nmin_nodes = 1\nmax_nodes = 2\n'
        Path(f"{name}.toml").write_text(about + table)
    assert call("submit", "light.toml")[0] == 0
    found, output = call("whatif", "submit", "heavy.toml")
    assert found == 0, output
    assert "without its min_nodes light would have none: by the weights its nodes are worth more to heavy (1)" in output
    assert "times its weight would do" in output
