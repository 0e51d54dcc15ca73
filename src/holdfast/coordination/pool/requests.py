"""What users ask of a pool, and why it is refused."""

from __future__ import annotations

import msgspec

from holdfast.coordination.pool.inputs import (
    DrainNodes,
    ForgetNode,
    MoveJobs,
    PoolRequest,
    ResumeJob,
    StopPooled,
    Submit,
    SuspendJob,
    UndrainNodes,
    UpdateJob,
)
from holdfast.coordination.pool.jobs import PooledJobs
from holdfast.coordination.pool.nodes import PooledNodes
from holdfast.coordination.pool.places.moving import Moving
from holdfast.coordination.pool.plans.paces import declared
from holdfast.coordination.pool.share.interface import Bid
from holdfast.coordination.pool.state import PoolState
from holdfast.errors import BadInputError, RefusedError, UnreachableError
from holdfast.protocol.job_spec import JobSpec
from holdfast.protocol.pool.events import JobResumed, JobSubmitted
from holdfast.protocol.pool.record import OVER, PooledJob

#: jobs that are not over, and bytes of what all jobs say of themselves: the record is written as a whole
MOST_JOBS = 1000
MOST_SPEC_BYTES = 1 << 20
CHANGEABLE = ("min_nodes", "max_nodes", "sizes", "weight", "priority")


def check_sharing(spec: JobSpec) -> None:
    """Refuse what a job says of itself for a pool where that does not fit together.

    Raises:
        BadInputError: it does not.
    """
    least, most = spec.nodes_to_begin, spec.max_nodes
    if least > most:
        raise BadInputError(f"min_nodes is {least}: it must be max_nodes ({most}) at the most")
    if spec.sizes and not any(least <= size <= most for size in spec.sizes):
        sizes = ", ".join(map(str, spec.sizes))
        raise BadInputError(
            f"sizes is {sizes}: none lies within min_nodes and max_nodes ({least} to {most}); change either"
        )
    pace = spec.pace
    pace.check()
    if not pace.step_s and (pace.micro_batches or pace.samples):
        raise BadInputError(
            f"pace.step_s is empty, with {pace.micro_batches} micro_batches of {pace.samples} samples: give how long a "
            "step takes with 1, 2, ... nodes (0 where that was not measured), or leave [pace] out"
        )
    if pace.step_s and not (any(pace.step_s) and pace.micro_batches and pace.samples):
        raise BadInputError(
            f"pace says nothing of a step with {pace.micro_batches} micro_batches of {pace.samples} samples that takes "
            f"{', '.join(f'{seconds:g}' for seconds in pace.step_s)} s: give all three as they were measured, or none"
        )
    if spec.preemptible and not spec.checkpoint.dir:
        raise BadInputError(
            "preemptible is true: each time others need its nodes the job would begin anew; give checkpoint.dir, where "
            "it is saved before it leaves them"
        )


def ask(state: PoolState, jobs: PooledJobs, nodes: PooledNodes, moving: Moving, request: PoolRequest) -> None:
    """Do what a user asks for.

    Raises:
        BadInputError, UnreachableError, RefusedError: it is refused; the message says why, and what would do.
    """
    match request:
        case Submit(spec):
            _submit(state, spec)
        case StopPooled(name):
            jobs.stop(_live(state, name), request.why, unsaved=request.now)
        case SuspendJob(name, force):
            _suspend(state, jobs, _live(state, name), force=force)
        case ResumeJob(name):
            _resume(state, _live(state, name))
        case UpdateJob():
            _update(state, request)
        case ForgetNode(name):
            nodes.forget(name)
        case MoveJobs(moves):
            moving.begin(moves)
        case DrainNodes(names):
            nodes.drain(names, drained=True)
        case UndrainNodes(names):
            nodes.drain(names, drained=False)


def _submit(state: PoolState, spec: JobSpec) -> None:
    known = state.jobs.get(spec.name)
    if known is not None and known.state not in OVER:
        raise BadInputError(
            f"name is {spec.name!r}: a job of this name is {known.state}; give another (--name), or stop that one "
            f"first (holdfast stop -j {spec.name})"
        )
    check_sharing(spec)
    check_fits(state, spec)
    _check_room(state, spec)
    number = state.new_submission()
    job = PooledJob(name=spec.name, submission=number, spec=spec, submitted_at=state.now, pace=declared(spec))
    state.put_job(job)
    least, most = spec.nodes_to_begin, spec.max_nodes
    state.emit(JobSubmitted, job=spec.name, submission=number, min_nodes=least, max_nodes=most)


def check_fits(state: PoolState, spec: JobSpec) -> None:
    """Refuse a job that is larger than the pool, with all its nodes, and nobody else's job on them.

    Raises:
        BadInputError: with what would fit.
    """
    there = max(len(state.nodes), state.config.expected)
    reserve = 0 if spec.preemptible or state.config.auto_reserve else state.config.reserve
    room = there - reserve
    bid = Bid(name=spec.name, order=0, least=spec.nodes_to_begin, most=spec.max_nodes, sizes=tuple(sorted(spec.sizes)))
    need = bid.smallest if spec.preemptible else state.config.policy.begins_with(bid)
    if not there or need <= room:
        return
    fitting = max((size for size in spec.sizes if size <= room), default=0) if spec.sizes else max(room, 0)
    kept = f", of which {reserve} are kept in reserve" if reserve else ""
    would = f"{fitting} would fit (--nodes {fitting})" if fitting else "none of its sizes fits: add nodes first"
    nodes = f"{there} node" if there == 1 else f"{there} nodes"
    raise BadInputError(f"job {spec.name} needs {need} nodes, and the pool has {nodes}{kept}: {would}")


def _check_room(state: PoolState, spec: JobSpec) -> None:
    """Refuse a job where there are so many that the record would become too large to be written at every change."""
    live = [job.spec for job in state.jobs.values() if job.state not in OVER]
    if len(live) >= MOST_JOBS:
        raise RefusedError(f"the pool has {len(live)} jobs, and takes no more: wait until some are over, or stop some")
    taken, mine = sum(map(_size, live)), _size(spec)
    if taken + mine > MOST_SPEC_BYTES:
        raise RefusedError(
            f"what job {spec.name} says of itself takes {mine} bytes, and what the others say {taken}: the pool keeps "
            f"{MOST_SPEC_BYTES}; give shorter args, or wait until some are over"
        )
    state.forget_old_jobs(MOST_SPEC_BYTES - taken - mine, _size)


def _size(spec: JobSpec) -> int:
    return len(msgspec.msgpack.encode(spec))


def _suspend(state: PoolState, jobs: PooledJobs, job: PooledJob, *, force: bool) -> None:
    if job.state == "stopping":
        raise RefusedError(f"job {job.name} is about to end: it cannot be suspended any more")
    if job.state == "suspended" or (job.state == "suspending" and not job.preempted):
        return
    if job.state == "queued":
        state.put_job(job, state="suspended", preempted=False, why="")
    elif job.state == "suspending":
        state.put_job(job, preempted=False)
    elif not job.spec.checkpoint.dir and not force:
        raise RefusedError(
            f"job {job.name} keeps no checkpoints: suspended, it would begin anew. Give it a checkpoint.dir, or ask "
            "again with --force"
        )
    else:
        jobs.leave(job)


def _resume(state: PoolState, job: PooledJob) -> None:
    if job.state == "suspending" and not job.preempted:
        state.put_job(job, preempted=True)  # (it goes on once it is saved: from the queue)
    elif job.state == "suspended":
        state.put_job(job, state="queued", submitted_at=state.now, why="")
    elif job.state == "stopping":
        raise RefusedError(f"job {job.name} is about to end: it cannot go on")
    else:
        return
    state.emit(JobResumed, job=job.name)


def _update(state: PoolState, request: UpdateJob) -> None:
    job = _live(state, request.job)
    for key in request.changes:
        if key not in CHANGEABLE:
            raise BadInputError(f"{key} cannot be changed while a job is there; what can is {', '.join(CHANGEABLE)}")
    try:
        spec = msgspec.convert({**msgspec.to_builtins(job.spec), **request.changes}, JobSpec)
    except msgspec.ValidationError as error:
        raise BadInputError(f"job {job.name}: {error}") from None
    check_sharing(spec)
    check_fits(state, spec)
    if spec != job.spec:
        state.put_job(job, spec=spec)


def _live(state: PoolState, name: str) -> PooledJob:
    job = state.jobs.get(name)
    if job is None:
        live = ", ".join(sorted(one.name for one in state.jobs.values() if one.state not in OVER)) or "none"
        raise UnreachableError(f"there is no job {name!r}: the jobs are {live}")
    if job.state in OVER:
        raise RefusedError(f"job {name} is over: {job.state}{f' ({job.why})' if job.why else ''}")
    return job
