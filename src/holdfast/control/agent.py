"""The node agent: one per node. Passes messages between workers and coordinator, and stands for the node's life."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import ssl
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from holdfast.clock import Clock, SystemClock
from holdfast.control.agent_settings import AgentSettings
from holdfast.control.agent_state import AgentState
from holdfast.control.agent_workers import UNKNOWN_EXIT, Slot
from holdfast.control.channel import ChannelRefusedError, CoordinatorChannel, open_channel
from holdfast.control.supervisor import die_with_parent
from holdfast.control.workforce import Workforce
from holdfast.errors import EXIT_BAD_INPUT, EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED, BadInputError
from holdfast.protocol.agent import (
    AgentMessage,
    Committed,
    CoordinatorMessage,
    EndNode,
    FromWorker,
    Heartbeat,
    Hello,
    Leave,
    NodeFault,
    Refused,
    ToWorker,
    Welcome,
    WorkerDown,
)
from holdfast.protocol.names import PROTOCOL
from holdfast.protocol.worker import WorkerMessage

_log = logging.getLogger("holdfast.agent")

#: how `Agent.run` ends where the job is done but a script failed after it
TAIL_FAILED = 3

_FIRST_BACKOFF_S = 0.02
_LAST_BACKOFF_S = 0.5
_UNAUTHORISED = (401, 403)
#: until a coordinator has said its own
_LEASE_S = 3.0
_WATCH_S = 0.1


class Agent:
    """One node. `run` returns the exit code once the node's part in the job has ended and its workers are gone."""

    def __init__(self, settings: AgentSettings, clock: Clock) -> None:
        self.settings = settings
        self.clock = clock
        self.state = AgentState()
        self.session = secrets.token_hex(8)
        self.why = ""
        self.alone = False
        self._tasks: set[asyncio.Task[None]] = set()
        self.workforce = Workforce(settings, self, self._task)
        self._channel: CoordinatorChannel | None = None
        self._welcomed: Welcome | None = None
        self._ever_welcomed = False
        self._exit: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._said_at = 0.0
        self._tail_code = EXIT_DONE
        self._quarantined: Leave | None = None

    async def run(self) -> int:
        """Live through the job."""
        try:
            await self.workforce.open()
            self._task(self._stay_connected())
            self._task(self._watch())
            code = await self._exit
            await self.workforce.end()
        finally:
            await self._close()
        return code

    def end(self, code: int, why: str) -> None:
        """End the node: its workers, then the agent with this exit code."""
        if not self._exit.done():
            self.why = why
            self._exit.set_result(code)

    # ---- the connection to the coordinator ----

    async def _stay_connected(self) -> None:
        """Connect again for ever: a coordinator that is away is waited for while training goes on."""
        settings = self.settings
        backoff = _FIRST_BACKOFF_S
        secure = settings.coordinator.startswith("https:")
        tls = ssl.create_default_context(cafile=settings.cafile or None) if secure else None
        while not self._exit.done():
            try:
                channel = await open_channel(settings.coordinator, settings.token, self._on_message, tls=tls)
            except ChannelRefusedError as error:
                self._refused_by_server(error)
            except OSError as error:  # TimeoutError too
                _log.debug("no coordinator: %s", error)
            else:
                self._hello(channel)
                await channel.wait_closed()
                if self._welcomed is not None:
                    backoff = _FIRST_BACKOFF_S
                self._channel = self._welcomed = None
            await asyncio.sleep(backoff)
            backoff = min(2 * backoff, _LAST_BACKOFF_S)

    def _refused_by_server(self, error: ChannelRefusedError) -> None:
        # Only at the start: training that runs is not thrown away because something else answers on the port.
        if error.status in _UNAUTHORISED and not self._ever_welcomed:
            self.end(EXIT_BAD_INPUT, f"{self.settings.coordinator} refuses the token ({error}): give --token")

    def _hello(self, channel: CoordinatorChannel) -> None:
        settings = self.settings
        self._channel = channel
        kept, rest = self.state.replay()
        hello = Hello(
            protocol=PROTOCOL,
            job=settings.job,
            node=settings.node,
            session=self.session,
            term=self.state.term,
            agent_pid=os.getpid(),
            workers=settings.workers,
            digest=settings.digest,
            rack=settings.rack,
            kept=kept,
        )
        channel.send(hello)
        for message in rest:
            channel.send(FromWorker(message=message))

    def _tell(self, message: AgentMessage) -> None:
        if self._channel is not None:
            self._said_at = self.clock.monotonic()
            self._channel.send(message)

    # ---- what the coordinator says ----

    def _on_message(self, message: CoordinatorMessage) -> None:
        if self._exit.done():
            return
        match message:
            case ToWorker():
                if self._welcomed is not None and self.state.accepts(message.order):
                    self.workforce.pass_on(message)
            case Committed():
                self.state.commit(message)
            case Welcome():
                self._welcome(message)
            case Refused():
                self._refused(message)
            case EndNode():
                self._end_node(message)
            case NodeFault():
                self._node_fault(message.how)

    def _welcome(self, message: Welcome) -> None:
        if not self.state.welcome(message):
            _log.warning("a coordinator of term %d is refused: %d is known", message.term, self.state.term)
            if self._channel is not None:
                self._channel.abort()
            return
        self._welcomed, self._ever_welcomed = message, True
        for down in self.state.downs():
            self._tell(down)
        if self._quarantined is not None:
            self._leave_quarantined(self._quarantined)

    def _refused(self, message: Refused) -> None:
        if not message.retry:
            self.end(message.exit_code, message.why)
            return
        # (a node that is only to bring fresh workers has done nothing wrong: the exit code of success)
        level = logging.INFO if message.exit_code == EXIT_DONE else logging.WARNING
        _log.log(level, "expelled: %s; coming back with new workers", message.why)
        self.state = AgentState(term=self.state.term)
        self.session = secrets.token_hex(8)
        self.workforce.replace_all()
        if self._channel is not None:
            self._channel.close()

    def _end_node(self, message: EndNode) -> None:
        if message.exit_code == EXIT_DONE and all(slot.done for slot in self.workforce.slots):
            return  # the scripts end by themselves, and the node after them
        self.alone = message.alone
        self.end(message.exit_code, message.why)

    def _node_fault(self, how: str) -> None:
        _log.warning("injected fault: %s", how)
        number = signal.SIGSTOP if how == "stop" else signal.SIGKILL
        self.workforce.send_signal(number)
        if how == "exit":
            os._exit(EXIT_FAILED)
        os.kill(os.getpid(), number)

    # ---- what the workers do ----

    def on_worker_message(self, message: WorkerMessage) -> None:
        """Keep it, and pass it on at once."""
        self.state.keep(message)
        self._tell(FromWorker(message=message))

    def on_worker_exit(self, slot: Slot, code: int) -> None:
        """Tell the coordinator, and put another process in the place, or count the node as done."""
        if self._exit.done():
            slot.forget_process()
            return
        if slot.done:
            self._ended_in_order(slot, code)
            return
        down = slot.obituary(code, self.settings.script)
        slot.forget_process()
        self.state.down(down)
        self._tell(down)
        if down.exit_code == EXIT_BAD_INPUT:
            slot.ended = True  # another process would say the same; the coordinator decides what becomes of the job
        elif slot.deaths.died(self.clock.monotonic(), self.state.committed):
            self._quarantine(slot, down)
        else:
            self.workforce.spawn(slot)

    def _ended_in_order(self, slot: Slot, code: int) -> None:
        slot.forget_process()
        slot.ended = True
        self.state.finished(slot.worker)
        if code not in (EXIT_DONE, UNKNOWN_EXIT):
            self._tail_code = TAIL_FAILED  # the job is done, but the script failed after it
        if all(slot.ended for slot in self.workforce.slots):
            self._tell(Leave(reason="finished"))
            self.end(self._tail_code, "")

    def _quarantine(self, slot: Slot, down: WorkerDown) -> None:
        """The node must go; whoever coordinates hears why first, be it later."""
        slot.ended = True
        why = f"the workers of {self.settings.node} fail again and again: {down.detail}"
        self._quarantined = Leave(reason="quarantined", detail=why[:8000])
        if self._welcomed is not None:
            self._leave_quarantined(self._quarantined)

    def _leave_quarantined(self, leave: Leave) -> None:
        self._tell(leave)
        self.end(EXIT_FAILED, leave.detail)

    # ---- time, and the end ----

    async def _watch(self) -> None:
        """Send heartbeats where nothing else is said, and look for workers that are stopped."""
        while not self._exit.done():
            welcome, now = self._welcomed, self.clock.monotonic()
            if welcome is not None and now - self._said_at > welcome.heartbeat_s / 2:
                self._tell(Heartbeat())
            self.workforce.kill_stopped(now, welcome.lease_s if welcome else _LEASE_S)
            await asyncio.sleep(welcome.heartbeat_s if welcome else _WATCH_S)

    async def _close(self) -> None:
        channel = self._channel
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if channel is not None:
            channel.close()
            await channel.wait_closed()
        await self.workforce.close()

    def _task(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not self._exit.done():
            self._exit.set_exception(error)


async def live(settings: AgentSettings, clock: Clock, say: Callable[[str], None]) -> int:
    """Run an agent until its node's part in the job has ended; SIGTERM and SIGINT end it and its workers."""
    agent = Agent(settings, clock)
    loop = asyncio.get_running_loop()
    for number, code in ((signal.SIGINT, EXIT_INTERRUPTED), (signal.SIGTERM, 128 + signal.SIGTERM)):
        loop.add_signal_handler(number, partial(agent.end, code, f"ended by {number.name}"))
    code = await agent.run()
    if agent.why and (agent.alone or not settings.quiet):
        say(f"holdfast agent {settings.node}: {agent.why}")
    return code


def run_agent(settings: AgentSettings, say: Callable[[str], None]) -> int:
    """Run an agent in this process and return its exit code.

    Args:
        say: prints one line for the user.

    Raises:
        BadInputError: the settings cannot work.
    """
    if settings.parent:
        die_with_parent(settings.parent)
    if not os.path.isfile(settings.script):
        raise BadInputError(f"there is no script {settings.script}")
    return asyncio.run(live(settings, SystemClock(), say))
