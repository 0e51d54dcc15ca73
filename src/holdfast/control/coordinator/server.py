"""The process of a coordinator: one port, one event loop, one machine.

It checks everything before it touches anything: settings, port, store, journal, in this order. Then it takes over the
record by compare-and-swap, and only then announces itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import socket
import threading
from collections.abc import AsyncGenerator, Callable, Generator

from holdfast.clock import Clock, SystemClock
from holdfast.control.client import CoordinatorClient
from holdfast.control.coordinator.job_host import JobHost
from holdfast.control.coordinator.job_identity import checkpoint_lock, is_running, with_identity
from holdfast.control.coordinator.job_journal import lags_behind, open_journal
from holdfast.control.coordinator.settings import ServerSettings
from holdfast.control.coordinator.shell import RecordKeeper
from holdfast.control.file_limit import raise_file_limit
from holdfast.control.processes import ending_signals
from holdfast.control.registry import JobEntry, register, unregister
from holdfast.control.serving.connection_limits import check_room
from holdfast.control.serving.http import TokenCheck, TokenGate
from holdfast.control.serving.listening import listener_url, open_listener, steady_time
from holdfast.control.serving.predecessor import check_predecessor_ended
from holdfast.control.serving.web import WebServer
from holdfast.control.store.interface import Store, StoreError
from holdfast.control.store.store_choice import open_store
from holdfast.counted_log import CountedLog
from holdfast.errors import (
    EXIT_AFTER_SIGNAL,
    EXIT_FAILED,
    BadInputError,
    HoldfastError,
    SupersededError,
)
from holdfast.observability.journal import Journal
from holdfast.observability.metrics import Metrics
from holdfast.protocol.events import AnyEvent

__all__ = ["ServerSettings", "run_coordinator", "serve"]

_log = logging.getLogger("holdfast.coordinator")


def run_coordinator(
    settings: ServerSettings,
    *,
    on_ready: Callable[[JobEntry], None] | None = None,
    on_event: Callable[[AnyEvent], None] = lambda _: None,
) -> int:
    """Run a coordinator until its job is over, and return the exit code.

    Args:
        settings: of the coordinator.
        on_ready: as of `serve`.
        on_event: as of `serve`.

    Raises:
        BadInputError: the settings, the port, the store or the events file cannot be used; nothing was touched.
        HoldfastError: it cannot continue: superseded, or its disk fails.
    """
    raise_file_limit()
    return asyncio.run(serve(settings, on_ready=on_ready, on_event=on_event))


async def serve(
    settings: ServerSettings,
    *,
    clock: Clock | None = None,
    on_ready: Callable[[JobEntry], None] | None = None,
    on_event: Callable[[AnyEvent], None] = lambda _: None,
) -> int:
    """Check everything, take over the job, and run its coordinator in this event loop until the job is over.

    Return the exit code.

    Args:
        settings: of the coordinator.
        clock: the clock, or None for the system's.
        on_ready: called with the address and token once agents and commands can connect.
        on_event: called with each new event.

    Raises:
        BadInputError, HoldfastError: as `run_coordinator`.
    """
    settings.check()
    spec = settings.config.spec
    if warning := check_room(spec.nodes_to_begin, spec.max_nodes):
        _log.warning("%s", warning)
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(open_listener(settings.host, settings.port))
        store = stack.enter_context(contextlib.closing(open_job_store(settings)))
        keeper = RecordKeeper(store, settings.job)
        journal, metrics = open_journal(settings, keeper)
        stack.enter_context(contextlib.closing(journal))
        if not settings.launched:  # a launcher holds the lock, and outlives its coordinators
            settings = with_identity(settings, keeper.record)
            running = is_running(keeper.record) and not lags_behind(keeper.record, journal)
            lock = checkpoint_lock(settings, running=running)
            await asyncio.to_thread(stack.enter_context, lock)
        server = _Server(settings, listener, keeper, (journal, metrics), clock or SystemClock(), on_event)
        if keeper.record is not None and not keeper.record.outcome:
            await server.check_predecessor_ended()
        async with server.registered() as entry:
            if on_ready is not None:
                on_ready(entry)
            return await server.run()


def open_job_store(settings: ServerSettings, opener: Callable[[str], Store] = open_store) -> Store:
    """Open the store of the job with `opener`.

    Raises:
        BadInputError: it cannot be used, or not now.
        StoreError: not now, and this coordinator replaces a dead one: a later one tries again.
    """
    try:
        return opener(settings.store)
    except StoreError as error:
        if settings.config.takeover:
            raise
        raise BadInputError(f"{error}; wait for it, or give another store") from None


class _Server:
    """The process of a coordinator: its job behind its own web server."""

    def __init__(
        self,
        settings: ServerSettings,
        listener: socket.socket,
        keeper: RecordKeeper,
        books: tuple[Journal, Metrics],
        clock: Clock,
        on_event: Callable[[AnyEvent], None],
    ) -> None:
        self._settings = settings
        self._unauthenticated_log = CountedLog(_log, clock.monotonic)
        self._web = WebServer(listener, self._unauthenticated_log, tls_cert=settings.tls_cert, tls_key=settings.tls_key)
        self._token = settings.token or secrets.token_urlsafe(32)
        self._url = listener_url(listener, tls=settings.tls_cert is not None)
        self._signals = 0
        #: URL of the previous coordinator, or "" without one
        self._predecessor_url = keeper.record.url if keeper.record is not None else ""
        cert = settings.tls_cert
        self._entry = JobEntry(
            url=self._url,
            token=self._token,
            job=settings.job,
            pid=os.getpid(),
            tls_ca=str(cert.absolute()) if cert else "",
        )
        self._job = JobHost(settings, keeper, books, steady_time(clock), self._url, self._token, on_event=on_event)

    async def check_predecessor_ended(self) -> None:
        """Raise BadInputError if the previous coordinator still serves."""
        settings = self._settings
        await check_predecessor_ended(
            CoordinatorClient, settings.job, self._predecessor_url, self._entry, settings.registry
        )

    @contextlib.asynccontextmanager
    async def registered(self) -> AsyncGenerator[JobEntry]:
        """List the job for the commands of this machine while inside, and take it over in the store.

        Yield its address and token.
        """
        directory, entry = self._settings.registry, self._entry
        with contextlib.ExitStack() as stack:
            # The listing comes first: if it fails, the store must not have changed.
            if directory is not None:
                stack.callback(unregister, register(directory, entry))
            await self._job.start()
            yield entry

    async def run(self) -> int:
        """Serve until the job is over and its agents have left, or this coordinator cannot continue.

        Close everything, and return the exit code as `_outcome`.
        """
        serving = asyncio.create_task(self._serve())
        ticking = asyncio.create_task(self._job.tick())
        _log.info("job %s: the coordinator listens on %s", self._settings.job, self._url)
        try:
            with self._handle_signals():
                await asyncio.wait((self._job.over, serving, ticking), return_when=asyncio.FIRST_COMPLETED)
                if self._job.ended_well:
                    before = self._signals
                    await self._job.wait_for_agents(lambda: self._signals != before)
        finally:
            await self._job.close(lambda: not serving.done())
            self._web.stop()
            ticking.cancel()
            await asyncio.gather(serving, ticking, return_exceptions=True)
        return self._outcome(serving, ticking)

    def _outcome(self, serving: asyncio.Task[None], ticking: asyncio.Task[None]) -> int:
        """Return the exit code of the job, or `EXIT_FAILED` if another coordinator has superseded this one.

        Raises:
            HoldfastError: the shell, a task, or the web server has failed.
        """
        if self._job.over.done():
            error = self._job.over.exception()
            if isinstance(error, SupersededError):
                _log.error("this coordinator stops: %s", error)
                return EXIT_FAILED
            return self._job.over.result()
        for task in (serving, ticking):
            if not task.cancelled():
                task.result()
        raise HoldfastError("the coordinator's web server ended unexpectedly")

    @contextlib.contextmanager
    def _handle_signals(self) -> Generator[None]:
        """While inside, let the ending signals end the job. Without effect outside the main thread."""
        loop = asyncio.get_running_loop()
        main = threading.current_thread() is threading.main_thread()
        numbers = tuple(ending_signals()) if main else ()
        for number in numbers:
            loop.add_signal_handler(number, self._on_signal, number)
        try:
            yield
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)

    def _on_signal(self, number: signal.Signals) -> None:
        """Handle a signal: request the end of the job with the signal's exit code, at the first signal after a last
        checkpoint.

        A coordinator that a launcher started saves none: the launcher has already had the job saved.
        """
        self._signals += 1
        save = self._signals == 1 and not self._settings.launched
        self._job.end_job(EXIT_AFTER_SIGNAL[number.name], f"the coordinator was ended by {number.name}", save=save)

    async def _serve(self) -> None:
        """Serve agents, people and tools until the web server is stopped."""
        gate = TokenCheck(
            token=self._token,
            on_authenticated=self._web.on_authenticated,
            log=self._unauthenticated_log,
            open_metrics=self._settings.loopback,
        )
        await self._web.serve(TokenGate(self._job.app(), gate), gate.has_access)
