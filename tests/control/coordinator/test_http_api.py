"""The HTTP interface, through the client that the commands use."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from server_bench import PATIENCE_S, CoordinatorProcess, attach, hello, make_certificate, receive_message, send_message

from holdfast.control.client import CoordinatorClient
from holdfast.control.registry import JobEntry
from holdfast.errors import BadInputError, HoldfastError, RefusedError, UnreachableError
from holdfast.protocol.events import JobStarted, NodeLeft, NodesJoined, name_of
from holdfast.protocol.messages.agent import NodeFault, Welcome


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CoordinatorProcess]:
    """One coordinator for the tests that must not harm it."""
    with CoordinatorProcess(tmp_path_factory.mktemp("shared")) as running:
        yield running


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[CoordinatorProcess]:
    with CoordinatorProcess(tmp_path, nodes=9, allow_faults=True) as running:
        yield running


def test_the_status_lists_nodes_and_workers(coordinator: CoordinatorProcess) -> None:
    with coordinator.agent() as agent, coordinator.client() as client:
        send_message(agent, hello("n0"))
        assert isinstance(receive_message(agent), Welcome)
        send_message(agent, attach("n0"))
        coordinator.until_event(NodesJoined)
        status = client.status()
    assert (status["job"], status["state"], status["term"], status["generation"], status["step"]) == (
        "j",
        "waiting",
        1,
        0,
        0,
    )
    assert status["url"] == coordinator.entry.url
    assert status["coordinator_pid"] == coordinator.process.pid
    (node,) = status["nodes"]
    assert (node["node"], node["agent_pid"]) == ("n0", 1)
    assert [(worker["worker"], worker["pid"], worker["rank"]) for worker in node["workers"]] == [("n0/0/ab", 2, None)]


def test_events_are_json_lines_and_can_be_followed(coordinator: CoordinatorProcess) -> None:
    with coordinator.client() as client:
        (first,) = client.events()
        assert isinstance(first, JobStarted)
        assert (first.seq, first.url) == (1, coordinator.entry.url)
        (line,) = client.event_lines()
        assert {"time", "event", "job", "term", "generation", "seq"} <= json.loads(line).keys()
        assert list(client.events(after=1)) == []
        seen: list[str] = []
        followed = threading.Event()

        def follow() -> None:
            with coordinator.client() as own:
                for event in own.events(follow=True):
                    seen.append(name_of(event))
                    if isinstance(event, NodeLeft):
                        followed.set()

        follower = threading.Thread(target=follow)
        follower.start()
        with coordinator.agent() as agent:
            send_message(agent, hello("n0"))
            receive_message(agent)
        assert followed.wait(PATIENCE_S)
        # The end of the job also ends the follower.
        client.shutdown(0, "enough")
        follower.join(PATIENCE_S)
        assert not follower.is_alive()
    assert seen == ["job_started", "failure_detected", "node_left", "job_finished"]
    assert coordinator.wait() == 0


def test_a_fault_reaches_the_agent(coordinator: CoordinatorProcess) -> None:
    with coordinator.agent() as agent, coordinator.client() as client:
        send_message(agent, hello("n0"))
        receive_message(agent)
        client.inject("kill", "n0")
        fault = receive_message(agent)
        assert isinstance(fault, NodeFault)
        assert fault.fault == "kill"


def test_impossible_requests_are_refused_with_a_reason(coordinator: CoordinatorProcess) -> None:
    with coordinator.client() as client:
        with pytest.raises(UnreachableError, match="no node 'ghost'"):
            client.inject("kill", "ghost")
        with pytest.raises(BadInputError, match="tickle"):
            client.inject("tickle", "n0")
        with pytest.raises(BadInputError, match="hold needs --phase"):
            client.inject("hold", "n0")
        with pytest.raises(BadInputError, match="malformed"):
            client.inject("kill", "n0", worker=-1)
        with pytest.raises(RefusedError, match="holdfast agent"):
            client.add_nodes()
        assert client.status()["job"] == "j"


def test_faults_are_refused_unless_allowed(tmp_path: Path) -> None:
    with CoordinatorProcess(tmp_path) as coordinator, coordinator.client() as client:
        with pytest.raises(BadInputError, match="--allow-faults"):
            client.inject("kill", "n0")
        assert client.status()["job"] == "j"


def test_the_launcher_receives_node_requests(coordinator: CoordinatorProcess) -> None:
    with coordinator.client() as client, coordinator.client() as launcher:
        assert launcher.node_requests(0, wait_s=0) == []
        received: list[list[tuple[int, int]]] = []
        waiting = threading.Thread(target=lambda: received.append(launcher.node_requests(0, wait_s=30.0)))
        waiting.start()
        first = client.add_nodes(2)
        waiting.join(PATIENCE_S)
        assert received == [[(first, 2)]]
        second = client.add_nodes()
        assert second > first
        assert launcher.node_requests(first, wait_s=0) == [(second, 1)]
        assert launcher.node_requests(0, wait_s=0) == [(first, 2), (second, 1)]


def test_node_requests_are_accepted_before_the_launcher_connects(tmp_path: Path) -> None:
    with CoordinatorProcess(tmp_path, launched=True) as coordinator, coordinator.client() as client:
        number = client.add_nodes()
        assert client.node_requests(0, wait_s=0) == [(number, 1)]


def test_all_waiting_clients_receive_a_node_request(coordinator: CoordinatorProcess) -> None:
    received: list[list[tuple[int, int]]] = []

    def wait() -> None:
        with coordinator.client() as launcher:
            launcher.node_requests(0, wait_s=0)
            barrier.wait(PATIENCE_S)
            received.append(launcher.node_requests(0, wait_s=30.0))

    barrier = threading.Barrier(4)
    waiting = [threading.Thread(target=wait) for _ in range(3)]
    for thread in waiting:
        thread.start()
    barrier.wait(PATIENCE_S)
    with coordinator.client() as client:
        number = client.add_nodes()
    for thread in waiting:
        thread.join(PATIENCE_S)
    assert received == [[(number, 1)]] * 3


PATHS = [
    ("GET", "/status"),
    ("GET", "/events"),
    ("POST", "/inject"),
    ("POST", "/shutdown"),
    ("POST", "/nodes"),
    ("GET", "/node-requests"),
    ("GET", "/agent"),
    ("GET", "/"),
]


@pytest.mark.parametrize("header", ["", "Bearer", "Bearer wrong", "Basic {token}", "bearer {token}", "Bearer {token}x"])
def test_requests_without_the_token_are_refused(shared: CoordinatorProcess, header: str) -> None:
    headers = {"Authorization": header.format(token=shared.entry.token)} if header else {}
    with httpx.Client(base_url=shared.entry.url, trust_env=False, timeout=PATIENCE_S) as client:
        assert {client.request(*path, headers=headers).status_code for path in PATHS} == {401}
    with shared.client() as client:
        assert client.status()["state"] == "waiting"


def test_metrics_are_open_on_loopback(shared: CoordinatorProcess) -> None:
    with httpx.Client(base_url=shared.entry.url, trust_env=False, timeout=PATIENCE_S) as client:
        answer = client.get("/metrics")
    assert answer.status_code == 200
    assert 'holdfast_term{job_name="j"} 1.0' in answer.text


def test_metrics_need_the_token_elsewhere(tmp_path: Path) -> None:
    with CoordinatorProcess(tmp_path, host="0.0.0.0", token="known") as coordinator:
        port = coordinator.entry.url.rsplit(":", 1)[1]
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=PATIENCE_S) as client:
            assert client.get("/metrics").status_code == 401
            assert client.get("/metrics", headers={"Authorization": "Bearer known"}).status_code == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/inject", b""),
        ("/inject", b"{"),
        ("/inject", b'{"node": 3, "fault": "kill"}'),
        ("/inject", b'{"node": "a", "fault": "kill", "extra": 1}'),
        ("/inject", b'{"node": "\xb5", "fault": "kill"}'),
        ("/inject", b'{"extra": ' + b"[" * 60_000),
        ("/shutdown", b'{"exit_code": 256}'),
        ("/nodes", b'{"count": 0}'),
        ("/nodes", b'{"count": 1000000}'),
        ("/nodes", b" " * 100_000),
    ],
)
def test_bad_bodies_are_refused(shared: CoordinatorProcess, path: str, body: bytes) -> None:
    headers = {"Authorization": f"Bearer {shared.entry.token}"}
    with httpx.Client(base_url=shared.entry.url, trust_env=False, timeout=PATIENCE_S, headers=headers) as client:
        answer = client.post(path, content=body)
        assert answer.status_code == 400
        assert json.loads(answer.text)["error"]
        assert client.get("/status").status_code == 200


@pytest.mark.parametrize("query", ["after=-1", "after=x", "after=nan", "wait=-1", "wait=inf", "after=1e30"])
def test_bad_numbers_are_refused(shared: CoordinatorProcess, query: str) -> None:
    headers = {"Authorization": f"Bearer {shared.entry.token}"}
    with httpx.Client(base_url=shared.entry.url, trust_env=False, timeout=PATIENCE_S, headers=headers) as client:
        for path in ("/events", "/node-requests"):
            answer = client.get(f"{path}?{query}")
            assert (answer.status_code, "must be a number" in answer.text) == (400, True)


def test_an_unreachable_coordinator_is_reported() -> None:
    entry = JobEntry(url="http://127.0.0.1:1", token="t", job="j", pid=0)
    with CoordinatorClient(entry) as client:
        with pytest.raises(UnreachableError, match=r"no coordinator answers at http://127.0.0.1:1") as caught:
            client.status()
        assert isinstance(caught.value, HoldfastError)
        assert caught.value.exit_code == 3
        with pytest.raises(UnreachableError):
            list(client.events(follow=True, patience_s=0.0))


@pytest.mark.parametrize("url", ["nonsense", "ftp://h:1", "http://h:port"])
def test_an_invalid_url_is_bad_input(url: str) -> None:
    with (
        pytest.raises(BadInputError, match="URL"),
        contextlib.closing(CoordinatorClient(JobEntry(url=url, token="t", job="j", pid=0))) as client,
    ):
        client.status()


def test_a_coordinator_with_a_certificate_uses_tls(tmp_path: Path) -> None:
    cert, key = make_certificate(tmp_path)
    with CoordinatorProcess(tmp_path, tls_cert=cert, tls_key=key) as coordinator:
        assert coordinator.entry.url.startswith("https://127.0.0.1:")
        with coordinator.client() as client:
            assert client.status()["job"] == "j"
        plain = JobEntry(url=coordinator.entry.url.replace("https", "http"), token="t", job="j", pid=0)
        with CoordinatorClient(plain) as client, pytest.raises(HoldfastError):
            client.status()
