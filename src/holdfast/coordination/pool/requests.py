"""The requests of users to a pool, and the reasons to refuse them."""

from __future__ import annotations

import msgspec

from holdfast.coordination.pool.inputs import (
    DrainNodes,
    ForgetNode,
    MoveJobs,
    PoolRequest,
    ResumeJob,
    StopPooled,
    SubmitJob,
    SuspendJob,
    UndrainNodes,
    UpdateJob,
)
from holdfast.coordination.pool.jobs import PooledJobs
from holdfast.coordination.pool.node_selection.moving import MoveQueue
from holdfast.coordination.pool.nodes import PooledNodes
from holdfast.coordination.pool.plans.paces import declared_pace
from holdfast.coordination.pool.share.interface import Bid
from holdfast.coordination.pool.state import PoolState
from holdfast.errors import BadInputError, RefusedError, UnreachableError
from holdfast.protocol.job_spec import JobSpec
from holdfast.protocol.pool.events import JobResumed, JobSubmitted
from holdfast.protocol.pool.record import OVER, PooledJob

#: Limit of live jobs. The record is written as a whole, so its size is limited.
MAX_JOBS = 1000
#: limit of the bytes of all specifications together
MAX_SPEC_BYTES = 1 << 20
CHANGEABLE = ("min_nodes", "max_nodes", "sizes", "weight", "priority")


def check_sharing(spec: JobSpec) -> None:
    """Refuse a job with contradictory settings for a pool: `min_nodes` above `max_nodes`, sizes of which none lies
    within these, an incomplete pace, or preemptible without checkpoints.

    Raises:
        BadInputError: with the setting and the value
    """
    least, most = spec.nodes_to_begin, spec.max_nodes
    if least > most:
        raise BadInputError(f"min_nodes is {least}: it must be at most max_nodes ({most})")
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
            "preemptible is true, without checkpoint.dir: the job would start from scratch each time other jobs need "
            "its nodes; set checkpoint.dir"
        )


def handle_request(
    state: PoolState, jobs: PooledJobs, nodes: PooledNodes, moving: MoveQueue, request: PoolRequest
) -> None:
    """Handle a user's request.

    Raises:
        BadInputError, UnreachableError, RefusedError: The request is refused; the message contains reason and remedy.
    """
    match request:
        case SubmitJob(spec):
            _submit(state, spec)
        case StopPooled(name):
            jobs.stop(_get_live_job(state, name), request.why, unsaved=request.now)
        case SuspendJob(name, force):
            _suspend(state, jobs, _get_live_job(state, name), force=force)
        case ResumeJob(name):
            _resume(state, _get_live_job(state, name))
        case UpdateJob():
            _update(state, request)
        case ForgetNode(name):
            nodes.forget_node(name)
        case MoveJobs(moves):
            moving.start(moves)
        case DrainNodes(names):
            nodes.set_drained(names, drained=True)
        case UndrainNodes(names):
            nodes.set_drained(names, drained=False)


def _submit(state: PoolState, spec: JobSpec) -> None:
    """Put a new job into the queue, and emit that.

    Raises:
        BadInputError: A live job has this name, its settings are contradictory, or it is too large for the pool.
        RefusedError: The pool has too many jobs.
    """
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
    job = PooledJob(name=spec.name, submission=number, spec=spec, submitted_at=state.now, pace=declared_pace(spec))
    state.put_job(job)
    least, most = spec.nodes_to_begin, spec.max_nodes
    state.emit(JobSubmitted, job=spec.name, submission=number, min_nodes=least, max_nodes=most)


def check_fits(state: PoolState, spec: JobSpec) -> None:
    """Refuse a job that needs more nodes to start than the whole pool has, or will have, without the reserve.

    An empty pool accepts all.

    Raises:
        BadInputError: with the size that would fit
    """
    total = max(len(state.nodes), state.config.expected)
    reserve = 0 if spec.preemptible or state.config.auto_reserve else state.config.reserve
    room = total - reserve
    bid = Bid(name=spec.name, order=0, least=spec.nodes_to_begin, most=spec.max_nodes, sizes=tuple(sorted(spec.sizes)))
    need = bid.smallest if spec.preemptible else state.config.policy.nodes_to_start(bid)
    if not total or need <= room:
        return
    fitting = max((size for size in spec.sizes if size <= room), default=0) if spec.sizes else max(room, 0)
    kept = f", of which {reserve} are kept in reserve" if reserve else ""
    would = f"{fitting} would fit (--nodes {fitting})" if fitting else "none of its sizes fits: add nodes first"
    nodes = f"{total} node" if total == 1 else f"{total} nodes"
    raise BadInputError(f"job {spec.name} needs {need} nodes, and the pool has {nodes}{kept}: {would}")


def _check_room(state: PoolState, spec: JobSpec) -> None:
    """Refuse a job (`RefusedError`) if there are too many, or if the record would grow too large: it is written as a
    whole at every change.

    Ended jobs are forgotten to make room.
    """
    live = [job.spec for job in state.jobs.values() if job.state not in OVER]
    if len(live) >= MAX_JOBS:
        raise RefusedError(f"the pool has {len(live)} jobs, and takes no more: wait until some are over, or stop some")
    taken, mine = sum(map(_encoded_size, live)), _encoded_size(spec)
    if taken + mine > MAX_SPEC_BYTES:
        raise RefusedError(
            f"the specification of job {spec.name} has {mine} bytes, and those of the other jobs {taken}: the pool "
            f"keeps {MAX_SPEC_BYTES}; give shorter args, or wait until some are over"
        )
    state.forget_old_jobs(MAX_SPEC_BYTES - taken - mine, _encoded_size)


def _encoded_size(spec: JobSpec) -> int:
    """Return the bytes of a specification in the record."""
    return len(msgspec.msgpack.encode(spec))


def _suspend(state: PoolState, jobs: PooledJobs, job: PooledJob, *, force: bool) -> None:
    """Suspend a job, or take it out of the queue; one that is being preempted will not be queued again.

    Raises `RefusedError` if it is stopping, or has no checkpoints and not `force`. Nothing if it is suspended.
    """
    if job.state == "stopping":
        raise RefusedError(f"job {job.name} is about to end: it can no longer be suspended")
    if job.state == "suspended" or (job.state == "suspending" and not job.preempted):
        return
    if job.state == "queued":
        state.put_job(job, state="suspended", preempted=False, why="")
    elif job.state == "suspending":
        state.put_job(job, preempted=False)
    elif not job.spec.checkpoint.dir and not force:
        raise RefusedError(
            f"job {job.name} keeps no checkpoints: after a suspension it would start from scratch. Give it a "
            "checkpoint.dir, or ask again with --force"
        )
    else:
        jobs.suspend(job)


def _resume(state: PoolState, job: PooledJob) -> None:
    """Queue a suspended job again, at once or when it is saved, and emit that.

    Raises `RefusedError` if it is stopping; other states change nothing.
    """
    if job.state == "suspending" and not job.preempted:
        state.put_job(job, preempted=True)  # Once it is saved, it goes into the queue.
    elif job.state == "suspended":
        state.put_job(job, state="queued", submitted_at=state.now, why="")
    elif job.state == "stopping":
        raise RefusedError(f"job {job.name} is about to end: it cannot go on")
    else:
        return
    state.emit(JobResumed, job=job.name)


def _update(state: PoolState, request: UpdateJob) -> None:
    """Change settings of a job.

    Raises:
        BadInputError: A setting cannot be changed, is invalid, or the job then fits no longer.
        UnreachableError, RefusedError: There is no such job, or it has ended.
    """
    job = _get_live_job(state, request.job)
    for key in request.changes:
        if key not in CHANGEABLE:
            raise BadInputError(
                f"{key} of a submitted job cannot be changed; these settings can: {', '.join(CHANGEABLE)}"
            )
    try:
        spec = msgspec.convert({**msgspec.to_builtins(job.spec), **request.changes}, JobSpec)
    except msgspec.ValidationError as error:
        raise BadInputError(f"job {job.name}: {error}") from None
    check_sharing(spec)
    check_fits(state, spec)
    if spec != job.spec:
        state.put_job(job, spec=spec)


def _get_live_job(state: PoolState, name: str) -> PooledJob:
    """Return a job that has not ended.

    Raises:
        UnreachableError: The pool has no such job.
        RefusedError: The job has ended.
    """
    job = state.jobs.get(name)
    if job is None:
        live = ", ".join(sorted(job.name for job in state.jobs.values() if job.state not in OVER)) or "none"
        raise UnreachableError(f"there is no job {name!r}: the jobs are {live}")
    if job.state in OVER:
        raise RefusedError(f"job {name} is over: {job.state}{f' ({job.why})' if job.why else ''}")
    return job
