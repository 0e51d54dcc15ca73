"""Time for which a job had nodes, whether it trained or not."""

from __future__ import annotations

from holdfast.protocol.events import GenerationStarted, JobFailed, JobFinished, NodeLeft, NodesJoined, ReadEvent


class NodeTime:
    """Sums the seconds of nodes and of their workers. Each worker has one accelerator."""

    def __init__(self) -> None:
        self._workers: dict[str, int] = {}
        self._node_s = self._worker_s = 0.0
        self._now: float | None = None

    def add_event(self, event: ReadEvent, now: float) -> None:
        """Update the number of nodes and workers from a join, a leave, a new generation or the end of the job.

        Ignore other events.

        `now` is in unix seconds and never decreases. Members of a generation that never joined by an event count from
        there.
        """
        match event:
            case NodesJoined():
                self._advance_to(now)
                self._workers |= {joined.node: len(joined.worker_pids) for joined in event.nodes}
            case NodeLeft():
                self._advance_to(now)
                self._workers.pop(event.node, None)
            case GenerationStarted():
                # The journal may have lost the nodes_joined events of some members.
                self._advance_to(now)
                each = max(1, event.world_size // max(1, len(event.members)))
                self._workers = dict.fromkeys(event.members, each) | self._workers
            case JobFinished() | JobFailed():
                self._advance_to(now)
                self._workers.clear()
            case _:
                pass

    def _advance_to(self, now: float) -> None:
        """Add the time since the last change to the sums."""
        self._node_s, self._worker_s = self.until(now)
        self._now = now

    def until(self, now: float) -> tuple[float, float]:
        """Return the node-seconds and worker-seconds up to `now`."""
        passed = 0.0 if self._now is None else max(0.0, now - self._now)
        return self._node_s + passed * len(self._workers), self._worker_s + passed * sum(self._workers.values())
