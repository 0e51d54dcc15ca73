"""The director of a replay starts and kills nodes, and never too early."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from typing import cast

from holdfast.control.launch.launcher import Launcher
from holdfast.control.launch.trace_run import TraceRun
from holdfast.control.processes import ProcessHandle
from holdfast.planning.availability import parse_trace, select_window
from made_events import joined, made

TRACE = "seconds,event,node\n0,add,a\n0,add,b\n100,remove,b\n100,remove,a\n200,add,a\n200,add,c\n400,remove,c\n"
SPEED = 1000.0
STEP = made("step_committed", 50.0)


class FakeLauncher:
    """Records each request with its time."""

    def __init__(self, director: TraceRun) -> None:
        self.director = director
        self.asked: list[tuple[float, str]] = []
        self.patient: list[bool] = []
        self.begun = asyncio.get_running_loop().time()

    def _note(self, what: str) -> None:
        self.asked.append(((asyncio.get_running_loop().time() - self.begun) * SPEED, what))
        self.patient.append(self.director.waits_without_nodes)

    async def start_node(self, name: str) -> None:
        self._note(f"+{name}")

    def kill_node(self, name: str, also: tuple[ProcessHandle, ...] = ()) -> None:
        for process in also:
            process.send_signal(9)
        self._note(f"-{name}")

    async def conclude(self, why: str) -> None:
        self._note(why)


def test_nodes_are_started_and_killed_in_trace_order_and_not_early() -> None:
    async def run() -> None:
        director = TraceRun(select_window(parse_trace(TRACE), end=500), SPEED)
        assert director.waits_without_nodes, "more nodes will come"
        launcher = FakeLauncher(director)
        directing = asyncio.create_task(director.run(cast(Launcher, launcher)))
        await asyncio.sleep(0)
        assert not launcher.asked, "the clock starts with the first step"
        director.on_event(STEP)
        director.on_event(made("step_committed", 51.0))
        assert director.ends == 50.5
        await directing
        assert [what for _, what in launcher.asked] == ["-b", "-a", "+a", "+c", "-c", "the trace is over"]
        assert all(at >= due for (at, _), due in zip(launcher.asked, (100, 100, 200, 200, 400, 500), strict=True))
        # After the last node of the trace, a job without nodes has failed.
        assert launcher.patient == [True, True, True, False, False, False]
        assert director.over

    asyncio.run(run())


def test_events_of_an_earlier_run_are_ignored() -> None:
    """A resumed journal repeats old events: their processes are gone, and their pids may belong to others."""

    async def run() -> None:
        director = TraceRun(select_window(parse_trace(TRACE)), SPEED, since=100.0)
        director.on_event(joined("b", 49.0, worker_pids=(os.getpid(),)))
        director.on_event(STEP)
        assert director.started is None
        director.on_event(made("step_committed", 101.0))
        await director.run(cast(Launcher, FakeLauncher(director)))
        assert director.started == 101.0

    asyncio.run(run())


def test_a_removed_node_has_its_newest_workers_killed() -> None:
    async def run() -> None:
        director = TraceRun(select_window(parse_trace("seconds,event,node\n0,add,a\n1,remove,a\n")), SPEED)
        code = "import time; time.sleep(100)"
        workers = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(2)]
        old, new = (worker.pid for worker in workers)
        director.on_event(joined("a", 40.0, worker_pids=(old,)))
        director.on_event(made("workers_changed", 41.0, node="a", worker_pids=(new,)))
        director.on_event(STEP)
        open_before = len(os.listdir("/proc/self/fd"))
        await director.run(cast(Launcher, FakeLauncher(director)))
        assert workers[1].wait(30) == -9
        assert workers[0].poll() is None, "a process that no longer belongs to the node must not be killed"
        workers[0].kill()
        workers[0].wait()
        assert len(os.listdir("/proc/self/fd")) < open_before, "no descriptor may leak"

    asyncio.run(run())
