"""The jobs of a pool, from submission to end, and the reports of their coordinators."""

from __future__ import annotations

from holdfast.coordination.pool.plans.paces import merge_pace
from holdfast.coordination.pool.state import PoolState
from holdfast.protocol.pool import events as ev
from holdfast.protocol.pool.record import OVER, PooledJob, PooledState
from holdfast.protocol.pool.sharing import JobState

#: states of jobs that have a coordinator
COORDINATED: frozenset[PooledState] = frozenset(("admitted", "suspending", "stopping"))
_OVER: dict[str, PooledState] = {"finished": "finished", "stopped": "stopped", "failed": "failed"}
_PREEMPTED = "others needed its nodes"


class PooledJobs:
    """Changes the state of jobs: admits, suspends, stops and ends them."""

    def __init__(self, state: PoolState) -> None:
        self._state = state

    def start_coordinators(self) -> None:
        """Start a coordinator for each job that runs, is being suspended or is stopping: the old ones ended with the
        old server.
        """
        for job in self._state.jobs.values():
            if job.state in COORDINATED:
                self._state.start_coordinator(job)

    def admit(self, job: PooledJob, size: int) -> None:
        """Remove a job from the queue and give it `size` nodes as its share: emit that and start its coordinator.

        Nodes are granted later.
        """
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
        state.start_coordinator(changed)

    def preempt(self, job: PooledJob) -> None:
        """Suspend a job because other jobs need its nodes."""
        self.suspend(job, preempted=True)

    def starve(self, job: PooledJob, why: str) -> None:
        """Suspend a job while its nodes are worth more to other jobs."""
        self.suspend(job, preempted=True, why=why)

    def suspend(self, job: PooledJob, *, preempted: bool = False, why: str = "") -> None:
        """Suspend a job: it saves its state and leaves its nodes."""
        self._state.put_job(
            job, state="suspending", preempted=preempted, share=0, wished_at=self._state.version, why=why
        )

    def stop(self, job: PooledJob, why: str, *, unsaved: bool = False) -> None:
        """Order a job's coordinator to end it; a job without one ends at once.

        Args:
            unsaved: Whether it ends without saving; once True, it stays so.
        """
        if job.state in COORDINATED:
            at, unsaved = self._state.version, unsaved or job.unsaved
            self._state.put_job(job, state="stopping", share=0, wished_at=at, why=why, unsaved=unsaved)
        else:
            self._end_job(job, "stopped", why)

    def on_report(self, name: str, report: JobState) -> None:
        """Handle the report of a job: record its pace, refusals and costs, release the grants that it no longer holds,
        note its standbys, and end or suspend it if it says so.

        A released node that trained and was not to leave counts as a failure. Reports about an earlier job of that
        name, or one without a coordinator, are ignored.
        """
        state, job = self._state, self._state.jobs.get(name)
        if job is None or report.submission != job.submission or job.state not in COORDINATED:
            return  # The report is about an earlier job of that name, or about one that has ended.
        trained = state.training_grants.get(name, frozenset())
        state.record_report(name, report)
        if report.pace is not None:
            pace = merge_pace(job.pace, report.pace, state.paces.get(name))
            state.paces[name] = report.pace
            if pace != job.pace:
                job = state.put_job(job, pace=pace)
        over = _OVER.get(report.standing)
        for grant in state.grants_of(name):
            # A job has returned each grant that it knows and does not hold; it never uses that grant again.
            if over or (grant.version <= report.heard and grant.number not in report.held):
                lost = grant.number in trained and job.state == "admitted" and not over
                state.release_grant(grant, by="job", failed=lost and not (grant.recalled or grant.replaced))
            elif grant.version <= report.heard:
                state.set_standby(grant.node, standby=grant.number in report.standbys)
        if over:
            self._end_job(job, over, report.why or job.why)
        elif job.state == "suspending" and _is_suspended(report, job.wished_at):
            self._finish_suspension(job)

    def _finish_suspension(self, job: PooledJob) -> None:
        """Stop the coordinator of a job that has saved its state and returned all grants.

        A preempted job goes back into the queue, any other one stays suspended.
        """
        state = self._state
        state.emit(ev.JobSuspended, job=job.name, preempted=job.preempted)
        why = (job.why or _PREEMPTED) if job.preempted else ""
        state.put_job(job, state="queued" if job.preempted else "suspended", submitted_at=state.now, why=why)
        state.stop_coordinator(job)

    def _end_job(self, job: PooledJob, over: PooledState, why: str) -> None:
        """Record and emit the end of a job, stop its coordinator and forget its reports.

        Also forget the oldest ended jobs.
        """
        state = self._state
        state.put_job(job, state=over, share=0, why=why)
        state.emit(ev.JobEnded, job=job.name, state=over, why=why)
        if job.state in COORDINATED:
            state.stop_coordinator(job)
        state.forget_report(job.name)
        state.forget_old_jobs()

    def find_live(self, name: str) -> PooledJob | None:
        """Return a job that has not ended, or None."""
        job = self._state.jobs.get(name)
        return job if job is not None and job.state not in OVER else None


def _is_suspended(report: JobState, wished_at: int) -> bool:
    """Return whether the job was suspended after the pool asked for it.

    A report from before that does not count: the job may have got nodes since.
    """
    return report.standing == "suspended" and report.heard >= wished_at and not report.held
