"""An interrupted agent with a real worker process: it stays until the other nodes can continue without it."""

from __future__ import annotations

import asyncio

from agent_harness import DEADLINE, FakeCoordinator, play

from holdfast.control.agent.node_agent import Agent
from holdfast.errors import EXIT_ENDED
from holdfast.protocol.job_spec import JobSpec, RecoverySpec
from holdfast.protocol.messages.agent import EndNode, EndNotice, Leave
from places import CONTROL_SCRIPTS

Running = asyncio.Task[int]


def with_grace(seconds: float) -> JobSpec:
    script = str(CONTROL_SCRIPTS / "obedient.py")
    return JobSpec(name="job", script=script, workers_per_node=1, recovery=RecoverySpec(grace=seconds))


def send_end_notice(agent: Agent) -> None:
    agent.on_end_notice(EXIT_ENDED, "ended by SIGTERM")


def test_an_interrupted_agent_notifies_each_coordinator_and_ends_on_release() -> None:
    async def story(coordinator: FakeCoordinator, agent: Agent, running: Running) -> None:
        await coordinator.attach()
        send_end_notice(agent)
        await coordinator.until(lambda: coordinator.of(EndNotice), "the notice")
        assert coordinator.of(EndNotice)[0].grace_s > 500
        coordinator.drop()
        await coordinator.until(lambda: len(coordinator.of(EndNotice)) == 2, "the notice, to the next coordinator")
        assert not running.done()
        await coordinator.send(EndNode(exit_code=0, why="node node-0 has left", alone=True))
        assert await asyncio.wait_for(running, DEADLINE) == EXIT_ENDED
        assert coordinator.of(Leave) == []

    play(story, spec=with_grace(600.0))


def test_a_second_end_notice_ends_the_agent_immediately() -> None:
    async def story(coordinator: FakeCoordinator, agent: Agent, running: Running) -> None:
        await coordinator.attach()
        send_end_notice(agent)
        send_end_notice(agent)
        assert await asyncio.wait_for(running, DEADLINE) == EXIT_ENDED

    play(story, spec=with_grace(600.0))


def test_an_agent_leaves_with_a_reason_when_its_grace_expires() -> None:
    async def story(coordinator: FakeCoordinator, agent: Agent, running: Running) -> None:
        await coordinator.attach()
        send_end_notice(agent)
        assert await asyncio.wait_for(running, DEADLINE) == EXIT_ENDED
        await coordinator.until(lambda: coordinator.of(Leave), "the farewell")
        assert [leave.reason for leave in coordinator.of(Leave)] == ["told"]

    play(story, spec=with_grace(0.3))


def test_an_agent_without_a_grace_period_ends_immediately() -> None:
    async def story(coordinator: FakeCoordinator, agent: Agent, running: Running) -> None:
        await coordinator.attach()
        send_end_notice(agent)
        assert await asyncio.wait_for(running, DEADLINE) == EXIT_ENDED
        assert coordinator.of(EndNotice) == []

    play(story, spec=with_grace(0.0))
