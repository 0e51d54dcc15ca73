"""Runs a job through an availability trace: nodes are started, and killed without warning.

The clock of the trace starts with the first committed step. Until then the job has all of its first nodes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from holdfast.control.launch.launcher import Launcher
from holdfast.control.processes import ProcessHandle
from holdfast.planning.availability import NodeEvent, Window
from holdfast.protocol.events import NodesJoined, ReadEvent, StepCommitted, WorkersChanged


class TraceRun:
    """Directs a launcher through the window of a trace.

    Args:
        speed: seconds of the trace that pass in one second.
        since: unix seconds. Earlier events are from a previous run that this one continues; its processes are gone.
    """

    def __init__(self, window: Window, speed: float, since: float = 0.0) -> None:
        self.window = window
        self.speed = speed
        self.since = since
        #: unix seconds of the first committed step, or None before it
        self.started: float | None = None
        #: True once the window is over
        self.over = False
        self._present = set(window.start_nodes)
        self._adds_left = sum(event.add for batch in window.batches for event in batch.events)
        self._workers: dict[str, list[ProcessHandle]] = {}
        self._training = asyncio.Event()

    @property
    def names(self) -> frozenset[str]:
        """All nodes of the window."""
        return self.window.names

    @property
    def waits_without_nodes(self) -> bool:
        """Whether more nodes will come, or none should be there; then a job without nodes has not failed."""
        return self._adds_left > 0 or not self._present

    @property
    def ends(self) -> float | None:
        """Unix seconds at which the window is over, or None before it begins."""
        return None if self.started is None else self.started + self.window.seconds / self.speed

    def on_event(self, event: ReadEvent) -> None:
        """Start the trace's clock at the first committed step, and keep handles of each node's workers.

        Events before `since` are ignored.
        """
        if event.time < self.since:
            return
        if isinstance(event, StepCommitted) and self.started is None:
            self.started = event.time
            self._training.set()
        elif isinstance(event, NodesJoined):
            for joined in event.nodes:
                self._note(joined.node, joined.worker_pids)
        elif isinstance(event, WorkersChanged):
            self._note(event.node, event.worker_pids)

    async def run(self, launcher: Launcher) -> None:
        """Start and kill nodes at the times of the trace, from the first committed step on.

        End the job with the window.
        """
        try:
            await self._training.wait()
            begun = asyncio.get_running_loop().time()
            for batch in self.window.batches:
                await _sleep_until(begun + batch.seconds / self.speed)
                for event in batch.events:
                    await self._execute(event, launcher)
            await _sleep_until(begun + self.window.seconds / self.speed)
            self.over = True
            await launcher.conclude("the trace is over")
        finally:
            for name in list(self._workers):
                self._forget(name)

    async def _execute(self, event: NodeEvent, launcher: Launcher) -> None:
        """Start the node of an event, or kill its agent and workers, and update the nodes that are present."""
        if event.add:
            self._adds_left -= 1
            self._present.add(event.node)
            await launcher.start_node(event.node)
            return
        self._present.remove(event.node)
        # A lost machine takes agent and workers with it. The agent is killed first, so that it cannot report their
        # ends.
        launcher.kill_node(event.node, also=self._workers.get(event.node, ()))
        self._forget(event.node)

    def _note(self, node: str, worker_pids: Sequence[int]) -> None:
        self._forget(node)
        self._workers[node] = [ProcessHandle(pid) for pid in worker_pids]

    def _forget(self, node: str) -> None:
        for handle in self._workers.pop(node, ()):
            handle.close()


async def _sleep_until(at: float) -> None:
    await asyncio.sleep(max(0.0, at - asyncio.get_running_loop().time()))
