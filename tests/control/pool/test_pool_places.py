"""Paths that a job makes the pool's server read and write: existing files of others stay untouched."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest
from pool_bench import PATIENCE_S, PoolProcess, a_job, hello, receive_message, send_message

from holdfast.errors import EXIT_ENDED
from holdfast.protocol.checkpoints.names import CheckpointName
from holdfast.protocol.messages.pool import NodeAlive


def ends(pool: PoolProcess, name: str, **keys: object) -> str:
    """Submit a job that a node is free for, and return the reason of its failure."""
    with pool.node() as node:
        send_message(node, hello("n0"))
        receive_message(node)
        assert pool.ask("POST", "/jobs", a_job(name, **keys)).status_code == 200
        deadline = time.monotonic() + PATIENCE_S
        while (job := pool.ask("GET", f"/jobs/{name}").json())["state"] != "failed":
            assert time.monotonic() < deadline, (job, pool.log)
            send_message(node, NodeAlive())
            time.sleep(0.05)
        return job["why"]


@pytest.mark.parametrize(
    "kind", ["a text", "the pool's journal", "the store", "a job's journal", "a pipe", "a folder", "nowhere"]
)
def test_a_job_fails_if_its_events_path_is_in_use_or_unusable(tmp_path: Path, kind: str) -> None:
    with PoolProcess(tmp_path) as pool:
        place = {
            "the pool's journal": pool.journals / "pool.events.jsonl",
            "the store": tmp_path / "pool.db",
            "a folder": pool.journals,
            "nowhere": tmp_path / "none" / "x.jsonl",
        }.get(kind, tmp_path / "place")
        if kind == "a text":
            place.write_text("important\nand not to be cut")
        elif kind == "a pipe":
            os.mkfifo(place)
        elif kind == "a job's journal":
            event = {"event": "coordinator_restarted", "time": 1.0, "job": "other", "term": 1, "generation": 1}
            place.write_text(json.dumps({**event, "seq": 1, "url": "x", "coordinator_pid": 1}) + "\n")
        before = place.read_bytes() if place.is_file() else b""
        why = ends(pool, "greedy", output={"events": str(place)})
        assert why.startswith(f"the events file {place} "), why
        assert any(word in why for word in ("give another", "remove it")), why
        if kind in ("a text", "a job's journal"):
            assert place.read_bytes() == before
        pool.check_serves()
    if kind == "the pool's journal":
        assert place.read_bytes().startswith(before), "the file may only grow, by the job's own events"
    if kind in ("the pool's journal", "the store"):
        with PoolProcess(tmp_path) as again:
            assert again.ask("GET", "/jobs/greedy").json()["state"] == "failed"
            again.check_serves()


@pytest.mark.parametrize("kind", ["a text", "missing", "a pipe"])
def test_an_invalid_failure_classes_file_fails_the_job_without_leaking_it(tmp_path: Path, kind: str) -> None:
    place = tmp_path / "place"
    if kind == "a text":
        place.write_text("root:secret:0:0\n")
    elif kind == "a pipe":
        os.mkfifo(place)
    with PoolProcess(tmp_path) as pool:
        why = ends(pool, "curious", recovery={"failure_classes": str(place)})
        assert str(place) in why
        assert "secret" not in why
        pool.check_serves()


def test_a_job_that_cannot_start_does_not_delay_other_requests(tmp_path: Path) -> None:
    """A job that cannot open its checkpoint folder must not delay a healthy job next to it."""
    (tmp_path / "file").write_text("")
    with PoolProcess(tmp_path) as pool:
        for number, place in enumerate((tmp_path / "file", tmp_path / "file" / "below", "nothing://x/y")):
            assert pool.ask("POST", "/jobs", a_job(f"j{number}", checkpoint={"dir": str(place)})).status_code == 200
        with pool.node() as node:
            send_message(node, hello("n0"))
            receive_message(node)
            pool.check_serves()
            assert pool.ask("POST", "/jobs", a_job("well", preemptible=False)).status_code == 200


def test_a_slow_checkpoint_check_delays_no_other_job_and_no_shutdown(tmp_path: Path) -> None:
    folder = tmp_path / "saved" / CheckpointName(step=1, term=1, generation=1).folder
    folder.mkdir(parents=True)
    size = 1 << 42  # A sparse file.
    with (folder / "state").open("wb") as file:
        file.truncate(size)
    listed = {"state": {"bytes": size, "sha256": "0" * 64}}
    (folder / "manifest.json").write_text(json.dumps({"format": 2, "step": 1, "files": listed}))
    with PoolProcess(tmp_path) as pool, pool.node() as first, pool.node() as second:
        for name, node in (("n0", first), ("n1", second)):
            send_message(node, hello(name))
            receive_message(node)
        saved = {"dir": str(tmp_path / "saved")}
        assert pool.ask("POST", "/jobs", a_job("large", checkpoint=saved)).status_code == 200
        assert pool.ask("POST", "/jobs", a_job("well")).status_code == 200
        deadline = time.monotonic() + PATIENCE_S
        while pool.ask("GET", "/jobs/well/job/status").status_code != 200:
            assert time.monotonic() < deadline, pool.log
            for node in (first, second):
                send_message(node, NodeAlive())
            time.sleep(0.05)
        assert pool.ask("GET", "/jobs/large/job/status").status_code == 404
        # The job has not started, so stopping it does not wait either, and its name can be used again.
        for body in ({"why": "enough"}, {"why": "enough", "now": True}):
            assert pool.ask("POST", "/jobs/large/stop", body).status_code == 200
            while (job := pool.ask("GET", "/jobs/large").json())["state"] != "stopped":
                assert time.monotonic() < deadline, pool.log
                time.sleep(0.02)
            assert job["why"] == "enough"
            assert pool.ask("POST", "/jobs", a_job("large", checkpoint=saved)).status_code == 200
        pool.process.send_signal(signal.SIGTERM)
        assert pool.process.wait(PATIENCE_S) == EXIT_ENDED


def test_a_running_job_survives_a_server_that_cannot_read_its_files(tmp_path: Path) -> None:
    place = tmp_path / "classes.toml"
    place.write_text("")

    def until_answered(pool: PoolProcess, code: int) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while pool.ask("GET", "/jobs/one/job/status").status_code != code:
            assert time.monotonic() < deadline, pool.log
            time.sleep(0.05)

    def until_said(pool: PoolProcess) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while "job one trains on without a coordinator until one can start" not in pool.log:
            assert time.monotonic() < deadline, pool.log
            time.sleep(0.05)

    keys = {"token": "t", "name": "pool"}
    with PoolProcess(tmp_path, **keys) as pool, pool.node() as node:
        send_message(node, hello("n0"))
        receive_message(node)
        job = a_job("one", recovery={"failure_classes": str(place)})
        assert pool.ask("POST", "/jobs", job).status_code == 200
        until_answered(pool, 200)
    place.write_text("no TOML")
    with PoolProcess(tmp_path, **keys) as pool:
        until_said(pool)
        assert pool.ask("GET", "/jobs/one").json()["state"] == "admitted"
        place.write_text("")
        until_answered(pool, 200)
    place.write_text("no TOML")
    with PoolProcess(tmp_path, **keys) as pool:
        until_said(pool)
        assert pool.ask("POST", "/jobs/one/stop").status_code == 200
        deadline = time.monotonic() + PATIENCE_S
        while pool.ask("GET", "/jobs/one").json()["state"] != "failed":
            assert time.monotonic() < deadline, "the job must still be stoppable"
            time.sleep(0.05)
