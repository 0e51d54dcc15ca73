"""The agent of a pool's node: it reports which job uses the node, and separates one job from the next.

Its decisions are made in `holdfast.coordination.pool.fence`. This is the shell around it: the connection to the pool,
and the processes. The pool may be unreachable for any time, and the processes here continue.
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

#: seconds between two heartbeats to the pool: a third of a lease
BEAT_S = 1.0
#: seconds between two checks for orphans, and for changed scripts
_REAP_S = 0.5
_WATCH_S = 1.0
#: seconds that the remaining processes may take to end, beyond the grace
_END_S = 10.0
_FIRST_BACKOFF_S = 0.02
_LAST_BACKOFF_S = 0.5
_UNAUTHORISED = (401, 403)

_log = logging.getLogger("holdfast.agent")


class PoolAgent:
    """One node of a pool. `run` returns the exit code after a signal to end, once no process of a job is left."""

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
        self._is_accepted = False
        #: reason of the last refusal by the pool
        self._refused = ""
        self._is_leaving = False
        self._exit: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._http = httpx.AsyncClient(
            base_url=settings.pool,
            headers={"Authorization": f"Bearer {settings.token}", "Accept-Encoding": "identity"},
            verify=self._tls if self._tls is not None else True,
            trust_env=False,
        )

    async def run(self) -> int:
        """Connect to the pool, run its grants until a signal to end, and return the exit code.

        Finally, close the connections and kill all descendants. Raises the first error of a task.
        """
        self._zygote.prepare()
        self._start_task(self._stay_connected())
        self._start_task(self._send_heartbeats())
        self._start_task(self._reap_orphans())
        self._start_task(self._watch_scripts())
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
            with contextlib.suppress(TimeoutError):  # processes that remain end with this process
                await asyncio.wait_for(end_all_below(tuple), _END_S)

    def on_end_signal(self, code: int) -> None:
        """End the node once its job has drained it, or the grace is over; at once without a job.

        A second call, or the first one without a grace, ends the job's processes.

        Args:
            code: exit code of this process.
        """
        again, self._is_leaving = self._is_leaving, True
        if self._grant is None:
            self._leave(code)
        elif again or not self._grant.grace_s:
            self._grant.end()
            self._start_task(self._leave_after(code, _END_S))
        else:
            self._grant.drain()
            self._start_task(self._leave_after(code, self._grant.grace_s + _END_S))

    # grants

    def _on_message(self, message: ToNode) -> None:
        """Print a refusal of the pool if it is news, and end unless it `stays`; pass a grant to the fence.

        Grants are ignored while the node leaves.
        """
        if isinstance(message, PoolRefusal):
            if message.why != self._refused:
                self._say(f"holdfast agent {self._settings.node}: {message.why}")
            self._refused = message.why
            if not message.stays:
                self._end(EXIT_BAD_INPUT)
            return
        self._is_accepted = True
        if not self._is_leaving:
            self._execute(self._fence.on_grant(message))

    def _execute(self, instructions: Iterable[FenceInstruction]) -> None:
        """Execute the fence's instructions: start a grant's processes, end them, or report the state to the pool."""
        for instruction in instructions:
            match instruction:
                case StartGrant():
                    self._grant = GrantProcesses(self._settings, instruction, self._http, self._zygote, self._scripts)
                    self._start_task(self._run_grant(self._grant))
                case ReapGrant(grant):
                    if self._grant is not None and self._grant.grant == grant:
                        self._grant.on_grant_over()
                case ReportState(stands):
                    self._send(stands)

    async def _run_grant(self, grant: GrantProcesses) -> None:
        """Run the processes of a grant. When none is left, prepare the next zygote, and inform the fence."""
        await grant.run()
        self._grant = None
        if not self._is_leaving:
            self._zygote.prepare()
        self._execute(self._fence.on_reaped(grant.grant))

    async def _leave_after(self, code: int, within_s: float) -> None:
        """Leave the pool once no process of a job is left.

        Processes that remain after `within_s` end with this process.
        """
        until = asyncio.get_running_loop().time() + within_s
        while self._grant is not None and asyncio.get_running_loop().time() < until:
            await asyncio.sleep(_FIRST_BACKOFF_S)
        self._leave(code)

    def _leave(self, code: int) -> None:
        """End this process with an exit code. If no job has processes here, tell the pool that the node leaves."""
        if self._grant is None:
            self._send(LeavePool())
        self._end(code)

    def _end(self, code: int) -> None:
        if not self._exit.done():
            self._exit.set_result(code)

    # connection to the pool

    def _send(self, message: FromNode) -> None:
        if self._channel is not None:
            self._channel.send(message)

    async def _stay_connected(self) -> None:
        """Connect to the pool, introduce this node (`PoolHello`), and reconnect whenever the connection ends or fails.

        If the pool refuses the token and has never accepted this node, print that and end with `EXIT_BAD_INPUT`.
        """
        settings, backoff = self._settings, _FIRST_BACKOFF_S
        make = partial(CoordinatorChannel, decode=msgspec.msgpack.Decoder(NodeGrant | PoolRefusal).decode)
        while not self._exit.done():
            try:
                channel = await open_channel(settings.pool, settings.token, self._on_message, tls=self._tls, make=make)
            except ChannelRefusedError as error:
                if error.status in _UNAUTHORISED and not self._is_accepted:
                    self._say(f"{settings.pool} refuses the token ({error}): give it in {TOKEN} or --token-file")
                    self._end(EXIT_BAD_INPUT)
            except OSError as error:  # includes TimeoutError
                _log.debug("no pool: %s", error)
            else:
                self._channel = channel
                term, version = self._fence.record_version
                hello = PoolHello(
                    node=settings.node,
                    session=self._session,
                    agent_pid=os.getpid(),
                    rack=settings.rack,
                    zone=settings.zone,
                    stands=self._fence.state,
                    passing=settings.passing,
                    term=term,
                    version=version,
                    identity=self._fence.pool_identity,
                )
                self._send(hello)
                await channel.wait_closed()
                self._channel, backoff = None, _FIRST_BACKOFF_S
            await asyncio.sleep(backoff)
            backoff = min(2 * backoff, _LAST_BACKOFF_S)

    async def _send_heartbeats(self) -> None:
        """Send a heartbeat to the pool every `BEAT_S` seconds, while it is connected, until this agent ends."""
        while not self._exit.done():
            self._send(NodeAlive())
            await asyncio.sleep(until_mark(time.time(), BEAT_S))

    async def _reap_orphans(self) -> None:
        """Reap ended orphans and check the process template, every `_REAP_S` seconds."""
        while not self._exit.done():
            self._zygote.check()
            reap_orphans((*self._zygote.template_pids, *(self._grant.awaited_pids if self._grant is not None else ())))
            await asyncio.sleep(_REAP_S)

    async def _watch_scripts(self) -> None:
        """Check every `_WATCH_S` seconds for changed scripts, and report a change to the pool through the fence.

        A job that did not accept this node may do so now.
        """
        while not self._exit.done():
            if self._scripts.check_changed():
                self._execute(self._fence.on_node_changed())
            await asyncio.sleep(_WATCH_S)

    def _start_task(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine as a task until `run` ends. If it fails, `run` raises its error."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        """Forget an ended task. If it failed, `run` ends with its error."""
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not self._exit.done():
            self._exit.set_exception(error)


async def run_until_signal(settings: PoolNodeSettings, say: Callable[[str], None]) -> int:
    """Run a pool's node until a signal ends it (SIGTERM, SIGHUP or SIGINT), after its grace; return its exit code."""
    agent = PoolAgent(settings, say)
    loop = asyncio.get_running_loop()
    for number, code in ending_signals().items():
        loop.add_signal_handler(number, agent.on_end_signal, code)
    return await agent.run()


def run_pool_agent(settings: PoolNodeSettings, say: Callable[[str], None]) -> int:
    """Run a pool's node in this process until SIGINT, SIGTERM or SIGHUP, or until the pool refuses it; return its exit
    code.

    After a signal the processes of its grant get their grace. This process adopts orphaned descendants, and ends with
    the process `settings.parent`, if that is set.

    Args:
        settings: of the node.
        say: prints one line for the user.

    Raises:
        OSError: the kernel does not let this process adopt its orphaned descendants.
    """
    if settings.parent:
        die_with_parent(settings.parent)
    adopt_orphans()
    return asyncio.run(run_until_signal(settings, say))
