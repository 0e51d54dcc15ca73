"""Coordinators as processes: refusals without side effects, endings, and successors."""

from __future__ import annotations

import json
import os
import signal
import socket
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from server_bench import PATIENCE_S, CoordinatorProcess, EarlyEndError, attach, hello, receive_message, send_message
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection

from holdfast.control.coordinator.server import open_job_store, open_listener
from holdfast.control.coordinator.settings import ServerSettings
from holdfast.control.registry import live_jobs
from holdfast.control.store.interface import Store, StoreError
from holdfast.control.store.store_choice import open_store
from holdfast.coordination.config import CoordinatorConfig
from holdfast.errors import BadInputError
from holdfast.observability.history.audit import audit_lines
from holdfast.protocol.events import (
    CoordinatorRestarted,
    GenerationStarted,
    JobFinished,
    JobStarted,
    NodesJoined,
    name_of,
)
from holdfast.protocol.job_spec import JobSpec
from holdfast.protocol.messages.agent import EndNode, ToWorker, Welcome
from holdfast.protocol.messages.orders import JobDone, Stop
from holdfast.protocol.messages.plans import BeginNode
from holdfast.protocol.messages.worker import Entered, Finished
from made_events import made


def _contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def _refused(tmp_path: Path, **settings: Any) -> str:
    """Start a coordinator that must refuse with one line and exit code 2 and change no file; return the line."""
    place = tmp_path / "place"
    before = _contents(place) if place.is_dir() else None
    logs = tmp_path / "logs"
    logs.mkdir(exist_ok=True)
    with pytest.raises(EarlyEndError) as caught, CoordinatorProcess(logs, **settings):
        pass
    assert caught.value.code == 2, caught.value.log
    assert (_contents(place) if place.is_dir() else None) == before
    (line,) = caught.value.log.strip().splitlines()
    return line


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder in which no file may change."""
    (tmp_path / "place").mkdir()
    return tmp_path / "place"


def test_a_port_in_use_is_refused(tmp_path: Path, place: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line = _refused(
            tmp_path, port=port, store=f"sqlite:{place}/s.db", events=place / "e.jsonl", registry=tmp_path / "registry"
        )
    assert f"port {port} of 127.0.0.1" in line
    assert not (tmp_path / "registry").exists()


def test_an_address_of_another_machine_is_refused(tmp_path: Path, place: Path) -> None:
    assert "192.0.2.1" in _refused(tmp_path, host="192.0.2.1", token="t", store=f"sqlite:{place}/s.db")


def test_a_store_with_a_newer_schema_is_refused(tmp_path: Path, place: Path) -> None:
    with CoordinatorProcess(tmp_path, store=f"sqlite:{place}/s.db", events=place / "e.jsonl") as coordinator:
        coordinator.process.send_signal(signal.SIGTERM)
        coordinator.wait()
    connection = sqlite3.connect(place / "s.db")
    connection.execute("PRAGMA user_version = 99")
    connection.close()
    assert "schema 99" in _refused(tmp_path, store=f"sqlite:{place}/s.db", events=place / "e.jsonl")


def test_a_bad_events_file_leaves_the_store_unchanged(tmp_path: Path, place: Path) -> None:
    (place / "e.jsonl").write_text("notes\n")
    assert "e.jsonl" in _refused(tmp_path, store=f"sqlite:{place}/s.db", events=place / "e.jsonl")
    assert "holds something else" in _refused(tmp_path, store="memory:", events=place / "e.jsonl")


def test_a_bad_store_leaves_the_events_file_unchanged(tmp_path: Path, place: Path) -> None:
    assert "the store is" in _refused(tmp_path, store="redis:", events=place / "e.jsonl")
    (place / "s.db").write_text("notes")
    assert "not a database" in _refused(tmp_path, store=f"sqlite:{place}/s.db", events=place / "e.jsonl")


def test_a_bad_registry_leaves_the_store_unchanged(tmp_path: Path, place: Path) -> None:
    (tmp_path / "registry").mkdir(mode=0o777)
    (tmp_path / "registry").chmod(0o777)
    line = _refused(tmp_path, store=f"sqlite:{place}/s.db", events=place / "e.jsonl", registry=tmp_path / "registry")
    assert "directory of this user" in line


def test_an_impossible_host_name_is_refused() -> None:
    with pytest.raises(BadInputError, match=r"cannot listen on the address a\.\.b"):
        open_listener("a..b", 0)


@pytest.mark.parametrize(("takeover", "kind"), [(False, BadInputError), (True, StoreError)])
def test_a_locked_store_is_bad_input_except_during_a_takeover(takeover: bool, kind: type[Exception]) -> None:
    def locked(url: str) -> Store:
        raise StoreError(f"{url} is locked")

    config = CoordinatorConfig(spec=JobSpec(name="j"), takeover=takeover)
    with pytest.raises(kind, match="sqlite:s is locked"):
        open_job_store(ServerSettings(config=config, store="sqlite:s"), locked)


def test_a_store_with_an_older_schema_is_refused(tmp_path: Path, place: Path) -> None:
    record = {"schema": 1, "job": "j", "term": 3, "generation": 7}
    store = open_store(f"sqlite:{place}/s.db")
    store.compare_and_swap("jobs/j/record", msgspec.msgpack.encode(record), 0)
    store.close()
    line = _refused(tmp_path, store=f"sqlite:{place}/s.db", events=place / "e.jsonl")
    assert f"sqlite:{place}/s.db has schema 1" in line
    assert "give another store" in line


@pytest.mark.parametrize(
    ("job", "term", "why"), [("other", 1, "of job 'other', not of 'j'"), ("j", 9, "coordinator 9, generation")]
)
def test_events_of_another_job_or_run_are_refused(tmp_path: Path, place: Path, job: str, term: int, why: str) -> None:
    with CoordinatorProcess(tmp_path, store=f"sqlite:{place}/s.db", events=place / "e.jsonl") as coordinator:
        coordinator.process.kill()
        coordinator.wait()
    store = open_store(f"sqlite:{place}/s.db")  # This merges the write-ahead log, so that later opens change nothing.
    store.close()
    event = made("job_started", seq=1, job=job, term=term)
    (place / "e.jsonl").write_bytes(msgspec.json.encode(event) + b"\n")
    assert why in _refused(tmp_path, store=f"sqlite:{place}/s.db", events=place / "e.jsonl")


@pytest.mark.parametrize("damage", ["removed", "last lost", "NUL tail", "torn and NUL"])
def test_a_damaged_journal_is_repaired(tmp_path: Path, damage: str) -> None:
    settings: dict[str, Any] = {"store": f"sqlite:{tmp_path}/s.db", "token": "t", "nodes": 9}
    path = tmp_path / "s.db.events.jsonl"
    with CoordinatorProcess(tmp_path, **settings) as first, first.agent() as agent:
        send_message(agent, hello("n0"))
        send_message(agent, attach("n0"))
        first.until_event(NodesJoined)
        first.process.kill()
        first.wait()
    lines = path.read_bytes().splitlines(keepends=True)
    if damage == "removed":
        path.unlink()
    elif damage == "last lost":
        path.write_bytes(b"".join(lines[:-1]))
    else:
        path.write_bytes(b"".join(lines) + (lines[0][:40] if damage == "torn and NUL" else b"") + b"\0" * 4096)
    with CoordinatorProcess(tmp_path, **settings) as second, second.client() as client:
        events = [(event["seq"], event["event"]) for event in map(msgspec.json.decode, path.read_bytes().splitlines())]
        assert client.status()["events"] == events[-1][0]
    # The record contains `nodes_joined`, the event of its own transition.
    first_event = "journal_repaired" if damage == "removed" else "job_started"
    assert events == [(1, first_event), (2, "nodes_joined"), (3, "coordinator_restarted")]


def test_events_of_an_unfinished_job_are_refused_with_an_empty_store(tmp_path: Path, place: Path) -> None:
    with CoordinatorProcess(tmp_path, store="memory:", events=place / "e.jsonl") as coordinator:
        coordinator.process.kill()
        coordinator.wait()
    assert "1 events of a job that has not ended" in _refused(
        tmp_path, store=f"sqlite:{place}/s.db", events=place / "e.jsonl"
    )


def test_a_finished_job_continues_its_events_file_with_an_empty_store(tmp_path: Path) -> None:
    path = tmp_path / "e.jsonl"
    for _ in range(3):
        with CoordinatorProcess(tmp_path, store="memory:", events=path) as coordinator:
            httpx.get(coordinator.entry.url, timeout=PATIENCE_S)  # The coordinator handles signals once it answers.
            coordinator.process.send_signal(signal.SIGTERM)
            assert coordinator.wait() == 75
    events = [msgspec.json.decode(line) for line in path.read_bytes().splitlines()]
    assert [(event["event"], event["seq"], event["term"]) for event in events] == [
        ("job_started", 1, 1),
        ("job_finished", 2, 1),
        ("coordinator_restarted", 3, 2),
        ("job_finished", 4, 2),
        ("coordinator_restarted", 5, 3),
        ("job_finished", 6, 3),
    ]
    assert audit_lines(path.read_bytes().splitlines(keepends=True)).sound


def test_a_store_older_than_its_events_is_refused_and_unchanged(tmp_path: Path, place: Path) -> None:
    """It is unknown whether the job's workers still run, so a person must name the newest store."""
    settings: dict[str, Any] = {"store": f"sqlite:{place}/s.db", "events": place / "e.jsonl", "token": "t"}
    with CoordinatorProcess(tmp_path, **settings) as coordinator, coordinator.agent() as agent:
        backup = _contents(place)
        _training(agent)
        coordinator.until_event(GenerationStarted)
        coordinator.process.kill()
        coordinator.wait()
    for path in place.iterdir():
        if not path.name.startswith("e.jsonl"):
            path.unlink()
    for name, data in backup.items():
        if not name.startswith("e.jsonl"):
            (place / name).write_bytes(data)
    open_store(f"sqlite:{place}/s.db").close()  # This merges the write-ahead log, so that later opens change nothing.
    line = _refused(tmp_path, **settings)
    assert f"the store sqlite:{place}/s.db is older than the job: it ends with event 1" in line
    assert "Nothing was stopped" in line


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"host": "0.0.0.0"}, "--token-file"),
        ({"host": "10.1.2.3"}, "--token-file"),
        ({"host": "example.org"}, "--token-file"),
        ({"token": ""}, "token must be"),
        ({"token": "a b\n"}, "token must be"),
        ({"token": "wörd"}, "token must be"),
        ({"port": 65536}, "port is 65536"),
        ({"port": -1}, "port is -1"),
        ({"tls_cert": Path("c.pem")}, "both a certificate and its key"),
        ({"tls_key": Path("k.pem")}, "both a certificate and its key"),
        ({"tls_cert": Path("missing.pem"), "tls_key": Path("missing.key")}, "missing.pem cannot be used"),
    ],
)
def test_bad_settings_are_refused(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(BadInputError, match=why):
        ServerSettings(config=CoordinatorConfig(spec=JobSpec(name="j")), **changes).check()


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_loopback_needs_no_token(host: str) -> None:
    settings = ServerSettings(config=CoordinatorConfig(spec=JobSpec(name="j")), host=host)
    settings.check()
    assert settings.loopback


def test_the_coordinator_serves_ipv6(tmp_path: Path) -> None:
    with CoordinatorProcess(tmp_path, host="::1") as coordinator, coordinator.client() as client:
        assert coordinator.entry.url.startswith("http://[::1]:")
        assert client.status()["job"] == "j"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_a_signal_ends_the_job_cleanly(tmp_path: Path, number: signal.Signals, code: int) -> None:
    with CoordinatorProcess(tmp_path, registry=tmp_path / "registry") as coordinator, coordinator.agent() as agent:
        assert [entry.pid for entry in live_jobs(tmp_path / "registry")] == [coordinator.process.pid]
        send_message(agent, hello("n0"))
        assert isinstance(receive_message(agent), Welcome)
        coordinator.process.send_signal(number)
        end = receive_message(agent)
        assert isinstance(end, EndNode)
        assert end.exit_code == code
        agent.close()
        assert coordinator.wait() == code
        assert list((tmp_path / "registry").iterdir()) == []
        assert "Traceback" not in coordinator.log


def _training(agent: ClientConnection) -> None:
    """Bring a node with a checkpointing worker into the job's first generation."""
    send_message(agent, hello("n0"))
    assert isinstance(receive_message(agent), Welcome)
    saving = msgspec.structs.replace(attach("n0"), saves=True)
    send_message(agent, saving)
    begin = receive_message(agent)
    assert isinstance(begin, BeginNode)
    send_message(agent, Entered(worker=saving.worker, generation=begin.plan.rest.generation, applied=0))


def test_a_first_signal_saves_the_job_and_a_second_ends_it(tmp_path: Path) -> None:
    with CoordinatorProcess(tmp_path) as coordinator, coordinator.agent() as agent:
        _training(agent)
        coordinator.process.send_signal(signal.SIGTERM)
        assert isinstance(receive_message(agent), Stop)
        coordinator.process.send_signal(signal.SIGTERM)
        assert isinstance(receive_message(agent), EndNode)
        agent.close()
        assert coordinator.wait() == 75


def test_a_launched_coordinator_ends_at_the_first_signal(tmp_path: Path) -> None:
    with CoordinatorProcess(tmp_path, launched=True) as coordinator, coordinator.agent() as agent:
        _training(agent)
        coordinator.process.send_signal(signal.SIGTERM)
        assert isinstance(receive_message(agent), EndNode)


def test_the_coordinator_ends_even_if_agents_stay_connected(tmp_path: Path) -> None:
    with CoordinatorProcess(tmp_path) as coordinator, coordinator.agent() as agent:
        send_message(agent, hello("n0"))
        receive_message(agent)
        with coordinator.client() as client:
            client.shutdown(7, "enough")
        assert coordinator.wait() == 7


def test_a_late_follower_still_receives_the_final_events(tmp_path: Path) -> None:
    """A job may be over before its launcher requests the first event."""
    with CoordinatorProcess(tmp_path, launched=True) as coordinator, coordinator.client() as client:
        client.shutdown(7, "enough")
        coordinator.until_log("its last events are read")
        assert [name_of(event) for event in client.events()] == ["job_started", "job_finished"]
        assert coordinator.wait() == 7


def test_a_new_coordinator_continues_from_a_killed_one(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"store": f"sqlite:{tmp_path}/s.db", "token": "t", "nodes": 9}
    with CoordinatorProcess(tmp_path, **settings) as first:
        with first.agent() as agent:
            send_message(agent, hello("n0"))
            send_message(agent, attach("n0"))
            receive_message(agent)
            first.until_event(NodesJoined)
            first.process.kill()
            first.wait()
            with pytest.raises(ConnectionClosed):
                receive_message(agent)
        port = int(first.entry.url.rsplit(":", 1)[1])
        with CoordinatorProcess(tmp_path, port=port, **settings) as second:
            assert second.entry.url == first.entry.url
            with second.agent() as agent, second.client() as client:
                send_message(agent, hello("n0", term=1))
                welcome = receive_message(agent)
                assert isinstance(welcome, Welcome)
                assert welcome.term == 2
                events = [(event.seq, name_of(event), event.term) for event in client.events()]
                metrics = httpx.get(f"{second.entry.url}/metrics", trust_env=False, timeout=PATIENCE_S).text
    assert events == [(1, "job_started", 1), (2, "nodes_joined", 1), (3, "coordinator_restarted", 2)]
    assert 'holdfast_nodes{job_name="j",state="waiting"} 1.0' in metrics, (
        "the second coordinator must continue from the first one's state"
    )
    lines = (tmp_path / "s.db.events.jsonl").read_bytes().splitlines()
    assert [json.loads(line)["seq"] for line in lines] == list(range(1, len(lines) + 1))


def test_a_new_coordinator_delivers_the_recorded_end_of_the_job(tmp_path: Path) -> None:
    """The outcome is recorded but an agent has not received it; when it reconnects, its workers are released."""
    settings: dict[str, Any] = {"store": f"sqlite:{tmp_path}/s.db", "token": "t"}
    worker = attach("n0").worker
    entered, finished = Entered(worker=worker, generation=1, applied=0), Finished(worker=worker, generation=1, step=0)
    with CoordinatorProcess(tmp_path, **settings) as first, first.agent() as agent:
        for message in (hello("n0"), attach("n0"), entered, finished):
            send_message(agent, message)
        first.until_event(JobFinished)
        first.process.kill()
        first.wait()
    port = int(first.entry.url.rsplit(":", 1)[1])
    with CoordinatorProcess(tmp_path, port=port, **settings) as second:
        second.until_log("the job ends")
        with second.agent() as agent:
            send_message(agent, hello("n0", term=1, kept=(attach("n0"), entered, finished)))
            assert isinstance(receive_message(agent), Welcome)
            reply = receive_message(agent)
            assert isinstance(reply, ToWorker)
            assert isinstance(reply.order, JobDone)
        assert second.wait() == 0


def test_a_follower_continues_after_a_coordinator_is_killed(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"store": f"sqlite:{tmp_path}/s.db", "token": "t"}
    with CoordinatorProcess(tmp_path, **settings) as first, first.client() as client:
        following = iter(client.events(follow=True, patience_s=PATIENCE_S))
        assert isinstance(next(following), JobStarted)
        first.process.kill()
        first.wait()
        with CoordinatorProcess(tmp_path, port=int(first.entry.url.rsplit(":", 1)[1]), **settings):
            assert isinstance(next(following), CoordinatorRestarted)


def test_a_follower_continues_after_a_coordinator_fails(tmp_path: Path) -> None:
    """The coordinator shuts down cleanly but the job is not over: the next coordinator continues the events."""
    settings: dict[str, Any] = {"store": f"sqlite:{tmp_path}/s.db", "token": "t", "nodes": 9}
    with (
        CoordinatorProcess(tmp_path, launched=True, **settings) as first,
        first.client() as client,
        ThreadPoolExecutor() as pool,
    ):
        following = iter(client.events(follow=True, patience_s=PATIENCE_S))
        assert isinstance(next(following), JobStarted)
        next_event = pool.submit(next, following, None)
        with (tmp_path / "s.db.events.jsonl").open("ab") as file:
            file.write(bytes(4))
        with first.agent() as agent:
            send_message(agent, hello("n0"))
            send_message(agent, attach("n0"))
            assert first.wait() == 1
        with CoordinatorProcess(tmp_path, port=int(first.entry.url.rsplit(":", 1)[1]), **settings):
            assert isinstance(
                next_event.result(PATIENCE_S), NodesJoined
            )  # The first coordinator had recorded this event.
            assert isinstance(next(following), CoordinatorRestarted)


@pytest.mark.parametrize("token", ["t", None], ids=["the same token", "a token of its own"])
def test_a_second_coordinator_is_refused_while_the_first_is_running(tmp_path: Path, token: str | None) -> None:
    """A takeover would lose the agents, which do not know the second address, and the job would fail without nodes."""
    settings: dict[str, Any] = {"store": f"sqlite:{tmp_path}/s.db", "token": token, "nodes": 9}
    settings["registry"] = tmp_path / "registry"
    with CoordinatorProcess(tmp_path, **settings) as first, first.agent() as agent:
        send_message(agent, hello("n0"))
        receive_message(agent)
        with pytest.raises(EarlyEndError) as refused, CoordinatorProcess(tmp_path, **settings):
            pass
        assert refused.value.code == 2
        assert f"another server of job 'j' answers at {first.entry.url}, with the same store" in refused.value.log
        with first.client() as client:
            assert client.status()["term"] == 1
        first.process.kill()
        first.wait()
        with CoordinatorProcess(tmp_path, **settings) as second, second.client() as client:
            assert client.status()["term"] == 2


def test_a_superseded_paused_coordinator_resumes_without_effects(tmp_path: Path) -> None:
    """Another coordinator has taken over: the old one changes neither store nor journal, sends nothing, and ends."""
    settings: dict[str, Any] = {"store": f"sqlite:{tmp_path}/s.db", "token": "t", "nodes": 9}
    with CoordinatorProcess(tmp_path, **settings) as old, old.agent() as agent:
        send_message(agent, hello("n0"))
        receive_message(agent)
        old.process.send_signal(signal.SIGSTOP)
        with CoordinatorProcess(tmp_path, **settings) as new:
            with new.client() as client:
                before = client.status()["events"]
                # When the old coordinator wakes up, this message makes it try to announce a node.
                send_message(agent, attach("n0"))
                old.process.send_signal(signal.SIGCONT)
                assert old.wait() == 1
                assert "another" in old.log
                assert client.status()["events"] == before
                with pytest.raises(ConnectionClosed):
                    receive_message(agent)
            with new.agent() as second:
                send_message(second, hello("n1"))
                assert isinstance(receive_message(second), Welcome)
    events = [line.split(b'"')[3] for line in (tmp_path / "s.db.events.jsonl").read_bytes().splitlines()]
    assert events[:2] == [b"job_started", b"coordinator_restarted"]
    assert b"nodes_joined" not in events


def test_closed_connections_leak_no_file_descriptors(tmp_path: Path) -> None:
    """Many connections open and close without leaking a descriptor."""
    with CoordinatorProcess(tmp_path) as coordinator:
        folder = f"/proc/{coordinator.process.pid}/fd"

        def visit(number: int) -> None:
            with coordinator.agent() as agent:
                send_message(agent, hello(f"n{number}"))
                receive_message(agent)

        for number in range(5):
            visit(number)
        with coordinator.client() as client:
            client.status()
        few = len(os.listdir(folder))
        for number in range(100):
            visit(number)
        with coordinator.client() as client:
            assert client.status()["nodes"] == []
        assert len(os.listdir(folder)) <= few + 3
