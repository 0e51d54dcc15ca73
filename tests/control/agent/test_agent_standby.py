"""The agent of a standby with a real worker process: it reports its role and its worker's warm-up."""

from __future__ import annotations

import asyncio

import pytest
from agent_harness import FakeCoordinator, play

from holdfast.control.agent.node_agent import Agent
from holdfast.protocol.messages.worker import Warmed


@pytest.mark.parametrize("standby", [True, False])
def test_an_agent_reports_its_role_and_warm_worker_on_each_connection(standby: bool) -> None:
    async def story(coordinator: FakeCoordinator, agent: Agent, running: asyncio.Task[int]) -> None:
        (worker,) = await coordinator.attach()
        warmed = Warmed(worker=worker, seconds=0.5)
        await coordinator.make_send(worker, warmed)
        coordinator.drop()
        await coordinator.until(lambda: len(coordinator.hellos) == 2, "the agent to come back")
        assert [hello.standby for hello in coordinator.hellos] == [standby, standby]
        assert warmed in coordinator.hellos[1].kept

    play(story, standby=standby)
