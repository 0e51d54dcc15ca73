"""What people and tools ask a pool over HTTP, on its nodes' port."""

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
from holdfast.control.pool.handed_in import check_handed_in
from holdfast.control.pool.job_coordinators import JobCoordinators
from holdfast.control.pool.pool_shell import PoolShell
from holdfast.control.serving.http import body_of, error_answer, json_answer, number_of
from holdfast.control.serving.patience import done_while_answered
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
from holdfast.coordination.pool.places.compacting import RACK_WORTH_S, compact
from holdfast.coordination.pool.places.moving import build_occupancy
from holdfast.coordination.pool.what_if import AddJob, AddNodes, Change, LoseNode, compute_what_if
from holdfast.errors import BadInputError, RefusedError, UnreachableError
from holdfast.protocol.job_spec import JobSpec
from holdfast.protocol.pool.launch import PooledLaunch
from holdfast.protocol.pool.record import PooledJob

P = ParamSpec("P")
T = TypeVar("T")

#: a write of the store that takes longer is not waited for: it is away
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
    """Body of POST /whatif: one of these."""

    lose: Annotated[str, Meta(max_length=64)] = ""
    add: Annotated[int, Meta(ge=0, le=1 << 16)] = 0
    submit: JobSpec | None = None

    @property
    def change(self) -> Change:
        """What is asked about.

        Raises:
            BadInputError: nothing, or several things at once.
        """
        asked: list[Change] = [LoseNode(self.lose)] if self.lose else []
        asked += [AddNodes(self.add)] if self.add else []
        asked += [AddJob(self.submit)] if self.submit is not None else []
        if len(asked) != 1:
            raise BadInputError("give one of lose, add and submit")
        return asked[0]


class PoolApi:
    """The pool's own routes."""

    def __init__(
        self, shell: PoolShell, jobs: JobCoordinators, metrics: Callable[[], bytes], body_s: float = 10.0
    ) -> None:
        self._shell = shell
        self._jobs = jobs
        self._metrics = metrics
        self._body_s = body_s
        self._feeding: set[asyncio.Future[bool]] = set()
        #: what is reckoned beside the server takes memory, and a core: one at a time
        self._reckoning = asyncio.Lock()

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
        """Who is there, and whose each node is."""
        return json_answer(await self._shell.between_turns(lambda: pool_status(self._shell)))

    async def events(self, request: Request) -> Response:
        """Events above `after`, as JSON lines; where there are none yet, wait up to `wait` seconds for one."""
        after, wait_s = int(number_of(request, "after", 0)), min(number_of(request, "wait", 0.0), MAX_WAIT_S)
        await self._shell.journal.wait_beyond(after, wait_s)
        lines = self._shell.journal.read(after)
        return Response(b"".join(lines), media_type=_JSON_LINES, headers={END_HEADER: "0"})

    async def metrics(self, request: Request) -> Response:
        """Prometheus' text format."""
        return Response(await self._shell.between_turns(self._metrics), media_type="text/plain; version=0.0.4")

    async def jobs(self, request: Request) -> Response:
        """All jobs, those that are over last."""
        return json_answer({"jobs": (await self._shell.between_turns(lambda: pool_status(self._shell)))["jobs"]})

    async def job(self, request: Request) -> Response:
        """One job, and what would let it begin."""
        name = request.path_params["name"]
        told = await self._shell.between_turns(lambda: self._told(name))
        return json_answer(told)

    def _told(self, name: str) -> dict[str, Any]:
        machine = self._shell.machine
        kept_back = {"nodes": machine.state.reserve, "why": machine.reserve_reason}
        told = {"would": machine.explain(name), "reserve": kept_back, "now": machine.state.now}
        job = self._known(name)
        return {**_job(self._shell, job), **told, "log_dir": self._jobs.log_folder(job)}

    async def submit(self, request: Request) -> Response:
        """Hand in a job; the answer is its number."""
        spec = await body_of(request, JobSpec, self._body_s)
        check_handed_in(spec)
        if answer := await self._fed(SubmitJob(spec)):
            return answer
        return json_answer({"submission": self._known(spec.name).submission})

    async def launch(self, request: Request) -> Response:
        """What a node needs to start what belongs to a grant of this job."""
        job = self._jobs.hosted(request.path_params["name"])
        if job is None:
            raise UnreachableError(f"job {request.path_params['name']} has no nodes now")
        token = self._jobs.token(job.name, job.submission)
        address = f"/jobs/{job.name}/job"
        return json_answer(PooledLaunch(submission=job.submission, spec=job.spec, token=token, address=address))

    async def stop(self, request: Request) -> Response:
        """End a job."""
        body = await body_of(request, StopRequest, self._body_s)
        why = {"why": body.why} if body.why else {}
        return await self._done(StopPooled(request.path_params["name"], body.now, **why))

    async def suspend(self, request: Request) -> Response:
        """Have a job saved, and leave its nodes."""
        body = await body_of(request, SuspendRequest, self._body_s)
        return await self._done(SuspendJob(request.path_params["name"], body.force))

    async def resume(self, request: Request) -> Response:
        """Let a suspended job go on."""
        return await self._done(ResumeJob(request.path_params["name"]))

    async def update(self, request: Request) -> Response:
        """Change what a job asks for."""
        body = await body_of(request, UpdateRequest, self._body_s)
        return await self._done(UpdateJob(request.path_params["name"], body.changes))

    async def compact(self, request: Request) -> Response:
        """Move jobs together, where that is worth its cost; the answer is what moves."""
        body, state = await body_of(request, CompactRequest, self._body_s), self._shell.machine.state
        at = await self._shell.between_turns(lambda: build_occupancy(state))
        found = await self._reckoned(compact, at, body.worth_s)
        if not body.dry_run and (answer := await self._fed(MoveJobs(found.moves))):
            return answer
        return json_answer(found)

    async def what_if(self, request: Request) -> Response:
        """The plan that would follow a change."""
        change, machine = (await body_of(request, WhatIfRequest, self._body_s)).change, self._shell.machine
        now, then = await self._shell.between_turns(lambda: machine.preview_change(change))
        policy = machine.config.policy
        found = await self._reckoned(compute_what_if, policy, now, then)
        return json_answer({**asdict(found), "policy": policy.name})

    async def drain(self, request: Request) -> Response:
        """Nodes are looked after; or what would come of that."""
        body, state = await body_of(request, DrainRequest, self._body_s), self._shell.machine.state
        if body.dry_run:
            now = await self._shell.between_turns(state.copy)
            return json_answer({"forecast": await self._reckoned(forecast_drain, now, body.nodes)})
        return await self._done(DrainNodes(body.nodes))

    async def undrain(self, request: Request) -> Response:
        """Nodes may be given to jobs again."""
        return await self._done(UndrainNodes((await body_of(request, DrainRequest, self._body_s)).nodes))

    async def forget(self, request: Request) -> Response:
        """A node does not come back."""
        return await self._done(ForgetNode(request.path_params["name"]))

    async def _reckoned(self, reckon: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Reckon something in a thread, after what others have asked for: nodes and jobs are heard meanwhile."""
        async with self._reckoning:
            return await asyncio.to_thread(reckon, *args, **kwargs)

    async def _done(self, asked: PoolRequest) -> Response:
        return await self._fed(asked) or json_answer({"ok": True})

    async def _fed(self, asked: PoolRequest) -> Response | None:
        """Have the machine do it; return the answer where it cannot."""
        self._shell.check_store()
        feeding = asyncio.ensure_future(self._shell.feed(asked))
        self._feeding.add(feeding)
        feeding.add_done_callback(self._feeding.discard)
        # (where a thousand nodes come at once, many others' are written down before it)
        if not await done_while_answered(feeding, lambda: self._shell.unanswered_s, WRITE_S):
            # (whoever asks first finds out that the store is away: it is not in our hands any more what becomes of it)
            feeding.add_done_callback(_heard_of)
            raise RefusedError(
                f"the store has not answered for {WRITE_S:g} s, and nothing is decided until it does (training goes "
                "on): what you have asked for is done then; look once it is there"
            )
        if feeding.result():
            return None
        return error_answer(503, "this server does not lead the pool any more: ask again")

    def _known(self, name: str) -> PooledJob:
        job = self._shell.machine.state.jobs.get(name)
        if job is None:
            known = ", ".join(sorted(self._shell.machine.state.jobs)) or "none"
            raise UnreachableError(f"there is no job {name!r}: the jobs are {known}")
        return job


def _heard_of(feeding: asyncio.Future[bool]) -> None:
    """Nobody waits for a request any more; what breaks the shell it has told itself."""
    if not feeding.cancelled():
        feeding.exception()


def pool_status(shell: PoolShell) -> dict[str, Any]:
    """Return what users are told of a pool: names carry units (`_s`)."""
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
        "jobs": [_job(shell, job) for job in jobs],
        "events": shell.journal.last_seq,
    }


def _job(shell: PoolShell, job: PooledJob) -> dict[str, Any]:
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
        "pace": _pace(job),
    }


def _pace(job: PooledJob) -> dict[str, Any] | None:
    """Return how long a job's steps take, by its number of nodes, as far as that is known."""
    pace = job.pace
    if pace is None:
        return None
    step_s = {str(nodes): seconds for nodes, seconds in sorted(pace.step_s.items())}
    known = {"micro_batches": pace.micro_batches, "samples": pace.samples, "flop_per_sample": pace.flop_per_sample}
    layouts = [{"nodes": one.nodes, "layout": str(one.layout), "places": one.layout.places} for one in pace.layouts]
    return {"step_s": step_s, **known, "layouts": layouts}
