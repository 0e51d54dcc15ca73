"""The shutdown of the web server."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from holdfast.control.serving.listening import open_listener
from holdfast.control.serving.web import WebServer
from holdfast.counted_log import CountedLog

LOG = logging.getLogger("holdfast.test_web_server")


def test_a_waiting_request_is_cancelled_at_shutdown_without_an_error(caplog: pytest.LogCaptureFixture) -> None:
    async def story() -> None:
        waits = asyncio.Event()

        async def wait(_: Request) -> Response:
            waits.set()
            await asyncio.sleep(600)
            return Response()

        with contextlib.closing(open_listener("127.0.0.1", 0)) as listener:
            web = WebServer(listener, CountedLog(LOG, time.monotonic))
            serving = asyncio.create_task(web.serve(Starlette(routes=[Route("/", wait)]), lambda _: True))
            _, writer = await asyncio.open_connection(*listener.getsockname()[:2])
            writer.write(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
            await asyncio.wait_for(waits.wait(), 30)
            web.stop()
            await asyncio.wait_for(serving, 30)
            writer.close()

    asyncio.run(story())
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_an_error_of_the_application_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def story() -> None:
        async def fail(_: Request) -> Response:
            raise ValueError("odd")

        with contextlib.closing(open_listener("127.0.0.1", 0)) as listener:
            web = WebServer(listener, CountedLog(LOG, time.monotonic))
            serving = asyncio.create_task(web.serve(Starlette(routes=[Route("/", fail)]), lambda _: True))
            reader, writer = await asyncio.open_connection(*listener.getsockname()[:2])
            writer.write(b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
            await asyncio.wait_for(reader.read(), 30)
            web.stop()
            await asyncio.wait_for(serving, 30)
            writer.close()

    asyncio.run(story())
    assert [str(record.exc_info[1]) for record in caplog.records if record.exc_info] == ["odd"]
