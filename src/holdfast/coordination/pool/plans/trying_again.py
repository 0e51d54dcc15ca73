"""Numbers of nodes with which a job was slower than what is known of the others says are tried again, now and then.

It may have been a machine that was slow, and is gone, or something beside the job. No plan gives it so many nodes any
more, so nobody would see that by itself. Where it is as slow again it is tried half as often.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec.structs import replace

from holdfast.coordination.pool.state import PoolState
from holdfast.protocol.pool.record import PooledJob
from holdfast.protocol.pool.sharing import JobPace

#: what was measured is forgotten after so long at first, and so many times twice as long at the most
RETRY_S, MOST_DOUBLED = 3600.0, 5
#: with a number of nodes that was tried again for so long, what the job has said of it before holds
SETTLED_S = 60.0
#: a number of nodes achieves less than it should where the others say so much more
_WORSE_BY = 0.25
_LOOK_S = 30.0


class TryingAgain:
    """Since when each job has had which number of nodes, as far as this server has seen."""

    def __init__(self, state: PoolState, throughput: Callable[[JobPace, int], Sequence[float]]) -> None:
        """`throughput`: what a pace comes to with 0.. nodes."""
        self._state = state
        self._throughput = throughput
        self._looks_at = 0.0
        self._at: dict[str, tuple[int, float]] = {}
        #: by job and number of nodes: when it had so many last, or that was forgotten; and how often it was
        self._left: dict[tuple[str, int], float] = {}
        self._tries: dict[tuple[str, int], int] = {}

    def look(self) -> bool:
        """Forget what is to be tried again; return whether there was something."""
        state = self._state
        if state.now < self._looks_at:
            return False
        self._looks_at = state.now + _LOOK_S
        jobs = [job for job in state.jobs.values() if job.state == "admitted"]
        names = {job.name for job in jobs}
        for kept in (self._left, self._tries):
            for key in [key for key in kept if key[0] not in names]:
                del kept[key]
        self._at = {name: at for name, at in self._at.items() if name in names}
        forgot = [self._look(job, job.pace) for job in jobs if job.pace is not None]  # (of each job one at a time)
        return any(forgot)

    def _look(self, job: PooledJob, pace: JobPace) -> bool:
        state, now = self._state, self._state.now
        size = len(state.trains.get(job.name, ()))
        before, since = self._at.get(job.name, (size, now))
        if size != before:
            self._left[job.name, before], since = now, now
        self._at[job.name] = size, since
        said = state.paces.get(job.name)
        if size not in pace.step_s and said is not None and size in said.step_s and now - since >= SETTLED_S:
            # (it says only what is news to it: this is as it was)
            state.put_job(job, pace=replace(pace, step_s={**pace.step_s, size: said.step_s[size]}))
            return False
        for other in sorted(pace.step_s):
            key = job.name, other
            doubled = min(self._tries.get(key, 0), MOST_DOUBLED)
            if other == size or now - self._left.setdefault(key, now) < RETRY_S * (1 << doubled):
                continue
            rest = {nodes: seconds for nodes, seconds in pace.step_s.items() if nodes != other}
            if rest and other not in job.spec.pace.known and self._is_worse(pace, replace(pace, step_s=rest), other):
                self._left[key], self._tries[key] = now, doubled + 1
                state.put_job(job, pace=replace(pace, step_s=rest))
                return True
        return False

    def _is_worse(self, pace: JobPace, others: JobPace, nodes: int) -> bool:
        """Tell whether a number of nodes achieves less than the others let expect."""
        return self._throughput(others, nodes)[nodes] > (1.0 + _WORSE_BY) * self._throughput(pace, nodes)[nodes]
