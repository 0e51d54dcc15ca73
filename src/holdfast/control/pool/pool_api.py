"""The HTTP API of a pool for people and tools, on the port of its nodes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Annotated, Any, ParamSpec, TypeVar

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from holdfast.control.api_types import END_HEADER, MAX_WAIT_S, DrainRequest
from holdfast.control.pool.job_coordinators import JobCoordinators
from holdfast.control.pool.pool_shell import PoolShell
from holdfast.control.pool.submission_check import check_submission
from holdfast.control.serving.http import error_answer, json_answer, read_body, read_number
from holdfast.control.serving.retrying_writer import wait_while_answered
from holdfast.coordination.pool.foresight import forecast_drain
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
from holdfast.coordination.pool.node_selection.compacting import RACK_WORTH_S, compact
from holdfast.coordination.pool.node_selection.moving import build_occupancy
from holdfast.coordination.pool.what_if import AddJob, AddNodes, Change, LoseNode, compute_what_if
from holdfast.errors import BadInputError, RefusedError, UnreachableError
from holdfast.protocol.job_spec import JobSpec
from holdfast.protocol.pool.launch import PooledLaunch
from holdfast.protocol.pool.record import PooledJob

P = ParamSpec("P")
T = TypeVar("T")

#: seconds after which a write to the store counts as unanswered
WRITE_S = 3.0
_JSON_LINES = "application/x-ndjson"


class StopRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /jobs/NAME/stop."""

    now: bool = False
    why: Annotated[str, Meta(max_length=200)] = ""


class SuspendRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /jobs/NAME/suspend."""

    force: bool = False


class UpdateRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /jobs/NAME/update."""

    changes: Annotated[
        Mapping[Annotated[str, Meta(max_length=64)], int | float | Annotated[list[int], Meta(max_length=1024)]],
        Meta(max_length=16),
    ]


class CompactRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /compact."""

    dry_run: bool = False
    worth_s: Annotated[float, Meta(ge=0, le=1e9)] = RACK_WORTH_S


class WhatIfRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /whatif: exactly one of these."""

    lose: Annotated[str, Meta(max_length=64)] = ""
    add: Annotated[int, Meta(ge=0, le=1 << 16)] = 0
    submit: JobSpec | None = None

    @property
    def change(self) -> Change:
        """The requested change: a node that is lost, nodes that are added, or a job that is submitted.

        Raises:
            BadInputError: none, or several at once.
        """
        changes: list[Change] = [LoseNode(self.lose)] if self.lose else []
        changes += [AddNodes(self.add)] if self.add else []
        changes += [AddJob(self.submit)] if self.submit is not None else []
        if len(changes) != 1:
            raise BadInputError("give one of lose, add and submit")
        return changes[0]


class PoolApi:
    """The pool's own routes."""

    def __init__(
        self, shell: PoolShell, jobs: JobCoordinators, metrics: Callable[[], bytes], body_s: float = 10.0
    ) -> None:
        self._shell = shell
        self._jobs = jobs
        self._metrics = metrics
        self._body_s = body_s
        self._requests: set[asyncio.Future[bool]] = set()
        #: background computations need memory and a core, so one runs at a time
        self._compute_lock = asyncio.Lock()

    def routes(self) -> list[Route]:
        """Return all HTTP routes."""
        return [
            Route("/pool", self.pool, methods=["GET"]),
            Route("/pool/events", self.events, methods=["GET"]),
            Route("/metrics", self.metrics, methods=["GET"]),
            Route("/jobs", self.jobs, methods=["GET"]),
            Route("/jobs", self.submit, methods=["POST"]),
            Route("/jobs/{name}", self.job, methods=["GET"]),
            Route("/jobs/{name}/launch", self.launch, methods=["GET"]),
            Route("/jobs/{name}/stop", self.stop, methods=["POST"]),
            Route("/jobs/{name}/suspend", self.suspend, methods=["POST"]),
            Route("/jobs/{name}/resume", self.resume, methods=["POST"]),
            Route("/jobs/{name}/update", self.update, methods=["POST"]),
            Route("/whatif", self.what_if, methods=["POST"]),
            Route("/compact", self.compact, methods=["POST"]),
            Route("/nodes/drain", self.drain, methods=["POST"]),
            Route("/nodes/undrain", self.undrain, methods=["POST"]),
            Route("/nodes/{name}/forget", self.forget, methods=["POST"]),
        ]

    async def pool(self, request: Request) -> Response:
        """Return the state of the pool."""
        return json_answer(await self._shell.read_durable(lambda: pool_status(self._shell)))

    async def events(self, request: Request) -> Response:
        """Return the events above number `after` as JSON lines. Without one, wait for it up to `wait` seconds."""
        after, wait_s = int(read_number(request, "after", 0)), min(read_number(request, "wait", 0.0), MAX_WAIT_S)
        await self._shell.journal.wait_beyond(after, wait_s)
        lines = self._shell.journal.read(after)
        return Response(b"".join(lines), media_type=_JSON_LINES, headers={END_HEADER: "0"})

    async def metrics(self, request: Request) -> Response:
        """Return the metrics in Prometheus' text format."""
        return Response(await self._shell.read_durable(self._metrics), media_type="text/plain; version=0.0.4")

    async def jobs(self, request: Request) -> Response:
        """Return all jobs, finished ones last."""
        return json_answer({"jobs": (await self._shell.read_durable(lambda: pool_status(self._shell)))["jobs"]})

    async def job(self, request: Request) -> Response:
        """Return the status of one job, the conditions under which it would start, and the pool's reserve.

        Raises:
            UnreachableError: the job does not exist.
        """
        name = request.path_params["name"]
        status = await self._shell.read_durable(lambda: self._explain(name))
        return json_answer(status)

    def _explain(self, name: str) -> dict[str, Any]:
        """Return the status of a job for `job`, with its conditions, the reserve and the log folder.

        Raises:
            UnreachableError: the job does not exist.
        """
        machine = self._shell.machine
        reserve = {"nodes": machine.state.reserve, "why": machine.reserve_reason}
        details = {"would": machine.explain(name), "reserve": reserve, "now": machine.state.now}
        job = self._get_job(name)
        return {**_job_status(self._shell, job), **details, "log_dir": self._jobs.log_folder(job)}

    async def submit(self, request: Request) -> Response:
        """Check the job in the body, submit it, and return its number.

        Answer 503 if this server no longer leads the pool.

        Raises:
            BadInputError: as `check_submission`, or as `_feed`.
            RefusedError: as `_feed`.
        """
        spec = await read_body(request, JobSpec, self._body_s)
        check_submission(spec)
        if answer := await self._feed(SubmitJob(spec)):
            return answer
        return json_answer({"submission": self._get_job(spec.name).submission})

    async def launch(self, request: Request) -> Response:
        """Return the job, its token and its coordinator's path.

        With these, a node that was granted to the job starts processes.

        Raises:
            UnreachableError: the job needs no coordinator now, or does not exist.
        """
        job = self._jobs.find_job(request.path_params["name"])
        if job is None:
            raise UnreachableError(f"job {request.path_params['name']} has no nodes now")
        token = self._jobs.token(job.name, job.submission)
        address = f"/jobs/{job.name}/job"
        return json_answer(PooledLaunch(submission=job.submission, spec=job.spec, token=token, address=address))

    async def stop(self, request: Request) -> Response:
        """End a job, saved if it keeps checkpoints, or at once with `now`. The reason in the body is optional.

        Answer as soon as that is decided; the job ends later. Raises as `_feed`.
        """
        body = await read_body(request, StopRequest, self._body_s)
        why = {"why": body.why} if body.why else {}
        return await self._request(StopPooled(request.path_params["name"], body.now, **why))

    async def suspend(self, request: Request) -> Response:
        """Suspend a job: it is saved, and leaves its nodes."""
        body = await read_body(request, SuspendRequest, self._body_s)
        return await self._request(SuspendJob(request.path_params["name"], body.force))

    async def resume(self, request: Request) -> Response:
        """Resume a suspended job."""
        return await self._request(ResumeJob(request.path_params["name"]))

    async def update(self, request: Request) -> Response:
        """Change the requirements of a job."""
        body = await read_body(request, UpdateRequest, self._body_s)
        return await self._request(UpdateJob(request.path_params["name"], body.changes))

    async def compact(self, request: Request) -> Response:
        """Compute moves that put the nodes of jobs into fewer racks, if they are worth their cost, and return them.

        Make them, too, unless it is a dry run.
        """
        body, state = await read_body(request, CompactRequest, self._body_s), self._shell.machine.state
        at = await self._shell.read_durable(lambda: build_occupancy(state))
        found = await self._compute(compact, at, body.worth_s)
        if not body.dry_run and (answer := await self._feed(MoveJobs(found.moves))):
            return answer
        return json_answer(found)

    async def what_if(self, request: Request) -> Response:
        """Return the division of nodes now and after a change, and the jobs that would wait. Nothing is changed."""
        change, machine = (await read_body(request, WhatIfRequest, self._body_s)).change, self._shell.machine
        now, then = await self._shell.read_durable(lambda: machine.preview_change(change))
        policy = machine.config.policy
        found = await self._compute(compute_what_if, policy, now, then)
        return json_answer({**asdict(found), "policy": policy.name})

    async def drain(self, request: Request) -> Response:
        """Drain nodes: jobs leave them for maintenance. In a dry run, only return the forecast.

        Answer as soon as that is decided; the jobs leave later. Raises BadInputError or UnreachableError for no or
        unknown nodes, and as `_feed`.
        """
        body, state = await read_body(request, DrainRequest, self._body_s), self._shell.machine.state
        if body.dry_run:
            now = await self._shell.read_durable(state.copy)
            return json_answer({"forecast": await self._compute(forecast_drain, now, body.nodes)})
        return await self._request(DrainNodes(body.nodes))

    async def undrain(self, request: Request) -> Response:
        """Allow jobs to use drained nodes again."""
        return await self._request(UndrainNodes((await read_body(request, DrainRequest, self._body_s)).nodes))

    async def forget(self, request: Request) -> Response:
        """Remove a node that will not return."""
        return await self._request(ForgetNode(request.path_params["name"]))

    async def _compute(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Compute something in a thread, after earlier requests. The server handles nodes and jobs meanwhile."""
        async with self._compute_lock:
            return await asyncio.to_thread(work, *args, **kwargs)

    async def _request(self, order: PoolRequest) -> Response:
        """Feed an order to the machine, and return the answer."""
        return await self._feed(order) or json_answer({"ok": True})

    async def _feed(self, order: PoolRequest) -> Response | None:
        """Pass an order to the machine, and return None once its effects are in the store.

        Return an answer 503 if this server no longer leads the pool.

        Raises:
            RefusedError: the machine refuses it; or the store has not answered for `WRITE_S`, and the order takes
                effect later.
            BadInputError, UnreachableError: the machine refuses it.
        """
        self._shell.check_store()
        feeding = asyncio.ensure_future(self._shell.feed(order))
        self._requests.add(feeding)
        feeding.add_done_callback(self._requests.discard)
        # if a thousand nodes connect at once, many of their inputs are written before this one
        if not await wait_while_answered(feeding, lambda: self._shell.unanswered_s, WRITE_S):
            # the first request finds out that the store is unavailable, and its result is not known yet
            feeding.add_done_callback(_retrieve_error)
            raise RefusedError(
                f"the store has not answered for {WRITE_S:g} s, and nothing is decided until it does (training goes "
                "on): the request takes effect then; check the status once the store answers"
            )
        if feeding.result():
            return None
        return error_answer(503, "this server no longer leads the pool: repeat the request")

    def _get_job(self, name: str) -> PooledJob:
        """Return a job by its name.

        Raises:
            UnreachableError: there is none. The message lists the known jobs.
        """
        job = self._shell.machine.state.jobs.get(name)
        if job is None:
            known = ", ".join(sorted(self._shell.machine.state.jobs)) or "none"
            raise UnreachableError(f"there is no job {name!r}: the jobs are {known}")
        return job


def _retrieve_error(feeding: asyncio.Future[bool]) -> None:
    """Mark the error of an abandoned request as retrieved. The shell has reported its own failures."""
    if not feeding.cancelled():
        feeding.exception()


def pool_status(shell: PoolShell) -> dict[str, Any]:
    """Return the status of a pool for users: its nodes with their grants, its jobs, its policy and reserve.

    `events` is the number of the newest event. Names contain units (`_s`).
    """
    state = shell.machine.state
    nodes = [
        {
            "node": node.name,
            "rack": node.rack,
            "zone": node.zone,
            "here": node.name in state.connected,
            "job": grant.job if (grant := state.grants.get(node.name)) else "",
            "grant": grant.number if grant else 0,
            "standby": grant.standby if grant else False,
            "leaving": grant.recalled if grant else False,
            "drained": node.drained,
            "session": node.session,
        }
        for node in sorted(state.nodes.values(), key=lambda one: one.name)
    ]
    jobs = sorted(state.jobs.values(), key=lambda one: one.submission)
    return {
        "pool": state.record.pool,
        "term": state.record.term,
        "policy": state.config.policy.name,
        "reserve": state.reserve,
        "reserve_why": shell.machine.reserve_reason,
        "nodes": nodes,
        "moves_to_come": shell.machine.moves.pending_count,
        "jobs": [_job_status(shell, job) for job in jobs],
        "events": shell.journal.last_seq,
    }


def _job_status(shell: PoolShell, job: PooledJob) -> dict[str, Any]:
    """Return the status of a job for users: its state, nodes, settings, history and measured step times."""
    state = shell.machine.state
    return {
        "job": job.name,
        "submission": job.submission,
        "state": job.user_state,
        "nodes": sorted(grant.node for grant in state.grants_of(job.name) if not grant.standby),
        "standbys": sorted(grant.node for grant in state.grants_of(job.name) if grant.standby),
        "share": job.share,
        "min_nodes": job.spec.nodes_to_begin,
        "max_nodes": job.spec.max_nodes,
        "weight": job.spec.weight,
        "priority": job.spec.priority,
        "preemptible": job.spec.preemptible,
        "script": job.spec.script,
        "workers_per_node": job.spec.workers_per_node,
        "saves": bool(job.spec.checkpoint.dir),
        "submitted_at": job.submitted_at,
        "admitted_at": job.admitted_at,
        "preempted": job.preempted,
        "refuses": state.unfit_nodes(job.name),
        "why": job.why,
        "pace": _step_times(job),
    }


def _step_times(job: PooledJob) -> dict[str, Any] | None:
    """Return a job's step times in seconds by number of nodes, its batch, and its layouts, or None if none is known."""
    pace = job.pace
    if pace is None:
        return None
    step_s = {str(nodes): seconds for nodes, seconds in sorted(pace.step_s.items())}
    known = {"micro_batches": pace.micro_batches, "samples": pace.samples, "flop_per_sample": pace.flop_per_sample}
    layouts = [{"nodes": one.nodes, "layout": str(one.layout), "places": one.layout.places} for one in pace.layouts]
    return {"step_s": step_s, **known, "layouts": layouts}
