"""Time for which a job had nodes, whether it trained or not."""

from __future__ import annotations

from holdfast.protocol.events import GenerationStarted, JobFailed, JobFinished, NodeLeft, NodesJoined, ReadEvent


class Attendance:
    """Sums the seconds of nodes and of their workers. Each worker has one accelerator."""

    def __init__(self) -> None:
        self._workers: dict[str, int] = {}
        self._node_s = self._worker_s = 0.0
        self._now: float | None = None

    def add_event(self, event: ReadEvent, now: float) -> None:
        """Update the sums from an event. `now` is in unix seconds and never decreases."""
        match event:
            case NodesJoined():
                self._pass(now)
                self._workers |= {joined.node: len(joined.worker_pids) for joined in event.nodes}
            case NodeLeft():
                self._pass(now)
                self._workers.pop(event.node, None)
            case GenerationStarted():
                # The journal may have lost the nodes_joined events of some members.
                self._pass(now)
                each = max(1, event.world_size // max(1, len(event.members)))
                self._workers = dict.fromkeys(event.members, each) | self._workers
            case JobFinished() | JobFailed():
                self._pass(now)
                self._workers.clear()
            case _:
                pass

    def _pass(self, now: float) -> None:
        self._node_s, self._worker_s = self.until(now)
        self._now = now

    def until(self, now: float) -> tuple[float, float]:
        """Return the node-seconds and worker-seconds up to `now`."""
        passed = 0.0 if self._now is None else max(0.0, now - self._now)
        return self._node_s + passed * len(self._workers), self._worker_s + passed * sum(self._workers.values())
