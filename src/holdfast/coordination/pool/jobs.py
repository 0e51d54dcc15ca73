"""A pool's jobs: submitted, queued, admitted, suspended, over; what their coordinators say of them."""

from __future__ import annotations

from holdfast.coordination.pool.plans.paces import learnt
from holdfast.coordination.pool.state import PoolState
from holdfast.protocol.pool import events as ev
from holdfast.protocol.pool.record import OVER, PooledJob, PooledState
from holdfast.protocol.pool.sharing import JobState

#: jobs that have a coordinator
COORDINATED: frozenset[PooledState] = frozenset(("admitted", "suspending", "stopping"))
_OVER: dict[str, PooledState] = {"finished": "finished", "stopped": "stopped", "failed": "failed"}
_PREEMPTED = "others needed its nodes"


class PooledJobs:
    """What becomes of the jobs."""

    def __init__(self, state: PoolState) -> None:
        self._state = state

    def restart(self) -> None:
        """Have a coordinator for each job that needs one: those of before are gone with the pool's server."""
        for job in self._state.jobs.values():
            if job.state in COORDINATED:
                self._state.begin_job(job)

    def admit(self, job: PooledJob, size: int) -> None:
        """Take a job out of the queue: it is given so many nodes."""
        state = self._state
        state.emit(ev.JobAdmitted, job=job.name, nodes=size, waited_s=max(0.0, state.now - job.submitted_at))
        now = state.now
        changed = state.put_job(
            job,
            state="admitted",
            share=size,
            admitted_at=now,
            grew_at=now,
            wished_at=state.version,
            preempted=False,
            why="",
        )
        state.begin_job(changed)

    def preempt(self, job: PooledJob) -> None:
        """Have a job leave its nodes for others."""
        self.leave(job, preempted=True)

    def starve(self, job: PooledJob, why: str) -> None:
        """Have a job leave its nodes, which do more for others; it waits until they no longer do."""
        self.leave(job, preempted=True, why=why)

    def leave(self, job: PooledJob, *, preempted: bool = False, why: str = "") -> None:
        """Have a job saved, and leave its nodes."""
        self._state.put_job(
            job, state="suspending", preempted=preempted, share=0, wished_at=self._state.version, why=why
        )

    def stop(self, job: PooledJob, why: str, *, unsaved: bool = False) -> None:
        """Have a job end; one without a coordinator is over at once. Who wants it saved as well is too late."""
        if job.state in COORDINATED:
            at, unsaved = self._state.version, unsaved or job.unsaved
            self._state.put_job(job, state="stopping", share=0, wished_at=at, why=why, unsaved=unsaved)
        else:
            self._end(job, "stopped", why)

    def said(self, name: str, report: JobState) -> None:
        """Take in how a job stands."""
        state, job = self._state, self._state.jobs.get(name)
        if job is None or report.submission != job.submission or job.state not in COORDINATED:
            return  # (of an earlier job of that name, or of one that has nothing to say any more)
        trained = state.trains.get(name, frozenset())
        state.said(name, report)
        if report.pace is not None:
            pace = learnt(job.pace, report.pace, state.paces.get(name))
            state.paces[name] = report.pace
            if pace != job.pace:
                job = state.put_job(job, pace=pace)
        over = _OVER.get(report.standing)
        for grant in state.grants_of(name):
            # What it was told of and does not hold it has given back, and never takes again.
            if over or (grant.version <= report.heard and grant.number not in report.held):
                lost = grant.number in trained and job.state == "admitted" and not over
                state.release(grant, by="job", failed=lost and not (grant.recalled or grant.replaced))
            elif grant.version <= report.heard:
                state.waits(grant.node, standby=grant.number in report.standbys)
        if over:
            self._end(job, over, report.why or job.why)
        elif job.state == "suspending" and _has_left(report, job.wished_at):
            self._suspended(job)

    def _suspended(self, job: PooledJob) -> None:
        """A job is saved, and has given back all that it was told of: since then it was granted nothing."""
        state = self._state
        state.emit(ev.JobSuspended, job=job.name, preempted=job.preempted)
        why = (job.why or _PREEMPTED) if job.preempted else ""
        state.put_job(job, state="queued" if job.preempted else "suspended", submitted_at=state.now, why=why)
        state.close_job(job)

    def _end(self, job: PooledJob, over: PooledState, why: str) -> None:
        state = self._state
        state.put_job(job, state=over, share=0, why=why)
        state.emit(ev.JobEnded, job=job.name, state=over, why=why)
        if job.state in COORDINATED:
            state.close_job(job)
        state.said_no_more(job.name)
        state.forget_old_jobs()

    def live(self, name: str) -> PooledJob | None:
        """Return a job that is not over."""
        job = self._state.jobs.get(name)
        return job if job is not None and job.state not in OVER else None


def _has_left(report: JobState, wished_at: int) -> bool:
    """Tell whether a job is suspended since it was asked to be; one that was so before may have been given nodes."""
    return report.standing == "suspended" and report.heard >= wished_at and not report.held
