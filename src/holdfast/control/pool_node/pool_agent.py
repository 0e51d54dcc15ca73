"""A pool's node: its agent says whose it is, and is the fence between one owner and the next.

What it decides is in `holdfast.coordination.pool.fence`; this is the shell around it: the connection to the pool, and
the processes. The pool may be away for any time: what runs here runs on.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import ssl
import time
from collections.abc import Callable, Coroutine, Iterable
from functools import partial
from typing import Any

import httpx
import msgspec

from holdfast.clock import until_mark
from holdfast.control.agent.channel import ChannelRefusedError, CoordinatorChannel, open_channel
from holdfast.control.pool_node.descendants import adopt_orphans, end_all_below, reap_orphans
from holdfast.control.pool_node.grant_processes import GrantProcesses
from holdfast.control.pool_node.next_zygote import NextZygote
from holdfast.control.pool_node.settings import PoolNodeSettings
from holdfast.control.pool_node.watched_scripts import WatchedScripts
from holdfast.control.processes import die_with_parent, ending_signals
from holdfast.coordination.pool.fence import Fence, FenceInstruction, ReapGrant, ReportState, StartGrant
from holdfast.environment import TOKEN
from holdfast.errors import EXIT_BAD_INPUT
from holdfast.protocol.messages.pool import FromNode, LeavePool, NodeAlive, NodeGrant, PoolHello, PoolRefusal, ToNode

#: how often the pool hears that the node lives: three times in a lease
BEAT_S = 1.0
#: how often is looked for what was left to the node; and whether a script has changed that was to run here
_REAP_S = 0.5
_WATCH_S = 1.0
#: what is left of a node that is told to end has so long to go, beyond its grace
_GOING_S = 10.0
_FIRST_BACKOFF_S = 0.02
_LAST_BACKOFF_S = 0.5
_UNAUTHORISED = (401, 403)

_log = logging.getLogger("holdfast.agent")


class PoolAgent:
    """One node of a pool. `run` returns the exit code once it is told to end, and nothing runs here any more."""

    def __init__(self, settings: PoolNodeSettings, say: Callable[[str], None]) -> None:
        secure = settings.pool.startswith("https:")
        self._settings = settings
        self._say = say
        self._tls = ssl.create_default_context(cafile=settings.tls_ca or None) if secure else None
        self._session = secrets.token_hex(8)
        self._fence = Fence()
        self._channel: CoordinatorChannel | None = None
        self._grant: GrantProcesses | None = None
        self._zygote = NextZygote(settings)
        self._scripts = WatchedScripts()
        self._tasks: set[asyncio.Task[None]] = set()
        self._welcome = False
        #: why the pool has refused the node last
        self._refused = ""
        self._leaving = False
        self._exit: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._http = httpx.AsyncClient(
            base_url=settings.pool,
            headers={"Authorization": f"Bearer {settings.token}", "Accept-Encoding": "identity"},
            verify=self._tls if self._tls is not None else True,
            trust_env=False,
        )

    async def run(self) -> int:
        """Live in the pool."""
        self._zygote.begin()
        self._task(self._stay_connected())
        self._task(self._beat())
        self._task(self._reap())
        self._task(self._watch())
        try:
            return await self._exit
        finally:
            for task in list(self._tasks):
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            if self._channel is not None:
                self._channel.close()
                await self._channel.wait_closed()
            await self._http.aclose()
            await self._zygote.close()
            with contextlib.suppress(TimeoutError):  # (what ends later ends with this process)
                await asyncio.wait_for(end_all_below(tuple), _GOING_S)

    def told_to_end(self, code: int) -> None:
        """End the node once its job can go on without it, or the grace is over; told again, at once."""
        again, self._leaving = self._leaving, True
        if self._grant is None:
            self._go(code)
        elif again or not self._grant.grace_s:
            self._grant.end()
            self._task(self._go_later(code, _GOING_S))
        else:
            self._grant.leave()
            self._task(self._go_later(code, self._grant.grace_s + _GOING_S))

    # ---- whose the node is ----

    def _hear(self, message: ToNode) -> None:
        if isinstance(message, PoolRefusal):
            if message.why != self._refused:
                self._say(f"holdfast agent {self._settings.node}: {message.why}")
            self._refused = message.why
            if not message.stays:
                self._end(EXIT_BAD_INPUT)
            return
        self._welcome = True
        if not self._leaving:
            self._obey(self._fence.on_grant(message))

    def _obey(self, instructions: Iterable[FenceInstruction]) -> None:
        for instruction in instructions:
            match instruction:
                case StartGrant():
                    self._grant = GrantProcesses(self._settings, instruction, self._http, self._zygote, self._scripts)
                    self._task(self._live(self._grant))
                case ReapGrant(grant):
                    if self._grant is not None and self._grant.grant == grant:
                        self._grant.over()
                case ReportState(stands):
                    self._tell(stands)

    async def _live(self, grant: GrantProcesses) -> None:
        await grant.live()
        self._grant = None
        if not self._leaving:
            self._zygote.begin()
        self._obey(self._fence.on_reaped(grant.grant))

    async def _go_later(self, code: int, within_s: float) -> None:
        """Go once nothing runs here; what has not ended by then ends with this process."""
        until = asyncio.get_running_loop().time() + within_s
        while self._grant is not None and asyncio.get_running_loop().time() < until:
            await asyncio.sleep(_FIRST_BACKOFF_S)
        self._go(code)

    def _go(self, code: int) -> None:
        if self._grant is None:
            self._tell(LeavePool())
        self._end(code)

    def _end(self, code: int) -> None:
        if not self._exit.done():
            self._exit.set_result(code)

    # ---- the connection to the pool ----

    def _tell(self, message: FromNode) -> None:
        if self._channel is not None:
            self._channel.send(message)

    async def _stay_connected(self) -> None:
        """Connect again for ever: a pool that is away is waited for while training goes on."""
        mine, backoff = self._settings, _FIRST_BACKOFF_S
        make = partial(CoordinatorChannel, decode=msgspec.msgpack.Decoder(NodeGrant | PoolRefusal).decode)
        while not self._exit.done():
            try:
                channel = await open_channel(mine.pool, mine.token, self._hear, tls=self._tls, make=make)
            except ChannelRefusedError as error:
                if error.status in _UNAUTHORISED and not self._welcome:
                    self._say(f"{mine.pool} refuses the token ({error}): give it in {TOKEN} or --token-file")
                    self._end(EXIT_BAD_INPUT)
            except OSError as error:  # TimeoutError too
                _log.debug("no pool: %s", error)
            else:
                self._channel = channel
                term, version = self._fence.record_version
                hello = PoolHello(
                    node=mine.node,
                    session=self._session,
                    agent_pid=os.getpid(),
                    rack=mine.rack,
                    zone=mine.zone,
                    stands=self._fence.state,
                    passing=mine.passing,
                    term=term,
                    version=version,
                    identity=self._fence.pool_identity,
                )
                self._tell(hello)
                await channel.wait_closed()
                self._channel, backoff = None, _FIRST_BACKOFF_S
            await asyncio.sleep(backoff)
            backoff = min(2 * backoff, _LAST_BACKOFF_S)

    async def _beat(self) -> None:
        """Say that the node lives."""
        while not self._exit.done():
            self._tell(NodeAlive())
            await asyncio.sleep(until_mark(time.time(), BEAT_S))

    async def _reap(self) -> None:
        """Reap what was left to the node, and see that its zygotes come."""
        while not self._exit.done():
            self._zygote.look()
            reap_orphans((*self._zygote.kept, *(self._grant.awaited if self._grant is not None else ())))
            await asyncio.sleep(_REAP_S)

    async def _watch(self) -> None:
        """Tell the pool that a script has changed: a job that would not take this node may do so now."""
        while not self._exit.done():
            if self._scripts.changed():
                self._obey(self._fence.on_node_changed())
            await asyncio.sleep(_WATCH_S)

    def _task(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not self._exit.done():
            self._exit.set_exception(error)


async def live(settings: PoolNodeSettings, say: Callable[[str], None]) -> int:
    """Run a pool's node until it is told to end; SIGTERM or SIGHUP (after its grace) and SIGINT do that."""
    agent = PoolAgent(settings, say)
    loop = asyncio.get_running_loop()
    for number, code in ending_signals().items():
        loop.add_signal_handler(number, agent.told_to_end, code)
    return await agent.run()


def run_pool_agent(settings: PoolNodeSettings, say: Callable[[str], None]) -> int:
    """Run a pool's node in this process and return its exit code.

    Args:
        say: prints one line for the user.

    Raises:
        OSError: the kernel does not let it be the parent of its processes' orphans.
    """
    if settings.parent:
        die_with_parent(settings.parent)
    adopt_orphans()
    return asyncio.run(live(settings, say))
