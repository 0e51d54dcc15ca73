"""Re-measures numbers of nodes at which a job ran slower than predicted.

The cause may have been a slow machine that has left, or something outside the job. Plans avoid that number of nodes, so
it would never be measured again. If the job is as slow again, the next try comes after twice the time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec.structs import replace

from holdfast.coordination.pool.state import PoolState
from holdfast.protocol.pool.record import PooledJob
from holdfast.protocol.pool.sharing import JobPace

#: seconds until a measurement is first forgotten
RETRY_S = 3600.0
#: how often that time is doubled at most
MAX_DOUBLINGS = 5
#: after this many seconds with a repeated number of nodes, the job's earlier report counts again
SETTLED_S = 60.0
#: relative excess of the predicted throughput from which a measurement counts as slow
_WORSE_BY = 0.25
_CHECK_S = 30.0


class Remeasurements:
    """When each job had which number of nodes, as far as this server has seen."""

    def __init__(self, state: PoolState, throughput: Callable[[JobPace, int], Sequence[float]]) -> None:
        """Start with no history.

        Args:
            state: the pool
            throughput: returns the FLOP/s of a pace with 0, 1, ... nodes
        """
        self._state = state
        self._throughput = throughput
        self._next_check_at = 0.0
        self._at: dict[str, tuple[int, float]] = {}
        #: by job and number of nodes, when the job last had that many, or its measurement was forgotten
        self._left: dict[tuple[str, int], float] = {}
        #: by job and number of nodes, how often the measurement was forgotten
        self._tries: dict[tuple[str, int], int] = {}

    def forget_due(self) -> bool:
        """Update the history of the running jobs, and forget measurements that are due to be repeated, at most one of
        each job; return whether any was forgotten.

        Does nothing, and returns False, within `_CHECK_S` seconds of the last time.
        """
        state = self._state
        if state.now < self._next_check_at:
            return False
        self._next_check_at = state.now + _CHECK_S
        jobs = [job for job in state.jobs.values() if job.state == "admitted"]
        names = {job.name for job in jobs}
        for kept in (self._left, self._tries):
            for key in [key for key in kept if key[0] not in names]:
                del kept[key]
        self._at = {name: at for name, at in self._at.items() if name in names}
        forgot = [
            self._check_job(job, job.pace) for job in jobs if job.pace is not None
        ]  # One size of each job at a time.
        return any(forgot)

    def _check_job(self, job: PooledJob, pace: JobPace) -> bool:
        """Update the history of a job, and forget the measurement of one number of nodes if the job was not there for
        long and the measurement says that it is slower than the others predict.

        The wait doubles with each try. Declared ones stay. Return whether one was forgotten; a forgotten one that the
        job has confirmed is restored instead.
        """
        state, now = self._state, self._state.now
        size = len(state.training_grants.get(job.name, ()))
        before, since = self._at.get(job.name, (size, now))
        if size != before:
            self._left[job.name, before], since = now, now
        self._at[job.name] = size, since
        reported = state.paces.get(job.name)
        if size not in pace.step_s and reported is not None and size in reported.step_s and now - since >= SETTLED_S:
            # The job reports only changes, so its earlier measurement was confirmed.
            state.put_job(job, pace=replace(pace, step_s={**pace.step_s, size: reported.step_s[size]}))
            return False
        for other in sorted(pace.step_s):
            key = job.name, other
            doubled = min(self._tries.get(key, 0), MAX_DOUBLINGS)
            if other == size or now - self._left.setdefault(key, now) < RETRY_S * (1 << doubled):
                continue
            rest = {nodes: seconds for nodes, seconds in pace.step_s.items() if nodes != other}
            if rest and other not in job.spec.pace.known and self._is_slower(pace, replace(pace, step_s=rest), other):
                self._left[key], self._tries[key] = now, doubled + 1
                state.put_job(job, pace=replace(pace, step_s=rest))
                return True
        return False

    def _is_slower(self, pace: JobPace, others: JobPace, nodes: int) -> bool:
        """Return whether a number of nodes achieves less than the other measurements predict."""
        return self._throughput(others, nodes)[nodes] > (1.0 + _WORSE_BY) * self._throughput(pace, nodes)[nodes]
