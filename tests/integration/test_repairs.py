"""Requests for a person's action: the alert, the explanation while the job runs, and the repair."""

from __future__ import annotations

import json
import os
import queue
import signal
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from job_cases import FOREVER, StartJob, goes_on_until_interrupted

from holdfast.protocol.events import GenerationStarted, NodeLeft, NodeRepaired, Recovered, StepCommitted

#: The time limit of each wait.
DEADLINE_S = 60.0


class Webhook:
    """A server that records posted alerts."""

    def __init__(self) -> None:
        self.posted: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        posted = self.posted

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                posted.put(json.loads(self.rfile.read(int(self.headers["content-length"]))))
                self.send_response(204)
                self.end_headers()

            def log_message(self, *_: object) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
                pass

        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/hook"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def webhook() -> Iterator[Webhook]:
    made = Webhook()
    yield made
    made.close()


def test_a_quarantined_node_causes_an_alert_and_joins_again_after_undrain(
    start_job: StartJob, webhook: Webhook, tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    check = f"sh -c 'test ! -e {broken} || {{ echo fan 3 stands >&2; exit 5; }}'"
    options = ("--max-restarts", "1", "--alert", webhook.url, "--preflight", check)
    job = start_job(*FOREVER, "--step-seconds", "0.1", options=options)
    job.wait(StepCommitted, step=3)
    assert "is running" in job.call("explain")
    for world in (3, 2):
        since = len(job.events)
        os.kill(job.pids("node-1")[1][0], signal.SIGKILL)
        job.wait(Recovered, since=since)
        job.wait(GenerationStarted, lambda e, world=world: e.world_size == world, since=since)
    left = job.wait(NodeLeft, reason="quarantined")
    asked = webhook.posted.get(timeout=DEADLINE_S)
    assert (asked["who"], asked["command"], asked["about_seq"]) == ("site", "holdfast undrain node-1", left.seq)
    why = job.call("explain", str(left.seq))
    assert "its workers have failed 2 times in 300 s" in why
    assert "repaired: holdfast undrain node-1" in job.call("status")

    broken.touch()
    since = len(job.events)
    assert "node-1 may come back: it is being started" in job.call("undrain", "node-1")
    again = job.wait(NodeLeft, node="node-1", reason="quarantined", since=since)
    assert again.detail.endswith("sh ended with 5: fan 3 stands")
    assert webhook.posted.get(timeout=DEADLINE_S)["about_seq"] == again.seq

    broken.unlink()
    job.call("undrain", "node-1")
    assert job.wait(NodeRepaired, node="node-1", since=since).repair == "ticket"
    job.wait(GenerationStarted, world_size=3, since=since)
    assert "quarantined" not in job.call("status")
    goes_on_until_interrupted(job)
