"""Who is slower than the others at what each does by itself: computing, sending. No failure, and worth knowing.

Pure: the same times give the same scores.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from holdfast.protocol.messages.progress import Activity, OwnTimes
from holdfast.protocol.names import node_of


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerPace:
    """How long a worker computes a micro-batch, in seconds; `score`: so many times as long as the others' median."""

    worker: str
    compute_s: float
    score: float


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkPace:
    """How fast a worker's data goes out to others; `score`: the same takes so many times as long as by their median."""

    worker: str
    bytes_per_s: float
    score: float


class Stragglers:
    """What nodes have told of their workers' own times."""

    def __init__(self) -> None:
        #: how often something took 1.1 times as long as usual, by what it was
        self.slow: Counter[Activity] = Counter()
        self._told: dict[str, OwnTimes] = {}

    def told(self, node: str, times: OwnTimes) -> None:
        """A node tells of its workers."""
        self._told[node] = times  # (of its own workers: looked up by their node)
        self.slow.update(times.slow)

    def follow(self, nodes: Collection[str]) -> None:
        """Forget all other nodes."""
        self._told = {node: times for node, times in self._told.items() if node in nodes}

    def paces(self, workers: Iterable[str]) -> list[WorkerPace]:
        """Return those of these workers of which something is known, the slowest first; none where there is but one."""
        told = {worker: self._of(worker).compute_s.get(worker, 0.0) for worker in workers}
        return [WorkerPace(worker=worker, compute_s=took_s, score=score) for worker, took_s, score in _scored(told)]

    def links(self, workers: Iterable[str]) -> list[LinkPace]:
        """Return the links of these workers, likewise."""
        rates = {worker: self._of(worker).link_bytes_per_s.get(worker, 0.0) for worker in workers}
        scored = _scored({worker: 1.0 / rate for worker, rate in rates.items() if rate > 0.0})
        return [LinkPace(worker=worker, bytes_per_s=rates[worker], score=score) for worker, _, score in scored]

    def _of(self, worker: str) -> OwnTimes:
        return self._told.get(node_of(worker), _NOTHING)


_NOTHING = OwnTimes(compute_s={}, slow={}, link_bytes_per_s={})


def _scored(took_s: Mapping[str, float]) -> list[tuple[str, float, float]]:
    """Return who took how long, and how many times as long as the others' median, the slowest first."""
    known = sorted(((seconds, worker) for worker, seconds in took_s.items() if seconds > 0.0), reverse=True)
    ordered = [seconds for seconds, _ in known]
    return [
        (worker, seconds, seconds / _median_without(ordered, place))
        for place, (seconds, worker) in enumerate(known)
        if len(known) > 1
    ]


def _median_without(ordered: list[float], place: int) -> float:
    """Return the median of an ordered list without one of its values; of two in the middle, the mean."""
    left = len(ordered) - 1
    low, high = ((index if index < place else index + 1) for index in ((left - 1) // 2, left // 2))
    return (ordered[low] + ordered[high]) / 2
