"""Replica groups of real processes under a real agent: they form, end, and restart together."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from agent_harness import DEADLINE, FakeCoordinator, alive, play

from holdfast.control.agent.node_agent import Agent
from holdfast.errors import EXIT_BAD_INPUT
from holdfast.protocol.failures import FailureKind
from holdfast.protocol.messages.agent import WorkerDown
from holdfast.protocol.messages.worker import Raised
from holdfast.protocol.names import index_of


@dataclass(frozen=True)
class RankReport:
    """The report of one local rank about itself."""

    worker: str
    pid: int
    unit: str
    place: int
    sums: dict[str, float]
    agreed: bool


class Scene:
    """A node with scripts that form replica groups, and their reports so far."""

    def __init__(self, coordinator: FakeCoordinator, agent: Agent, folder: Path) -> None:
        self.coordinator, self.agent, self.folder = coordinator, agent, folder

    def reports(self) -> dict[int, RankReport]:
        """By worker index: the reports of the current processes."""
        found = [RankReport(**json.loads(path.read_text())) for path in self.folder.glob("*.json")]
        return {index_of(one.worker): one for one in found if one.worker in self.agent.machine.workers}

    async def formed(self, workers: int) -> dict[int, RankReport]:
        await self.until(lambda: len(self.reports()) == workers, "all workers to form replica groups")
        return self.reports()

    async def waits(self, *pids: int) -> None:
        await self.until(lambda: all((self.folder / f"{pid}.waits").exists() for pid in pids), "others in a collective")

    async def until(self, true: Callable[[], bool], what: str) -> None:
        try:
            async with asyncio.timeout(DEADLINE):
                while not true():
                    await asyncio.sleep(0.005)
        except TimeoutError:
            raise AssertionError(f"waited too long for {what}: {self.reports()}, {self.downs}") from None

    @property
    def downs(self) -> list[WorkerDown]:
        return self.coordinator.of(WorkerDown)

    async def hear_of(self, count: int) -> list[WorkerDown]:
        await self.coordinator.until(lambda: len(self.downs) >= count, f"{count} ends")
        return self.downs


Plot = Callable[[Scene], Awaitable[None]]


@pytest.fixture
def stage(warm_torch: str, tmp_path: Path) -> Callable[..., None]:
    """Run a scene on a node with this many workers, forked by the zygote that the tests share."""

    def run(plot: Plot, what: str, shard: int = 2, tensor: int = 1, workers: int = 2) -> None:
        async def story(coordinator: FakeCoordinator, agent: Agent, running: asyncio.Task[int]) -> None:
            await plot(Scene(coordinator, agent, tmp_path))

        arguments = (str(tmp_path), what, str(shard), str(tensor))
        play(story, "unit.py", *arguments, workers=workers, zygote=warm_torch)
        pids = [json.loads(path.read_text())["pid"] for path in tmp_path.glob("*.json")]
        assert not [pid for pid in pids if alive(pid)]

    return run


def test_ranks_form_all_process_groups_of_their_replica_group(stage: Callable[..., None]) -> None:
    """Four processes form one replica group of shard 2 x tensor 2, in which all groups differ."""

    async def plot(scene: Scene) -> None:
        reports = await scene.formed(4)
        assert {one.unit for one in reports.values()} == {reports[0].unit}
        assert [reports[index].place for index in range(4)] == [0, 1, 2, 3]
        assert all(one.agreed for one in reports.values())
        assert [reports[index].sums for index in range(4)] == [
            {"shard": 5.0, "tensor": 3.0},
            {"shard": 10.0, "tensor": 3.0},
            {"shard": 5.0, "tensor": 12.0},
            {"shard": 10.0, "tensor": 12.0},
        ]

    stage(plot, "wait", 2, 2, workers=4)


def test_a_killed_rank_restarts_only_its_own_replica_group(stage: Callable[..., None]) -> None:
    async def plot(scene: Scene) -> None:
        before = await scene.formed(4)
        assert before[0].unit == before[1].unit != before[2].unit == before[3].unit
        os.kill(before[1].pid, signal.SIGKILL)
        cause, mate = await scene.hear_of(2)
        assert (cause.worker, cause.detail) == (before[1].worker, "SIGKILL")
        assert (mate.worker, before[1].worker in mate.detail) == (before[0].worker, True)
        after = await scene.formed(4)
        assert after[2] == before[2]
        assert after[3] == before[3]
        assert after[0].unit == after[1].unit != before[0].unit
        await scene.until(lambda: not alive(before[0].pid), "the other place to end")
        assert len(scene.downs) == 2

    stage(plot, "wait", workers=4)


@pytest.mark.parametrize("what", ["meet", "keep"])
def test_errors_of_ranks_that_wait_for_a_killed_rank_are_not_script_errors(
    what: str, stage: Callable[..., None]
) -> None:
    """The others wait for the ended process in a collective. Its error is not an exception of the script."""

    async def plot(scene: Scene) -> None:
        before = await scene.formed(2)
        await scene.waits(before[1].pid)
        os.kill(before[0].pid, signal.SIGKILL)
        cause, mate = await scene.hear_of(2)
        assert (cause.worker, cause.kind) == (before[0].worker, FailureKind.PROCESS_EXIT)
        assert (mate.worker, mate.kind, mate.error) == (before[1].worker, FailureKind.PROCESS_EXIT, None)
        await scene.formed(2)
        assert not [message for message in scene.coordinator.worker_messages if isinstance(message, Raised)]
        assert len(scene.downs) == 2

    stage(plot, what)


@pytest.mark.parametrize("what", ["raise", "linger"])
def test_ranks_that_wait_for_a_failed_rank_end_too(what: str, stage: Callable[..., None]) -> None:
    async def plot(scene: Scene) -> None:
        before = await scene.formed(2)
        await scene.waits(before[1].pid)
        (scene.folder / "go").touch()
        cause, mate = await scene.hear_of(2)
        assert (cause.worker, cause.kind) == (before[0].worker, FailureKind.EXCEPTION)
        assert "place 0 has raised" in cause.detail
        assert (mate.worker, mate.kind) == (before[1].worker, FailureKind.PROCESS_EXIT)
        after = await scene.formed(2)
        assert after[0].unit != before[0].unit

    stage(plot, what)


def test_a_rank_stopped_for_too_long_restarts_its_replica_group(stage: Callable[..., None]) -> None:
    async def plot(scene: Scene) -> None:
        before = await scene.formed(2)
        os.kill(before[0].pid, signal.SIGSTOP)
        cause, _ = await scene.hear_of(2)
        assert (cause.worker, cause.kind) == (before[0].worker, FailureKind.HANG)
        await scene.formed(2)

    stage(plot, "wait")


def test_a_rank_that_never_calls_init_is_reported_and_replaced(stage: Callable[..., None]) -> None:
    async def plot(scene: Scene) -> None:
        scene.agent.machine.units.join_timeout_s = 0.5
        (down,) = await scene.hear_of(1)
        assert (index_of(down.worker), down.kind) == (1, FailureKind.HANG)
        assert "rank 1 of a replica group (worker 1 of the node) did not come to holdfast.init()" in down.detail
        reports = await scene.formed(2)
        assert len(scene.downs) == 1  # The workers that had come waited for the missing one.
        assert reports[0].unit == reports[1].unit

    stage(plot, "absent")


@pytest.mark.parametrize(
    ("what", "shard", "workers", "words"),
    [
        ("wait", 2, 3, "shard 2 takes 2 workers per node, or a multiple of that, and this job has 3"),
        ("differ", 2, 2, "all must call holdfast.init() with the same layout"),
    ],
)
def test_impossible_layouts_are_bad_input(
    what: str, shard: int, workers: int, words: str, stage: Callable[..., None], capfd: pytest.CaptureFixture[str]
) -> None:
    async def plot(scene: Scene) -> None:
        downs = await scene.hear_of(workers)
        assert {down.exit_code for down in downs} == {EXIT_BAD_INPUT}
        assert all(words in down.detail for down in downs)
        assert scene.reports() == {}

    stage(plot, what, shard, 1, workers)
    printed = capfd.readouterr()
    assert words not in printed.out + printed.err  # The agent that ends the job prints the reason, once.
