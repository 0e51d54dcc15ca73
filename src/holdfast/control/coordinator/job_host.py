"""One job's coordinator in a process: its machine, its shell, and its journal, without the port that serves it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import logging
import os
import secrets
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from starlette.types import ASGIApp

from holdfast.clock import until_mark
from holdfast.control.coordinator.alerts import Alerts
from holdfast.control.coordinator.http_api import HttpApi, NodeRequests, build_app
from holdfast.control.coordinator.job_journal import lags_behind
from holdfast.control.coordinator.placement_search_process import make_searcher
from holdfast.control.coordinator.settings import ServerSettings
from holdfast.control.coordinator.shell import RecordKeeper, Shell
from holdfast.control.coordinator.status import job_status, measure_slowness
from holdfast.control.serving.agent_channel import AgentChannel
from holdfast.coordination.inputs import Drain, MoveNodes, PoolSaid, Shutdown, Tick
from holdfast.coordination.job.coordinator import Coordinator
from holdfast.coordination.job.foresight import forecast_moves
from holdfast.observability.journal import Journal
from holdfast.observability.metrics import Metrics
from holdfast.protocol.events import AnyEvent
from holdfast.protocol.messages.forecast import MoveForecast
from holdfast.protocol.pool.sharing import JobState

#: Seconds that agents may take to leave once the job is over.
FAREWELL_S = 3.0
_FAREWELL_POLL_S = 0.02

_log = logging.getLogger("holdfast.coordinator")


class JobHost:
    """The assembled parts of one coordinator.

    `over` gets the exit code once the job is over, or the error that stopped the shell.
    """

    def __init__(
        self,
        settings: ServerSettings,
        keeper: RecordKeeper,
        books: tuple[Journal, Metrics],
        now: Callable[[], float],
        url: str,
        token: str,
        on_stand: Callable[[JobState], None] = lambda _: None,
        on_event: Callable[[AnyEvent], None] = lambda _: None,
    ) -> None:
        """Assemble the parts. `start` takes over the job.

        Args:
            settings: of the coordinator.
            keeper: keeps the job's record.
            books: the journal, and the metrics that continue from its events.
            now: unix time that never steps back.
            url: the URL of this coordinator.
            token: the token of the agents.
            on_stand: called with each state that the job reports to its pool.
            on_event: called with each new event.
        """
        self._settings = settings
        self._journal, self._metrics = books
        self._url = url
        self._now = now
        self.over: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        secret = settings.config.secret or hashlib.sha256(b"holdfast state transfer " + token.encode()).digest()
        identity = settings.config.identity or secrets.token_hex(8)
        config = dataclasses.replace(settings.config, secret=secret, identity=identity)
        journal, record = self._journal, keeper.record
        again = lags_behind(record, journal) or (settings.kept and journal.ended)
        ended = (journal.term, journal.generation) if again else None
        self._coordinator = Coordinator(config, journal.position, record, ended)
        self._metrics.slowness = partial(measure_slowness, self._coordinator)
        self._alerts = Alerts(settings.config.spec.output.alert)
        self._searcher = make_searcher(lambda planned: self._start_task(self._shell.feed(planned)))
        self._shell = Shell(
            self._coordinator,
            keeper,
            self._journal,
            self._metrics,
            now=self._now,
            on_request=self._alerts.enqueue,
            on_plan=self._searcher.start,
            on_end=self._on_end,
            on_failure=self._on_failure,
            on_stand=on_stand,
            on_event=on_event,
        )
        self._tasks: set[asyncio.Task[object]] = set()
        self._requests = NodeRequests(launched=settings.launched)
        self._api = HttpApi(self._shell, self._status, self._foresee, self._requests, settings.body_s)

    def app(self) -> ASGIApp:
        """Return the application, without authentication."""
        return build_app(self._api, AgentChannel(self._shell))

    async def start(self) -> None:
        """Take over the job.

        Raises:
            SupersededError, JournalError, StoreError: as `Shell.start`.
        """
        await self._shell.start(self._url, os.getpid(), self._settings.checkpoints)

    async def tick(self) -> None:
        """Feed a tick to the machine every `tick_s`, forever."""
        while True:
            await asyncio.sleep(until_mark(self._now(), self._settings.config.tick_s))
            await self._shell.feed(Tick())

    def on_pool_message(self, message: PoolSaid) -> None:
        """Pass on a message of the job's pool."""
        self._start_task(self._shell.feed(message))

    def end_job(self, exit_code: int, why: str, *, save: bool) -> None:
        """Request the end of the job in the background.

        Args:
            exit_code: of the job.
            why: the reason, for the log.
            save: whether to save a checkpoint first, if the job saves checkpoints.
        """
        if save and self._coordinator.record.saves:
            _log.info("job %s saves a checkpoint, then it ends; another signal ends it at once", self._settings.job)
        self._start_task(self._shell.feed(Shutdown(exit_code, why, save)))

    @property
    def ended_well(self) -> bool:
        """Whether the job is over, and this coordinator has not failed."""
        return self.over.done() and self.over.exception() is None

    async def wait_for_agents(self, cut_short: Callable[[], bool] = lambda: False) -> None:
        """Wait until the agents have left after the end of the job, disconnected ones that may come back included, at
        most `FAREWELL_S`.

        Their last messages still count. If the job had ended before this coordinator started, the agents first connect.

        Args:
            cut_short: returns True to stop waiting.
        """
        deadline, absences = self._now() + FAREWELL_S, self._coordinator.context.disconnected
        while (self._shell.connections or absences.promised) and self._now() < deadline and not cut_short():
            await asyncio.sleep(_FAREWELL_POLL_S)

    async def close(self, served: Callable[[], bool] = lambda: False) -> None:
        """Stop the shell, end the placement search, send the last alerts, and close the journal. Waiting requests end.

        If a launcher started this coordinator, it has not failed, and the web server still runs, also wait until the
        launcher has read the last events.

        Args:
            served: returns whether the web server still runs.
        """
        await self._shell.stop()
        await self._searcher.close()
        await self._alerts.close(FAREWELL_S)
        self._journal.close()
        self._requests.close()
        if self._settings.launched and not self._api.failed and served():
            await self._wait_for_last_read()

    async def _wait_for_last_read(self) -> None:
        """Wait until the launcher has read the last event, at most `FAREWELL_S`.

        It may be between two requests, or not have started yet.
        """
        _log.info("job %s is over: waiting until its last events are read", self._settings.job)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._api.read_to_the_end.wait(), FAREWELL_S)

    def _start_task(self, work: Coroutine[Any, Any, object]) -> None:
        """Run a coroutine in the background. Its errors are dropped, because the shell reports its own failures."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _on_end(self, exit_code: int) -> None:
        if not self.over.done():
            self.over.set_result(exit_code)

    def _on_failure(self, error: BaseException) -> None:
        """Make the failure of the shell the result of the job. After the end of the job, only log it."""
        self._api.failed = not self.over.done()
        if self.over.done():
            _log.error("the coordinator failed while the job was ending", exc_info=error)
        else:
            self.over.set_exception(error)

    async def _status(self) -> dict[str, Any]:
        job = await self._shell.read_durable(lambda: job_status(self._coordinator, self._metrics.ledger, self._now()))
        return {**job, "events": self._journal.last_seq, "url": self._url, "coordinator_pid": os.getpid()}

    async def _foresee(self, order: Drain | MoveNodes) -> list[MoveForecast]:
        """Return the forecast for each node that a drain or a move would affect. Nothing is changed.

        Raises:
            BadInputError, UnreachableError, RefusedError: the request itself would be refused.
        """
        parts = self._coordinator.context
        if isinstance(order, Drain):
            return await self._shell.read_durable(lambda: forecast_moves(parts, order.nodes))
        return await self._shell.read_durable(lambda: forecast_moves(parts, order.nodes, order.to, stays=True))
