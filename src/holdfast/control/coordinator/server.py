"""The coordinator's process: one port, one loop, one machine.

Everything that can be wrong is found out before anything is touched: settings, port, store, journal, in this order.
Then the record is taken over by compare-and-swap, and only then does anybody hear of this coordinator.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import logging
import os
import secrets
import signal
import socket
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from functools import partial
from typing import Any

from holdfast.clock import Clock, SystemClock
from holdfast.control.coordinator.agent_channel import AgentChannel
from holdfast.control.coordinator.alerts import Alerts
from holdfast.control.coordinator.doorkeeper import check_room
from holdfast.control.coordinator.http_api import HttpApi, NodeRequests, TokenCheck, build_app
from holdfast.control.coordinator.searcher import Searcher
from holdfast.control.coordinator.settings import ServerSettings
from holdfast.control.coordinator.shell import RecordKeeper, Shell
from holdfast.control.coordinator.status import slowness_of, status_of
from holdfast.control.coordinator.web import WebServer
from holdfast.control.file_limit import raise_file_limit
from holdfast.control.registry import JobEntry, register, unregister
from holdfast.control.store.choose import open_store
from holdfast.control.store.interface import Store, StoreError
from holdfast.coordination.coordinator import Coordinator
from holdfast.coordination.inputs import Drain, MoveNodes, Shutdown, Tick
from holdfast.coordination.nodes.foresight import foresee
from holdfast.counted_log import CountedLog
from holdfast.errors import EXIT_AFTER_SIGNAL, EXIT_FAILED, BadInputError, HoldfastError, SupersededError
from holdfast.observability.journal import Journal
from holdfast.observability.journal_file import FileJournal
from holdfast.observability.metrics import Metrics
from holdfast.protocol.messages.forecast import MoveForecast
from holdfast.protocol.record import Record

__all__ = ["ServerSettings", "run_coordinator", "serve"]

#: How long agents may take to leave once the job is over.
FAREWELL_S = 3.0
_FAREWELL_POLL_S = 0.02

_log = logging.getLogger("holdfast.coordinator")


def run_coordinator(settings: ServerSettings) -> int:
    """Run a coordinator until its job is over; return the exit code.

    Raises:
        BadInputError: the settings, the port, the store or the events file cannot be used; nothing was touched.
        HoldfastError: it cannot go on: superseded, or its disk fails.
    """
    raise_file_limit()
    return asyncio.run(serve(settings))


async def serve(
    settings: ServerSettings, *, clock: Clock | None = None, on_ready: Callable[[JobEntry], None] | None = None
) -> int:
    """Run a coordinator in this loop until its job is over; return the exit code.

    Args:
        on_ready: called once agents and commands can connect, with what they need for it.

    Raises:
        BadInputError, HoldfastError: as `run_coordinator`.
    """
    settings.check()
    spec = settings.config.spec
    if warning := check_room(spec.nodes_to_begin, spec.max_nodes):
        _log.warning("%s", warning)
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(bind(settings.host, settings.port))
        store = stack.enter_context(contextlib.closing(opened_store(settings)))
        keeper = RecordKeeper(store, settings.job)
        journal, metrics = open_journal(settings, keeper)
        stack.enter_context(contextlib.closing(journal))
        server = _Server(settings, listener, keeper, (journal, metrics), clock or SystemClock())
        async with server.registered() as entry:
            if on_ready is not None:
                on_ready(entry)
            return await server.run()


def opened_store(settings: ServerSettings, opener: Callable[[str], Store] = open_store) -> Store:
    """Open the job's store.

    Raises:
        BadInputError: it cannot be used, or not now.
        StoreError: not now, and this coordinator follows one that died: another one tries again.
    """
    try:
        return opener(settings.store)
    except StoreError as error:
        if settings.config.takeover:
            raise
        raise BadInputError(f"{error}; wait for it, or give another store") from None


def bind(host: str, port: int) -> socket.socket:
    """Return a listening socket; nobody else can have the port from here on.

    Raises:
        BadInputError: the port is in use, or the address is none of this machine's.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:  # (the latter of what can be no host's name)
        raise BadInputError(
            f"the address {host} cannot be listened on: {getattr(error, 'strerror', error)}; give --listen another"
        ) from None
    family, _, _, _, address = found[0]
    # asyncio sets TCP_NODELAY only on sockets whose protocol number says TCP: without it a Stop waits for an ACK.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        listener.bind(address)
        listener.listen(4096)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise BadInputError(
            f"port {port} on {host} cannot be listened on: {error.strerror}; give another, or 0 for a free one"
        ) from None
    return listener


def open_journal(settings: ServerSettings, keeper: RecordKeeper) -> tuple[Journal, Metrics]:
    """Open the journal, which must fit the record: a new job does not go on in the events of another.

    Returns:
        The journal, and the metrics that go on from its events.

    Raises:
        BadInputError: the file cannot be used, or holds events of another job or run.
    """
    path, metrics = settings.journal_path, Metrics(settings.job)
    if path is None:
        return Journal(), metrics
    journal = FileJournal(path, told=metrics.observe)
    why = _misfit(journal, keeper.record, settings)
    if why:
        journal.close()
        raise BadInputError(f"the events file {path} {why}: give another file, or remove it")
    return journal, metrics


def _misfit(journal: FileJournal, record: Record | None, settings: ServerSettings) -> str:
    """Return in what a journal is not that of the job in the store, "" where it is."""
    if journal.last_seq and journal.job != settings.job:
        return f"holds events of job {journal.job!r}, not of {settings.job!r}"
    if record is None and (journal.last_seq or journal.damaged):
        return f"holds {journal.last_seq} events of an earlier job, of which the store {settings.store} knows nothing"
    # A term is in the record before it is in any event: these events are of a run that the store has never seen.
    if record is not None and journal.term > record.term:
        return f"holds events of coordinator {journal.term}, the store {settings.store} knows of {record.term} only"
    return ""


class _Server:
    """The parts of one coordinator, put together."""

    def __init__(
        self,
        settings: ServerSettings,
        listener: socket.socket,
        keeper: RecordKeeper,
        books: tuple[Journal, Metrics],
        clock: Clock,
    ) -> None:
        self._settings = settings
        journal, self._metrics = books
        self._strangers = CountedLog(_log, clock.monotonic)
        self._web = WebServer(listener, settings, self._strangers)
        self._journal = journal
        self._token = settings.token or secrets.token_urlsafe(32)
        self._url = _url(settings, listener)
        self._now = steady_time(clock)
        self._over: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._signals = 0
        secret = settings.config.secret or hashlib.sha256(b"holdfast state transfer " + self._token.encode()).digest()
        config = dataclasses.replace(settings.config, secret=secret)
        self._coordinator = Coordinator(config, journal.position, keeper.record)
        self._metrics.slowness = partial(slowness_of, self._coordinator)
        self._alerts = Alerts(settings.config.spec.output.alert)
        self._searcher = Searcher(lambda planned: self._soon(self._shell.feed(planned)))
        self._shell = Shell(
            self._coordinator,
            keeper,
            journal,
            self._metrics,
            now=self._now,
            on_request=self._alerts.tell,
            on_plan=self._searcher.begin,
            on_end=self._end,
            on_failure=self._fail,
        )
        self._tasks: set[asyncio.Task[object]] = set()
        self._requests = NodeRequests(launched=settings.launched)
        self._api = HttpApi(self._shell, self._status, self._foresee, self._requests, settings.body_s)

    @contextlib.asynccontextmanager
    async def registered(self) -> AsyncGenerator[JobEntry]:
        """Be listed for the commands of this machine, and take over the job."""
        directory, cert = self._settings.registry, self._settings.tls_cert
        entry = JobEntry(
            url=self._url,
            token=self._token,
            job=self._settings.job,
            pid=os.getpid(),
            tls_ca=str(cert.absolute()) if cert else "",
        )
        with contextlib.ExitStack() as stack:
            # First the list: it may be refused, and then the store must not have changed.
            if directory is not None:
                stack.callback(unregister, register(directory, entry))
            await self._shell.start(self._url, os.getpid(), self._settings.checkpoints)
            yield entry

    async def run(self) -> int:
        """Serve until the job is over or this coordinator cannot go on."""
        serving = asyncio.create_task(self._serve())
        ticking = asyncio.create_task(self._tick())
        _log.info("job %s: the coordinator listens on %s", self._settings.job, self._url)
        try:
            with self._signals_handled():
                await asyncio.wait((self._over, serving, ticking), return_when=asyncio.FIRST_COMPLETED)
                if self._over.done() and self._over.exception() is None:
                    await self._farewell()
        finally:
            await self._shell.stop()
            await self._searcher.close()
            await self._alerts.close(FAREWELL_S)
            self._journal.close()
            self._requests.wake()
            if self._settings.launched and not self._api.failed and not serving.done():
                await self._last_events_read()
            self._web.stop()
            ticking.cancel()
            await asyncio.gather(serving, ticking, return_exceptions=True)
        return self._outcome(serving, ticking)

    def _outcome(self, serving: asyncio.Task[None], ticking: asyncio.Task[None]) -> int:
        if self._over.done():
            error = self._over.exception()
            if isinstance(error, SupersededError):
                _log.error("this coordinator stops: %s", error)
                return EXIT_FAILED
            return self._over.result()
        for task in (serving, ticking):
            if not task.cancelled():
                task.result()
        raise HoldfastError("the coordinator's web server ended by itself")

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(self._settings.config.tick_s)
            await self._shell.feed(Tick())

    async def _farewell(self) -> None:
        """Let the agents leave; their last words still count. Where the job had ended before, they come first."""
        deadline = self._now() + FAREWELL_S
        before, absences = self._signals, self._coordinator.parts.absences
        while (self._shell.connections or absences.promised) and self._now() < deadline and self._signals == before:
            await asyncio.sleep(_FAREWELL_POLL_S)

    async def _last_events_read(self) -> None:
        """Stay until the follower knows how the job ended: it may be between two polls, or not yet have begun."""
        _log.info("job %s is over: waiting until its events are read to the last", self._settings.job)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._api.read_to_the_end.wait(), FAREWELL_S)

    def _soon(self, work: Coroutine[Any, Any, object]) -> None:
        """Do something beside all else."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _end(self, exit_code: int) -> None:
        if not self._over.done():
            self._over.set_result(exit_code)

    def _fail(self, error: BaseException) -> None:
        self._api.failed = not self._over.done()
        if self._over.done():
            _log.error("the coordinator failed while the job was ending", exc_info=error)
        else:
            self._over.set_exception(error)

    @contextlib.contextmanager
    def _signals_handled(self) -> Generator[None]:
        loop = asyncio.get_running_loop()
        main = threading.current_thread() is threading.main_thread()
        numbers = (signal.SIGINT, signal.SIGTERM) if main else ()
        for number in numbers:
            loop.add_signal_handler(number, self._signalled, number)
        try:
            yield
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)

    def _signalled(self, number: signal.Signals) -> None:
        """End the job, saved at the first signal; a launcher has had it saved by the time it ends its coordinator."""
        self._signals += 1
        save = self._signals == 1 and not self._settings.launched
        if save and self._coordinator.record.saves:
            _log.info("job %s is saved, then it ends; another signal ends it at once", self._settings.job)
        why = f"the coordinator was ended by {number.name}"
        self._soon(self._shell.feed(Shutdown(EXIT_AFTER_SIGNAL[number.name], why, save)))

    async def _serve(self) -> None:
        """Serve agents, people and tools until the web server is stopped."""
        gate = TokenCheck(
            token=self._token, known=self._web.known, log=self._strangers, open_metrics=self._settings.loopback
        )
        await self._web.serve(build_app(self._api, AgentChannel(self._shell), gate), gate.shown)

    async def _status(self) -> dict[str, Any]:
        job = await self._shell.between_turns(lambda: status_of(self._coordinator, self._metrics.ledger, self._now()))
        return {**job, "events": self._journal.last_seq, "url": self._url, "coordinator_pid": os.getpid()}

    async def _foresee(self, asked: Drain | MoveNodes) -> list[MoveForecast]:
        """Say what would come of asking nodes to leave, or to move."""
        parts = self._coordinator.parts
        if isinstance(asked, Drain):
            return await self._shell.between_turns(lambda: foresee(parts, asked.nodes))
        return await self._shell.between_turns(lambda: foresee(parts, asked.nodes, asked.to, stays=True))


def steady_time(clock: Clock) -> Callable[[], float]:
    """Return unix time that follows the monotonic clock: one time for leases and events, which never steps."""
    offset = clock.time() - clock.monotonic()
    return lambda: clock.monotonic() + offset


def _url(settings: ServerSettings, listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = socket.gethostname()
    scheme = "https" if settings.tls_cert else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
