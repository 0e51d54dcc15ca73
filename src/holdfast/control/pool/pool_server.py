"""The process of a pool server: one port, one store, the machine of the pool, and one coordinator for each job."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import secrets
import socket
import threading
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterable
from dataclasses import replace
from typing import Any

from prometheus_client import CollectorRegistry, Gauge, generate_latest
from starlette.applications import Starlette
from starlette.routing import WebSocketRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from holdfast.clock import Clock, SystemClock, until_mark
from holdfast.control.coordinator.settings import is_loopback
from holdfast.control.file_limit import raise_file_limit
from holdfast.control.pool.job_coordinators import JobCoordinators
from holdfast.control.pool.leftovers import RecordSweeper, job_key
from holdfast.control.pool.next_plans_process import make_foreseer
from holdfast.control.pool.pool_api import PoolApi
from holdfast.control.pool.pool_shell import PoolRecordKeeper, PoolShell
from holdfast.control.pool.settings import PoolSettings
from holdfast.control.pool_client import PoolClient
from holdfast.control.processes import ending_signals
from holdfast.control.registry import JobEntry, register, unregister
from holdfast.control.serving.agent_channel import AgentChannel
from holdfast.control.serving.http import HANDLERS, TokenCheck, TokenGate, error_answer
from holdfast.control.serving.listening import listener_url, open_listener, steady_time
from holdfast.control.serving.predecessor import check_predecessor_ended
from holdfast.control.serving.stored_record import outdated_store
from holdfast.control.serving.web import WebServer
from holdfast.control.store.shared import SharedStore
from holdfast.control.store.store_choice import open_store
from holdfast.coordination.inputs import Tick
from holdfast.coordination.pool.inputs import JobConnected, JobMessage
from holdfast.coordination.pool.pool import Pool
from holdfast.counted_log import CountedLog
from holdfast.errors import BadInputError, HoldfastError, OutdatedStoreError
from holdfast.observability.journal import Journal
from holdfast.observability.journal_file import PoolJournal
from holdfast.protocol.messages.pool import FromNode, PoolHello
from holdfast.protocol.pool.record import PoolRecord
from holdfast.protocol.pool.sharing import JobState

#: seconds between two ticks of the machine
TICK_S = 0.2

_log = logging.getLogger("holdfast.pool")


def run_pool(settings: PoolSettings, on_ready: Callable[[JobEntry], None] | None = None) -> int:
    """Run a pool server until a signal ends it, and return the exit code. Its jobs train on.

    Args:
        settings: of the pool.
        on_ready: as of `serve_pool`.

    Raises:
        BadInputError: the settings, the port, the store or a journal cannot be used; nothing was touched.
        SupersededError: another server leads this pool.
        HoldfastError: it cannot continue, for example because its disk fails.
    """
    raise_file_limit()
    return asyncio.run(serve_pool(settings, on_ready=on_ready))


async def serve_pool(
    settings: PoolSettings, *, clock: Clock | None = None, on_ready: Callable[[JobEntry], None] | None = None
) -> int:
    """Check the settings, take over the pool, and serve it in this event loop until a signal. Return the exit code.

    Args:
        settings: of the pool.
        clock: the clock, or None for the system's.
        on_ready: called with the address and token once nodes and commands can connect.

    Raises:
        BadInputError, SupersededError, HoldfastError: as `run_pool`.
    """
    settings.check()
    settings = replace(settings, token=settings.token or secrets.token_urlsafe(32))
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(open_listener(settings.host, settings.port))
        store = stack.enter_context(contextlib.closing(SharedStore(open_store(settings.store))))
        keeper = PoolRecordKeeper(store)
        journal = stack.enter_context(contextlib.closing(_open_journal(settings, keeper.record)))
        server = _PoolServer(settings, listener, store, keeper, journal, clock or SystemClock())
        await server.check_predecessor_ended()
        async with server.registered() as entry:
            if on_ready is not None:
                on_ready(entry)
            return await server.run()


def _open_journal(settings: PoolSettings, record: PoolRecord | None) -> Journal:
    """Open the journal of the pool, and check it against the record. Without a folder, it is in memory.

    Raises:
        BadInputError: the folder cannot be used, or contains events of another pool.
        OutdatedStoreError: the store is older than the pool.
    """
    if settings.folder is None:
        return Journal()
    try:
        settings.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInputError(f"the folder {settings.folder} cannot be made: {error.strerror}") from None
    path = settings.folder / "pool.events.jsonl"
    journal = PoolJournal(path)
    known = record.term if record is not None else 0
    if (journal.last_seq and journal.pool != settings.name) or journal.term > known:
        journal.close()
        raise BadInputError(
            f"the events file {path} holds events of pool {journal.pool!r}, of server {journal.term}; the store "
            f"{settings.store} knows of {known} servers of {settings.name!r}: give another folder, or remove it"
        )
    if record is not None and journal.last_seq > record.seq:
        journal.close()
        newer = f"it ends with event {record.seq}, and {path} with event {journal.last_seq}"
        raise OutdatedStoreError(outdated_store("pool", settings.store, newer))
    return journal


class _PoolServer:
    """The assembled parts of one pool server."""

    def __init__(
        self,
        settings: PoolSettings,
        listener: socket.socket,
        store: SharedStore,
        keeper: PoolRecordKeeper,
        journal: Journal,
        clock: Clock,
    ) -> None:
        assert settings.token is not None
        self._settings = settings
        self._token = settings.token
        self._unauthenticated_log = CountedLog(_log, clock.monotonic)
        self._web = WebServer(listener, self._unauthenticated_log, tls_cert=settings.tls_cert, tls_key=settings.tls_key)
        self._url = listener_url(listener, tls=settings.tls_cert is not None)
        #: URL of the previous server, or "" without one
        self._predecessor_url = keeper.record.url if keeper.record is not None else ""
        self._entry = JobEntry(
            url=self._url,
            token=self._token,
            job="",
            pool=settings.name,
            pid=os.getpid(),
            tls_ca=str(settings.tls_cert.absolute()) if settings.tls_cert else "",
        )
        now = steady_time(clock)
        self._exit_code: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._tasks: set[asyncio.Task[object]] = set()
        self._jobs = JobCoordinators(
            settings,
            store,
            now,
            self._url,
            on_linked=self._on_linked,
            on_stand=self._on_job_state,
            nodes=lambda: len(self._shell.machine.state.nodes),
        )
        config = replace(settings.config, identity=secrets.token_hex(8))
        pool = Pool(config, keeper.record, journal.last_seq)
        self._foreseer = make_foreseer(lambda found: self._start_task(self._shell.feed(found)))
        self._shell = PoolShell(
            pool, keeper, journal, self._jobs, on_question=self._foreseer.start, now=now, on_failure=self._on_failure
        )
        self._api = PoolApi(self._shell, self._jobs, self._metrics)
        self._sweeper = RecordSweeper(store, known=self._record_keys, used=self._jobs.used_keys)

    async def check_predecessor_ended(self) -> None:
        """Raise BadInputError if the previous server still serves."""
        settings = self._settings
        await check_predecessor_ended(
            PoolClient, settings.name, self._predecessor_url, self._entry, settings.registry, "pool"
        )

    @contextlib.asynccontextmanager
    async def registered(self) -> AsyncGenerator[JobEntry]:
        """List the pool for the commands of this machine while inside, and take it over in the store.

        Yield its address and token.
        """
        settings, entry = self._settings, self._entry
        with contextlib.ExitStack() as stack:
            # The listing comes first: if it fails, the store must not have changed.
            if settings.registry is not None:
                stack.callback(unregister, register(settings.registry, entry))
            pool = self._shell.machine
            await self._shell.start_machine(lambda: pool.start(self._shell.now(), self._url, os.getpid()))
            yield entry

    async def run(self) -> int:
        """Serve nodes, jobs and users until a signal ends this server. Close everything, and return the exit code.

        Raises:
            HoldfastError: the shell or a task has failed, so that it cannot continue.
        """
        serving = asyncio.create_task(self._serve())
        ticking = asyncio.create_task(self._tick())
        tidying = asyncio.create_task(self._sweeper.run())
        _log.info("the pool listens on %s (its name: %s)", self._url, self._settings.name)
        try:
            with self._handle_signals():
                await asyncio.wait((self._exit_code, serving, ticking), return_when=asyncio.FIRST_COMPLETED)
        finally:
            await self._foreseer.close()
            await self._shell.stop()
            await self._jobs.stop()
            self._shell.journal.close()
            self._web.stop()
            ticking.cancel()
            tidying.cancel()
            await asyncio.gather(serving, ticking, tidying, return_exceptions=True)
        return self._outcome(serving, ticking)

    def _outcome(self, *tasks: asyncio.Task[None]) -> int:
        """Return the exit code of the signal, or raise the failure of the shell, of a task, or of the web server."""
        if self._exit_code.done():
            return self._exit_code.result()
        for task in tasks:
            if not task.cancelled():
                task.result()
        raise HoldfastError("the pool's web server ended unexpectedly")

    # events

    async def _tick(self) -> None:
        """Feed a tick to the machine every `TICK_S`, forever."""
        while True:
            await asyncio.sleep(until_mark(self._shell.now(), TICK_S))
            await self._shell.feed(Tick())

    def _record_keys(self) -> list[str]:
        """Return the keys of the records of all jobs that the pool knows."""
        return [job_key(job.name, job.submission) for job in self._shell.machine.state.jobs.values()]

    def _on_linked(self, job: str) -> None:
        self._start_task(self._shell.feed(JobConnected(job)))

    def _on_job_state(self, job: str, stands: JobState) -> None:
        self._start_task(self._shell.feed(JobMessage(job, stands)))

    def _start_task(self, work: Coroutine[Any, Any, object]) -> None:
        """Run a coroutine in the background.

        Its errors of holdfast are dropped, because the shell reports its own failures.
        """

        async def done() -> None:
            with contextlib.suppress(HoldfastError):
                await work

        task = asyncio.get_running_loop().create_task(done())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _on_failure(self, error: BaseException) -> None:
        if not self._exit_code.done():
            self._exit_code.set_exception(error)

    @contextlib.contextmanager
    def _handle_signals(self) -> Generator[None]:
        """While inside, let the ending signals set the exit code. Without effect outside the main thread."""
        loop = asyncio.get_running_loop()
        main = threading.current_thread() is threading.main_thread()
        codes = ending_signals() if main else {}
        for number, code in codes.items():
            loop.add_signal_handler(number, self._on_signal, code)
        try:
            yield
        finally:
            for number in codes:
                loop.remove_signal_handler(number)

    def _on_signal(self, code: int) -> None:
        if not self._exit_code.done():
            self._exit_code.set_result(code)

    # requests

    async def _serve(self) -> None:
        """Serve users, the pool's nodes, and the coordinators of its jobs, until the web server is stopped."""
        channel = AgentChannel(self._shell, messages=FromNode, hello=PoolHello)
        own = Starlette(
            routes=[*self._api.routes(), WebSocketRoute("/agent", channel.serve)], exception_handlers=HANDLERS
        )
        gate = TokenCheck(
            token=self._token,
            on_authenticated=self._web.on_authenticated,
            log=self._unauthenticated_log,
            open_metrics=is_loopback(self._settings.host),
            accepts_other=self._is_job_token,
        )
        await self._web.serve(TokenGate(_Router(own, self._jobs, gate), gate), gate.has_access)

    def _is_job_token(self, header: bytes) -> bool:
        """Return whether this authorization header belongs to any job. `_Router` checks to which."""
        return self._jobs.find_by_digest(hashlib.sha256(header).digest()) is not None

    def _metrics(self) -> bytes:
        """Return the numbers of nodes (away, free or granted) and of jobs by state, in Prometheus' text format."""
        state, registry = self._shell.machine.state, CollectorRegistry()
        nodes = Gauge(
            "holdfast_pool_nodes", "Nodes of the pool, by whether a job has them.", ["state"], registry=registry
        )
        jobs = Gauge("holdfast_pool_jobs", "Jobs of the pool, by state.", ["state"], registry=registry)
        for name, count in Counter(
            _node_state(name in state.connected, name in state.grants) for name in state.nodes
        ).items():
            nodes.labels(name).set(count)
        for name, count in Counter(job.state for job in state.jobs.values()).items():
            jobs.labels(name).set(count)
        return generate_latest(registry)


def _node_state(here: bool, granted: bool) -> str:
    """Return the state of a node in the metrics: "away", "granted" or "free"."""
    if not here:
        return "away"
    return "granted" if granted else "free"


class _Router:
    """Routes requests below /jobs/NAME/job to that job's coordinator.

    It accepts the token of the job, or of the pool.
    """

    def __init__(self, own: ASGIApp, jobs: JobCoordinators, gate: TokenCheck) -> None:
        self._own = own
        self._jobs = jobs
        self._gate = gate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward a request to a job's coordinator, or handle a request to the pool.

        Answer 403 to a token of another job.
        """
        path: str = scope.get("path", "")
        parts = path.split("/", 4)
        job = self._jobs.find_by_digest(hashlib.sha256(_authorization(scope["headers"])).digest())
        if len(parts) > 4 and parts[1] == "jobs" and parts[3] == "job":
            if job in (None, parts[2]) or self._gate.has_own_token(scope["headers"]):
                await self._forward(parts[2], "/" + parts[4], scope, receive, send)
                return
        elif self._gate.has_own_token(scope["headers"]) or (path == "/metrics" and job is None):
            await self._own(scope, receive, send)
            return
        await _refuse(403, "this token opens another job", scope, receive, send)

    async def _forward(self, name: str, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request to a job's coordinator, with this path. Answer 404 if none runs."""
        app = self._jobs.app(name)
        if app is None:
            await _refuse(404, f"job {name} has no coordinator now", scope, receive, send)
            return
        await app({**scope, "path": path, "raw_path": path.encode()}, receive, send)


async def _refuse(status: int, why: str, scope: Scope, receive: Receive, send: Send) -> None:
    # A WebSocket that is closed before the accept always gets the answer 403, whatever is wrong. An agent takes that
    # for a wrong token, and ends.
    await error_answer(status, why)(scope, receive, send)


def _authorization(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    return next((value for name, value in headers if name == b"authorization"), b"")
