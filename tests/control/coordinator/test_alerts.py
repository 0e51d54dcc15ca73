"""Alerts reach a program or a URL; a failed or hanging alert is logged and delays nothing."""

from __future__ import annotations

import asyncio
import contextlib
import http.server
import json
import logging
import os
import select
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from holdfast.control.coordinator.alerts import MOST_WAITING, Alerts, check_alert
from holdfast.environment import TOKEN
from holdfast.errors import BadInputError
from holdfast.protocol.events import ActionRequested

LOGGER = "holdfast.coordinator"


def request(number: int = 7) -> ActionRequested:
    return ActionRequested(
        time=1.0,
        job="j",
        term=1,
        generation=2,
        seq=number + 1,
        who="operator",
        command="holdfast scale +1",
        why="no node is left; $(reboot) `reboot`",
        about="job_waiting",
        about_seq=number,
    )


def handed_on(alert: str, *events: ActionRequested, longest_s: float = 20.0, patience_s: float = 20.0) -> None:
    """Send all events as alerts, then wait until they are delivered."""

    async def send_all() -> None:
        alerts = Alerts(alert, longest_s)
        for event in events:
            alerts.enqueue(event)
        await alerts.close(patience_s)

    asyncio.run(send_all())


def test_a_program_receives_each_event_as_a_json_line(tmp_path: Path) -> None:
    handed_on(f"tee -a '{tmp_path}/it is here'", request(1), request(2))
    lines = [json.loads(line) for line in (tmp_path / "it is here").read_text().splitlines()]
    assert [line["about_seq"] for line in lines] == [1, 2]
    assert lines[0]["event"] == "action_requested"
    assert lines[0]["why"] == request().why, "the words must not pass through a shell"


def test_the_environment_of_a_program_contains_no_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN, "x6q0")
    script = tmp_path / "print_environment"
    script.write_text(f"#!/bin/sh\nenv > {tmp_path}/out\n")
    script.chmod(0o755)
    handed_on(str(script), request())
    assert "PATH=" in (tmp_path / "out").read_text()
    assert "x6q0" not in (tmp_path / "out").read_text()


@pytest.mark.parametrize(
    ("alert", "expected"),
    [
        ("sh -c 'echo no mailer is here >&2; exit 3'", "sh ended with 3: no mailer is here"),
        ("sh -c 'kill -9 $$'", "sh ended with -9: it printed no error"),
        ("/no/such/program", "No such file or directory"),
        ("http://127.0.0.1:9/hook?key=secret", "127.0.0.1: ConnectError"),
    ],
)
def test_a_failed_alert_is_logged(alert: str, expected: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, LOGGER):
        handed_on(alert, request(), request(8))
    first, second = (record.getMessage() for record in caplog.records)
    assert first.startswith("the alert about event 7 failed: ")
    assert second.startswith("the alert about event 8 failed: "), "the next alert must still be attempted"
    assert expected in first
    assert "secret" not in first


def test_a_hanging_alert_program_is_killed_with_its_children(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    script = tmp_path / "hangs"
    script.write_text(f"#!/bin/sh\nsleep 600 &\necho $! $$ > {tmp_path}/pids\nwait\n")
    script.chmod(0o755)
    with caplog.at_level(logging.WARNING, LOGGER):
        handed_on(str(script), request(), longest_s=3.0)
    assert [record.getMessage() for record in caplog.records] == ["the alert about event 7 took longer than 3 s"]
    for pid in (tmp_path / "pids").read_text().split():
        with contextlib.suppress(ProcessLookupError):
            descriptor = os.pidfd_open(int(pid))
            assert select.select([descriptor], [], [], 20.0)[0], f"process {pid} still runs"
            os.close(descriptor)


def test_unlimited_stderr_of_an_alert_program_is_truncated(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, LOGGER):
        handed_on("sh -c 'head -c 3000000 /dev/zero | tr \"\\0\" x >&2; exit 1'", request())
    (record,) = caplog.records
    assert len(record.getMessage()) < 700


def test_enqueuing_never_blocks_and_drops_the_oldest_alerts(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, LOGGER):
        handed_on("sleep 600", *(request(number) for number in range(MOST_WAITING + 2)), patience_s=0.1)
    logged = [record.getMessage() for record in caplog.records]
    assert logged == [
        "an alert about event 0 is dropped, because too many wait",
        "an alert about event 1 is dropped, because too many wait",
        "alerts that were not sent by the end of the job are dropped",
    ]


def test_events_are_ignored_without_an_alert() -> None:
    handed_on("", request())


class _Hook(http.server.BaseHTTPRequestHandler):
    answer: ClassVar[int] = 204
    received: ClassVar[list[dict[str, Any]]] = []

    def do_POST(self) -> None:
        self.received.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        self.send_response(self.answer)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def hook() -> Iterator[str]:
    _Hook.received.clear()
    with http.server.HTTPServer(("127.0.0.1", 0), _Hook) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/hook"
        server.shutdown()
        thread.join()


def test_a_webhook_receives_each_event(hook: str, caplog: pytest.LogCaptureFixture) -> None:
    handed_on(hook, request(1), request(2))
    assert [received["about_seq"] for received in _Hook.received] == [1, 2]
    _Hook.answer = 500
    with caplog.at_level(logging.WARNING, LOGGER):
        handed_on(hook, request(3))
    assert [record.getMessage() for record in caplog.records] == [
        "the alert about event 3 failed: 127.0.0.1 answers 500"
    ]
    _Hook.answer = 204


@pytest.mark.parametrize(
    ("alert", "complaint"),
    [
        ("no-such-mailer --now", "there is no program 'no-such-mailer'"),
        ("mail 'unfinished", "No closing quotation"),
        ("   ", "there is no program ''"),
        ("https://", "it is not a URL"),
        ("http://host:port/", "it is not a URL"),
    ],
)
def test_an_unusable_alert_is_refused(alert: str, complaint: str) -> None:
    with pytest.raises(BadInputError, match="--alert is ") as caught:
        check_alert("--alert", alert)
    assert complaint in str(caught.value)


@pytest.mark.parametrize("alert", ["", "cat", "HTTPS://hooks.example.com/T0/B0?x=1", "http://[::1]:80/"])
def test_a_usable_alert_is_accepted(alert: str) -> None:
    check_alert("--alert", alert)
