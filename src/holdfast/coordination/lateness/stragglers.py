"""Who is slower than the others at what each computes by itself: no failure, and worth knowing.

Pure: the same times give the same scores.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from holdfast.protocol.messages.progress import Activity, OwnTimes
from holdfast.protocol.names import node_of


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerPace:
    """How long a worker computes a micro-batch, in seconds; `score`: so many times as long as the others' median."""

    worker: str
    compute_s: float
    score: float


class Stragglers:
    """What nodes have told of their workers' own times."""

    def __init__(self) -> None:
        #: how often something took 1.1 times as long as usual, by what it was
        self.slow: Counter[Activity] = Counter()
        self._compute_s: dict[str, dict[str, float]] = {}

    def told(self, node: str, times: OwnTimes) -> None:
        """A node tells of its workers."""
        self._compute_s[node] = times.compute_s  # (of its own workers: looked up by their node)
        self.slow.update(times.slow)

    def follow(self, nodes: Collection[str]) -> None:
        """Forget all other nodes."""
        self._compute_s = {node: times for node, times in self._compute_s.items() if node in nodes}

    def paces(self, workers: Iterable[str]) -> list[WorkerPace]:
        """Return those of these workers of which something is known, the slowest first; none where there is but one."""
        told = {worker: self._compute_s.get(node_of(worker), {}).get(worker, 0.0) for worker in workers}
        known = sorted(((took_s, worker) for worker, took_s in told.items() if took_s > 0.0), reverse=True)
        seconds = [took_s for took_s, _ in known]
        return [
            WorkerPace(worker=worker, compute_s=took_s, score=took_s / _median_without(seconds, place))
            for place, (took_s, worker) in enumerate(known)
            if len(known) > 1
        ]


def _median_without(ordered: list[float], place: int) -> float:
    """Return the median of an ordered list without one of its values; of two in the middle, the mean."""
    left = len(ordered) - 1
    low, high = ((index if index < place else index + 1) for index in ((left - 1) // 2, left // 2))
    return (ordered[low] + ordered[high]) / 2
