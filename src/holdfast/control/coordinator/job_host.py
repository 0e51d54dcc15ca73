"""One job's coordinator in a process: its machine, shell and books, without the port at which it is reached."""

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
from holdfast.control.coordinator.searcher import searcher
from holdfast.control.coordinator.settings import ServerSettings
from holdfast.control.coordinator.shell import RecordKeeper, Shell
from holdfast.control.coordinator.status import slowness_of, status_of
from holdfast.control.serving.agent_channel import AgentChannel
from holdfast.coordination.inputs import Drain, MoveNodes, PoolSaid, Shutdown, Tick
from holdfast.coordination.job.coordinator import Coordinator
from holdfast.coordination.job.foresight import foresee
from holdfast.observability.journal import Journal
from holdfast.observability.metrics import Metrics
from holdfast.protocol.events import AnyEvent
from holdfast.protocol.messages.forecast import MoveForecast
from holdfast.protocol.pool.sharing import JobState

#: How long agents may take to leave once the job is over.
FAREWELL_S = 3.0
_FAREWELL_POLL_S = 0.02

_log = logging.getLogger("holdfast.coordinator")


class JobHost:
    """The parts of one coordinator, put together; `over` is done once the job is, or what broke the shell is known."""

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
        """Put them together; `begin` takes over the job.

        Args:
            books: the journal, and the metrics that go on from its events. now: unix time that never steps back. url:
                at which it is reached. token: that agents show. on_stand: called with what the job's pool is to hear.
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
        self._metrics.slowness = partial(slowness_of, self._coordinator)
        self._alerts = Alerts(settings.config.spec.output.alert)
        self._searcher = searcher(lambda planned: self._soon(self._shell.feed(planned)))
        self._shell = Shell(
            self._coordinator,
            keeper,
            self._journal,
            self._metrics,
            now=self._now,
            on_request=self._alerts.tell,
            on_plan=self._searcher.begin,
            on_end=self._ended,
            on_failure=self._failed,
            on_stand=on_stand,
            on_event=on_event,
        )
        self._tasks: set[asyncio.Task[object]] = set()
        self._requests = NodeRequests(launched=settings.launched)
        self._api = HttpApi(self._shell, self._status, self._foresee, self._requests, settings.body_s)

    def app(self) -> ASGIApp:
        """Return what it answers, to whoever has shown a token."""
        return build_app(self._api, AgentChannel(self._shell))

    async def begin(self) -> None:
        """Take over the job.

        Raises:
            SupersededError, JournalError, StoreError: it cannot be.
        """
        await self._shell.start(self._url, os.getpid(), self._settings.checkpoints)

    async def tick(self) -> None:
        """Tell the machine that time passes, for ever."""
        while True:
            await asyncio.sleep(until_mark(self._now(), self._settings.config.tick_s))
            await self._shell.feed(Tick())

    def hear(self, said: PoolSaid) -> None:
        """Hand on what the job's pool says."""
        self._soon(self._shell.feed(said))

    def end(self, exit_code: int, why: str, *, save: bool) -> None:
        """End the job; `save`: once what it has led to is saved, where it keeps that."""
        if save and self._coordinator.record.saves:
            _log.info("job %s is saved, then it ends; another signal ends it at once", self._settings.job)
        self._soon(self._shell.feed(Shutdown(exit_code, why, save)))

    @property
    def ended_well(self) -> bool:
        """Whether the job is over, and this coordinator is whole."""
        return self.over.done() and self.over.exception() is None

    async def farewell(self, cut_short: Callable[[], bool] = lambda: False) -> None:
        """Let the agents leave; their last words still count. Where the job had ended before, they come first."""
        deadline, absences = self._now() + FAREWELL_S, self._coordinator.parts.absences
        while (self._shell.connections or absences.promised) and self._now() < deadline and not cut_short():
            await asyncio.sleep(_FAREWELL_POLL_S)

    async def close(self, served: Callable[[], bool] = lambda: False) -> None:
        """Let go of everything; where it is `served`, the last events are read before."""
        await self._shell.stop()
        await self._searcher.close()
        await self._alerts.close(FAREWELL_S)
        self._journal.close()
        self._requests.wake()
        if self._settings.launched and not self._api.failed and served():
            await self._last_events_read()

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

    def _ended(self, exit_code: int) -> None:
        if not self.over.done():
            self.over.set_result(exit_code)

    def _failed(self, error: BaseException) -> None:
        self._api.failed = not self.over.done()
        if self.over.done():
            _log.error("the coordinator failed while the job was ending", exc_info=error)
        else:
            self.over.set_exception(error)

    async def _status(self) -> dict[str, Any]:
        job = await self._shell.between_turns(lambda: status_of(self._coordinator, self._metrics.ledger, self._now()))
        return {**job, "events": self._journal.last_seq, "url": self._url, "coordinator_pid": os.getpid()}

    async def _foresee(self, asked: Drain | MoveNodes) -> list[MoveForecast]:
        """Say what would come of asking nodes to leave, or to move."""
        parts = self._coordinator.parts
        if isinstance(asked, Drain):
            return await self._shell.between_turns(lambda: foresee(parts, asked.nodes))
        return await self._shell.between_turns(lambda: foresee(parts, asked.nodes, asked.to, stays=True))
