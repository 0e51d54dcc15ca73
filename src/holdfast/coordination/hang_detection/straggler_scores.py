"""Scores workers that are slower than the others at their own work: computing and sending. That is not a failure.

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
    """The computing time of a worker."""

    worker: str
    #: seconds of a micro-batch
    compute_s: float
    #: that as a multiple of the others' median
    score: float


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkPace:
    """The sending rate of a worker."""

    worker: str
    bytes_per_s: float
    #: time for the same data, as a multiple of the others' median
    score: float


class WorkerTimes:
    """The own times of workers, as reported by their nodes."""

    def __init__(self) -> None:
        #: how often an activity took 1.1 times as long as usual
        self.slow: Counter[Activity] = Counter()
        self._times: dict[str, OwnTimes] = {}

    def on_own_times(self, node: str, times: OwnTimes) -> None:
        """Store a node's newest report about its workers, and count the slow activities in it."""
        self._times[node] = times
        self.slow.update(times.slow)

    def keep_nodes(self, nodes: Collection[str]) -> None:
        """Forget all other nodes."""
        self._times = {node: times for node, times in self._times.items() if node in nodes}

    def paces(self, workers: Iterable[str]) -> list[WorkerPace]:
        """Return the known paces of these workers, the slowest first; [] for a single worker."""
        seconds = {worker: self._times_of(worker).compute_s.get(worker, 0.0) for worker in workers}
        return [WorkerPace(worker=worker, compute_s=took_s, score=score) for worker, took_s, score in _score(seconds)]

    def links(self, workers: Iterable[str]) -> list[LinkPace]:
        """Return the known sending rates of these workers, the slowest first; [] for a single worker."""
        rates = {worker: self._times_of(worker).link_bytes_per_s.get(worker, 0.0) for worker in workers}
        scored = _score({worker: 1.0 / rate for worker, rate in rates.items() if rate > 0.0})
        return [LinkPace(worker=worker, bytes_per_s=rates[worker], score=score) for worker, _, score in scored]

    def _times_of(self, worker: str) -> OwnTimes:
        """Return the newest report of a worker's node, or an empty one."""
        return self._times.get(node_of(worker), _NO_TIMES)


_NO_TIMES = OwnTimes(compute_s={}, slow={}, link_bytes_per_s={})


def _score(took_s: Mapping[str, float]) -> list[tuple[str, float, float]]:
    """Return (worker, seconds, seconds / median of the others), the slowest first; [] for a single worker.

    Workers with 0 seconds are unknown, and left out.
    """
    known = sorted(((seconds, worker) for worker, seconds in took_s.items() if seconds > 0.0), reverse=True)
    ordered = [seconds for seconds, _ in known]
    return [
        (worker, seconds, seconds / _median_without(ordered, place))
        for place, (seconds, worker) in enumerate(known)
        if len(known) > 1
    ]


def _median_without(ordered: list[float], place: int) -> float:
    """Return the median of an ordered list without its value at index `place`; the mean of the middle two."""
    left = len(ordered) - 1
    low, high = ((index if index < place else index + 1) for index in ((left - 1) // 2, left // 2))
    return (ordered[low] + ordered[high]) / 2
