"""Errors of commands when another kind of server answers at the coordinator's address."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from holdfast.control.client import CoordinatorClient
from holdfast.control.registry import JobEntry
from holdfast.errors import BadInputError, UnreachableError


@pytest.fixture(params=[b"<html>", b"[]", b"{}", b'{"job": 3}', b"\xff", b"[" * 50_000], ids=range(6))
def stranger(request: pytest.FixtureRequest) -> Iterator[str]:
    """The URL of a server that answers every request but is not a coordinator."""

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.send_response(200)
            self.send_header("Content-Length", str(len(request.param)))
            self.end_headers()
            self.wfile.write(request.param)

        do_POST = do_GET

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def client_of(url: str) -> CoordinatorClient:
    return CoordinatorClient(JobEntry(url=url, token="t", job="", pid=0))


@pytest.mark.parametrize(
    "ask",
    [
        lambda client: client.status(),
        lambda client: list(client.events()),
        lambda client: client.add_nodes(),
        lambda client: client.node_requests(0, wait_s=0.0),
    ],
    ids=["status", "events", "add_nodes", "node_requests"],
)
def test_a_server_that_is_not_a_coordinator_is_reported_as_unreachable(
    ask: Callable[[CoordinatorClient], object], stranger: str
) -> None:
    with client_of(stranger) as client, pytest.raises(UnreachableError, match="is not a coordinator of holdfast"):
        ask(client)


@pytest.mark.parametrize("url", ["http://127.0.0.1:99999", "http://127.0.0.1:1/x", "ftp://127.0.0.1:1", "127.0.0.1:1"])
def test_an_invalid_coordinator_url_is_refused(url: str) -> None:
    with pytest.raises(BadInputError, match="it must be http://HOST:PORT"):
        client_of(url)


@pytest.mark.parametrize("host", ["a..b", "x" * 70, "-"])
def test_an_impossible_host_name_is_refused_or_unreachable(host: str) -> None:
    try:
        client = client_of(f"http://{host}:1")
    except BadInputError:
        return
    with client, pytest.raises(UnreachableError, match="no coordinator answers at"):
        client.status()
