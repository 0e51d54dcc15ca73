"""A pool's server against hostile clients: with a wrong token, a job's token, or the pool's own."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Generator, Iterator
from pathlib import Path

import httpx
import msgspec
import pytest
from pool_bench import PoolProcess, a_job, hello, receive_message, send_message
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection

from holdfast.control.api_types import MAX_BODY_BYTES
from holdfast.protocol.messages.pool import NodeAlive, NodeGrant, NodeState, PoolRefusal
from holdfast.protocol.names import MAX_MESSAGE_BYTES, PROTOCOL


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PoolProcess]:
    """One server for all tests: it keeps serving, whatever it receives."""
    with PoolProcess(tmp_path_factory.mktemp("pool")) as pool:
        yield pool


@pytest.fixture(autouse=True)
def serves_on(pool: PoolProcess) -> Iterator[None]:
    yield
    pool.check_serves()


@contextlib.contextmanager
def running(pool: PoolProcess, name: str) -> Generator[str]:
    """Run a job that has a node, and so a coordinator; yield the token of its nodes."""
    with pool.node() as node:
        send_message(node, hello(f"of-{name}"))
        assert isinstance(receive_message(node), NodeGrant)
        assert pool.ask("POST", "/jobs", a_job(name)).status_code == 200
        until_grant(node, name)
        until_answered(pool, name, 200)
        yield pool.token_of(name)
    assert pool.ask("POST", f"/jobs/{name}/stop").status_code == 200


def until_answered(pool: PoolProcess, name: str, code: int, *, token: str | None = None) -> None:
    """Wait until requests to a job's coordinator get this status code."""
    deadline = time.monotonic() + 30
    while (answer := pool.ask("GET", f"/jobs/{name}/job/status", token=token)).status_code != code:
        assert time.monotonic() < deadline, answer
        time.sleep(0.02)


def until_grant(node: ClientConnection, job: str) -> NodeGrant:
    """Wait until the node is granted to the job."""
    while True:
        reply = receive_message(node)
        assert isinstance(reply, NodeGrant)
        if reply.job == job:
            return reply


def refused(node: ClientConnection) -> str:
    """Return the reason why a node is refused; it receives no message after that."""
    reply = receive_message(node)
    assert isinstance(reply, PoolRefusal)
    with pytest.raises(ConnectionClosed):
        receive_message(node)
    return reply.why


# ---- no token, or another's ----

PATHS = (
    "/pool",
    "/pool/events",
    "/jobs",
    "/jobs/one",
    "/jobs/one/launch",
    "/jobs/one/job/status",
    "/nodes/n0/forget",
    "/",
)


@pytest.mark.parametrize("token", ["", "wrong", "wrong" * 1000])
def test_requests_without_the_token_are_refused(pool: PoolProcess, token: str) -> None:
    with running(pool, "one"):
        for path in PATHS:
            assert pool.ask("GET", path, token=token).status_code == 401, path
        assert pool.ask("POST", "/jobs", a_job("two"), token=token).status_code == 401
        for path in ("/agent", "/jobs/one/job/agent"):
            with pytest.raises(InvalidStatus, match="401"), pool.node(path=path, token=token):
                pass
    assert "two" not in pool.ask("GET", "/pool").text


def test_the_token_of_a_job_opens_only_its_own_coordinator(pool: PoolProcess) -> None:
    with running(pool, "one") as mine, running(pool, "two") as others:
        assert mine != others
        assert pool.ask("GET", "/jobs/one/job/status", token=mine).json()["job"] == "one"
        closed = (
            *(path for path in PATHS if path != "/jobs/one/job/status"),
            "/metrics",
            "/jobs/two/job/status",
            "/jobs/none/job/status",
            "/jobs//job/status",
            "/jobs%2Ftwo%2Fjob%2Fstatus",
            "//pool",
        )
        for path in closed:
            assert pool.ask("GET", path, token=mine).status_code == 403, path
        # However the path is written, it opens only resources of its own job.
        for path in ("/jobs/one/job/..%2f..%2ftwo%2fjob%2fstatus", "/jobs/one/job/..%2f..%2f..%2fpool"):
            assert pool.ask("GET", path, token=mine).status_code == 404, path
        for path in ("/jobs", "/jobs/one/stop", "/jobs/one/suspend", "/jobs/one/resume", "/jobs/two/stop"):
            assert pool.ask("POST", path, a_job("three"), token=mine).status_code == 403, path
        for path in ("/agent", "/jobs/two/job/agent", "/jobs/none/job/agent"):
            with pytest.raises(InvalidStatus, match="403"), pool.node(path=path, token=mine):
                pass
    until_answered(pool, "one", 401, token=mine)  # The token ends with its job.


def test_a_request_to_a_missing_coordinator_is_answered_with_not_found(pool: PoolProcess) -> None:
    """An agent would give up after a refused token, and its node would be granted in vain."""
    with pytest.raises(InvalidStatus, match="404"), pool.node(path="/jobs/none/job/agent"):
        pass


def test_a_later_job_with_the_same_name_gets_another_token(pool: PoolProcess) -> None:
    with running(pool, "again") as first:
        pass
    with running(pool, "again") as second:
        assert first != second
        assert pool.ask("GET", "/jobs/again/job/status", token=first).status_code == 401


# ---- messages ----


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\x91" * 100_000,
        b"x" * (MAX_MESSAGE_BYTES + 1),
        msgspec.msgpack.encode(NodeAlive()),
        msgspec.msgpack.encode({"type": "Nobody"}),
        msgspec.msgpack.encode({"type": "PoolHello", "node": "../../etc", "session": "a"}),
        msgspec.msgpack.encode({"type": "PoolHello", "node": "n", "session": "NONE"}),
        msgspec.msgpack.encode({"type": "PoolHello", "node": "n", "session": "a", "stands": {"runs": -1}}),
        msgspec.msgpack.encode({"type": "PoolHello", "node": "n", "session": "a", "rack": "a/../b"}),
    ],
    ids=["empty", "no message", "deep", "large", "no hello", "unknown", "node", "session", "count", "rack"],
)
def test_an_invalid_message_ends_the_connection(pool: PoolProcess, data: bytes) -> None:
    with pool.node() as node:
        node.send(data)
        with pytest.raises(ConnectionClosed):
            receive_message(node)


def test_a_second_hello_ends_the_connection(pool: PoolProcess) -> None:
    with pool.node() as node:
        send_message(node, hello("twice"))
        assert isinstance(receive_message(node), NodeGrant)
        send_message(node, hello("other"))
        with pytest.raises(ConnectionClosed):
            receive_message(node)
    assert "other" not in [one["node"] for one in pool.ask("GET", "/pool").json()["nodes"]]


def test_a_node_of_another_version_is_refused_with_a_remedy(pool: PoolProcess) -> None:
    with pool.node() as node:
        send_message(node, hello("old", protocol=PROTOCOL - 1))
        assert f"node old speaks version {PROTOCOL - 1}, and the pool {PROTOCOL}: install the same" in refused(node)


def test_the_name_of_a_connected_node_cannot_be_taken_over(pool: PoolProcess) -> None:
    with pool.node() as node:
        send_message(node, hello("mine"))
        assert isinstance(receive_message(node), NodeGrant)
        assert pool.ask("POST", "/jobs", a_job("held")).status_code == 200
        grant = until_grant(node, "held").grant
        with pool.node() as thief:
            send_message(thief, hello("mine", "b", stands=NodeState(ended=grant)))
            assert "a node of the name mine is here already: give the other one another (--node-name)" in refused(thief)
        (found,) = (one for one in pool.ask("GET", "/pool").json()["nodes"] if one["node"] == "mine")
        assert (found["grant"], found["here"]) == (grant, True)
        assert pool.ask("POST", "/jobs/held/stop").status_code == 200


def test_a_replayed_hello_receives_the_recorded_grant(pool: PoolProcess) -> None:
    """A replayed hello is indistinguishable from the same node: the newest connection wins, and both may return."""
    with pool.node() as first, pool.node() as again:
        old = hello("seen")
        send_message(first, old)
        assert isinstance(receive_message(first), NodeGrant)
        assert pool.ask("POST", "/jobs", a_job("kept")).status_code == 200
        grant = until_grant(first, "kept")
        send_message(again, old)
        assert until_grant(again, "kept").grant == grant.grant
        with pytest.raises(ConnectionClosed):
            receive_message(first)
        assert pool.ask("POST", "/jobs/kept/stop").status_code == 200


def test_a_node_that_reports_an_unknown_grant_is_refused(pool: PoolProcess) -> None:
    with pool.node() as node:
        send_message(node, hello("liar", stands=NodeState(ended=2**63)))
        assert f"node liar knows grant {2**63} of a pool pool that this one does not" in refused(node)
    with pool.node() as node:
        send_message(node, hello("liar", term=99))
        assert "by server 99, of a pool" in refused(node).replace(" of a pool", ", of a pool")
    with running(pool, "still"), pool.node() as node:
        send_message(node, hello("liar"))
        assert isinstance(receive_message(node), NodeGrant)
        send_message(node, NodeState(runs=2**63, ended=2**63))
        assert "knows grant" in refused(node)
        assert pool.ask("GET", "/jobs/still").json()["nodes"] == ["of-still"]


def test_a_node_that_floods_the_pool_does_not_delay_other_clients(pool: PoolProcess) -> None:
    with pool.node() as node:
        send_message(node, hello("loud"))
        assert isinstance(receive_message(node), NodeGrant)
        word = msgspec.msgpack.encode(NodeState())
        for _ in range(20_000):
            node.send(word)
        began = time.monotonic()
        assert pool.ask("GET", "/pool").status_code == 200
        assert time.monotonic() - began < 10.0


# ---- submissions ----


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"name": ""}, 'name is "": a job of a pool needs one'),
        ({"name": ".."}, "name"),
        ({"name": "a/b"}, "name"),
        ({"name": "a\n"}, "name"),
        ({"name": "x" * 65}, "name"),
        ({"script": ""}, 'script is "": give the path of a Python file'),
        ({"script": "train.py"}, "script is 'train.py': nodes have other folders than you"),
        ({"script": "/a\0b.py"}, "script is '/a\\x00b.py': it must not contain NUL"),
        ({"args": ["\0"]}, "args is '\\x00': it must not contain NUL"),
        ({"output": {"events": "../x.jsonl"}}, "output.events is '../x.jsonl': nodes have other folders than you"),
        ({"output": {"log_dir": "logs"}}, "output.log_dir is 'logs'"),
        ({"checkpoint": {"dir": "saved"}}, "checkpoint.dir is 'saved'"),
        ({"priority": 10**30}, "$.priority"),
        ({"max_nodes": 10**10}, "$.max_nodes"),
        ({"sizes": [10**30]}, "$.sizes"),
        ({"time_limit": -1}, "$.time_limit"),
        ({"weight": 0}, "$.weight"),
        ({"wieght": 1}, "unknown field `wieght`"),
        ({"args": ["x" * MAX_BODY_BYTES]}, "larger than"),
    ],
)
def test_an_invalid_job_is_refused(pool: PoolProcess, keys: dict[str, object], expected: str) -> None:
    answer = pool.ask("POST", "/jobs", {**a_job("bad"), **keys})
    assert answer.status_code == 400
    assert expected in answer.json()["error"]
    assert "bad" not in [job["job"] for job in pool.ask("GET", "/jobs").json()["jobs"]]


def test_a_request_body_of_ten_megabytes_is_refused(pool: PoolProcess) -> None:
    # The server may close the connection first.
    with contextlib.suppress(httpx.WriteError, httpx.RemoteProtocolError, httpx.ReadError):
        assert pool.ask("POST", "/jobs", b"x" * 10_000_000).status_code == 400


@pytest.mark.parametrize("path", ["/jobs", "/jobs/none/suspend", "/jobs/none/update"])
@pytest.mark.parametrize("body", [b"\xff", b"[" * 60_000, b"null", b'{"force": 3}', b'{"changes": {"x": "y"}}'])
def test_an_invalid_request_body_is_refused(pool: PoolProcess, path: str, body: bytes) -> None:
    assert pool.ask("POST", path, body).status_code in (400, 404)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"weight": 0}, "weight"),
        ({"weight": -1}, "weight"),
        ({"max_nodes": 10**30}, "max_nodes"),
        ({"min_nodes": 2}, "min_nodes is 2: it must be at most max_nodes (1)"),
        ({"priority": 10**30}, "priority"),
        ({"script": 1}, "script of a submitted job cannot be changed"),
    ],
)
def test_an_invalid_update_is_refused(pool: PoolProcess, changes: dict[str, float], expected: str) -> None:
    name = f"fixed-{time.monotonic_ns()}"
    assert pool.ask("POST", "/jobs", a_job(name)).status_code == 200
    answer = pool.ask("POST", f"/jobs/{name}/update", {"changes": changes})
    assert answer.status_code == 400
    assert expected in answer.json()["error"]
    assert pool.ask("POST", f"/jobs/{name}/stop").status_code == 200


def test_an_incomplete_request_times_out(tmp_path: Path, pool: PoolProcess) -> None:
    """Other clients are served meanwhile."""
    with pool.connection() as slow:
        slow.sendall(
            f"POST /jobs HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {pool.entry.token}\r\n"
            "Content-Length: 1000\r\n\r\n{".encode()
        )
        pool.check_serves()
        answer = b""
        while data := slow.recv(65536):
            answer += data
    assert b"400" in answer
    assert b"did not end within" in answer
