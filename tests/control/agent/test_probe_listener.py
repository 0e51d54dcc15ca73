"""Reachability between nodes: a listener for probes, and the probe itself."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

import pytest
from agent_harness import FakeCoordinator, play

from holdfast.control.agent import node_agent
from holdfast.control.agent.node_agent import Agent
from holdfast.control.agent.node_probes import connection_error, serve_probes
from holdfast.protocol.messages.agent import AddressProbed, ProbeAddress


def test_every_connection_to_the_probe_listener_succeeds() -> None:
    async def try_often() -> list[str]:
        listener = await serve_probes("127.0.0.1")
        assert listener is not None
        async with listener:
            port = listener.sockets[0].getsockname()[1]
            return [await connection_error("127.0.0.1", port) for _ in range(40)]

    assert set(asyncio.run(try_often())) == {""}


def test_a_refused_connection_is_reported_with_the_address() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    error = asyncio.run(connection_error("127.0.0.1", port))
    assert error.startswith(f"127.0.0.1:{port}: ")
    assert "refused" in error.lower()


def test_a_hanging_connection_times_out() -> None:
    """A full accept queue answers no further connection."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        fill = [socket.socket() for _ in range(4)]
        for one in fill:
            one.setblocking(False)
            one.connect_ex(server.getsockname())
        error = asyncio.run(connection_error(*server.getsockname(), timeout_s=0.3))
        for one in fill:
            one.close()
    assert "no connection within 0.3 s" in error


def test_an_address_of_another_host_has_no_listener() -> None:
    assert asyncio.run(serve_probes("192.0.2.1")) is None


def test_an_unknown_host_name_is_reported() -> None:
    error = asyncio.run(connection_error("1.2.3.4.5", 9))
    assert error.startswith("1.2.3.4.5:9: ")
    assert "Unknown error" not in error


def test_probe_results_for_an_earlier_coordinator_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both number their probes from 1, so a stale failure would count against a newly joined node."""
    asked: list[str] = []
    answers = asyncio.Event()

    async def hang(host: str, _port: int) -> str:
        asked.append(host)
        if host == "late.example":
            await answers.wait()
        return f"{host} was tried"

    monkeypatch.setattr(node_agent, "connection_error", hang)

    async def story(coordinator: FakeCoordinator, _agent: Agent, _running: asyncio.Task[int]) -> None:
        await coordinator.attach()
        await coordinator.send(ProbeAddress(number=1, host="late.example", port=9))
        await eventually(lambda: asked == ["late.example"])
        coordinator.drop()
        await coordinator.until(lambda: len(coordinator.hellos) == 2, "the agent, again")
        answers.set()
        await coordinator.send(ProbeAddress(number=1, host="node-2.example", port=9))
        await coordinator.until(lambda: coordinator.of(AddressProbed), "an answer")
        assert {answer.error for answer in coordinator.of(AddressProbed)} == {"node-2.example was tried"}

    play(story)


async def eventually(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)
