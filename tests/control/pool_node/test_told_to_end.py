"""A pool node that must end: how long it stays for its job."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from holdfast.control.pool_node import grant_processes
from holdfast.control.pool_node.grant_processes import GrantProcesses
from holdfast.control.pool_node.pool_agent import PoolAgent
from holdfast.control.pool_node.settings import PoolNodeSettings
from holdfast.control.pool_node.watched_scripts import WatchedScripts
from holdfast.coordination.pool.fence import StartGrant
from holdfast.errors import EXIT_ENDED
from holdfast.protocol.job_spec import JobSpec, RecoverySpec
from holdfast.protocol.pool.launch import PooledLaunch


class Child:
    """The job's agent, which records its orders."""

    pid = 1

    def __init__(self) -> None:
        self.signals: list[int] = []

    def send_signal(self, number: int) -> None:
        self.signals.append(number)

    async def wait(self) -> int:
        return await asyncio.get_running_loop().create_future()


@pytest.mark.parametrize(("of_node", "of_job", "stays"), [(0.0, 0.0, False), (30.0, 0.0, True), (0.0, 30.0, True)])
def test_an_interrupted_node_stays_for_the_grace_of_the_node_or_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, of_node: float, of_job: float, stays: bool
) -> None:
    child, started = Child(), list[Any]()

    def spawn(order: Any, _environment: dict[str, str]) -> Child:
        started.append(order.settings)
        return child

    monkeypatch.setattr(grant_processes, "spawn", spawn)
    script = tmp_path / "train.py"
    script.write_text("")
    spec = JobSpec(name="job", script=str(script), recovery=RecoverySpec(grace=of_job))

    async def story() -> None:
        settings = PoolNodeSettings(
            pool="http://127.0.0.1:1", token="t", node="n0", folder=str(tmp_path), grace_s=of_node
        )
        node = PoolAgent(settings, lambda _: None)
        grant = GrantProcesses(settings, StartGrant(1, "job", 1), node._http, node._zygote, WatchedScripts())

        async def launch() -> PooledLaunch:
            return PooledLaunch(submission=1, spec=spec, address="/jobs/job/job", token="t")

        monkeypatch.setattr(grant, "_get_launch", launch)
        node._grant = grant
        living = asyncio.create_task(grant.run())
        while not started:
            await asyncio.sleep(0)
        node.on_end_signal(EXIT_ENDED)
        living.cancel()
        for task in node._tasks:
            task.cancel()
        await asyncio.gather(living, *node._tasks, return_exceptions=True)
        await node._http.aclose()

    asyncio.run(story())
    assert [one.spec.recovery.grace for one in started] == [max(of_node, of_job)]
    assert (child.signals[:1] == [15]) is stays
