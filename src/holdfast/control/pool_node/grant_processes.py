"""The processes of a node's grant: the job's own agent, and all that comes of it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import shutil
import signal
import ssl
import time

import httpx
import msgspec
from msgspec.structs import replace

from holdfast.control.agent.channel import open_channel
from holdfast.control.agent.settings import AgentSettings
from holdfast.control.launch.children import AgentOrder, spawn
from holdfast.control.launch.settings import script_digest
from holdfast.control.pool_node.descendants import end_all_below, kill_all
from holdfast.control.pool_node.next_zygote import NextZygote
from holdfast.control.pool_node.settings import PoolNodeSettings
from holdfast.control.pool_node.watched_scripts import WatchedScripts
from holdfast.control.processes import ChildProcess, wait_or_end_frozen
from holdfast.coordination.agent.identity import NodeIdentity
from holdfast.coordination.pool.fence import StartGrant
from holdfast.protocol.names import MALFORMED, MAX_MESSAGE_BYTES
from holdfast.protocol.pool.launch import PooledLaunch

#: how long a job's agent may take to end in good order once the node is another's, before all of it is killed
END_S = 3.0
_ASK_AGAIN_S = 0.5
_ANSWER_S = 10.0

_log = logging.getLogger("holdfast.agent")


class _JobState(msgspec.Struct):
    """The pool's answer about a job, as far as it is read here."""

    state: str = ""
    submission: int = 0


class GrantProcesses:
    """What runs here by one grant, from its start until nothing of it is left.

    Args:
        http: speaks with the pool, which is asked what belongs to the grant. zygote: has begun one for
            this grant. scripts: is told which script is looked at.
    """

    def __init__(
        self,
        settings: PoolNodeSettings,
        start: StartGrant,
        http: httpx.AsyncClient,
        zygote: NextZygote,
        scripts: WatchedScripts,
    ) -> None:
        self.grant = start.grant
        self._settings = settings
        self._start = start
        self._http = http
        self._zygote = zygote
        self._scripts = scripts
        #: how long the node may stay once it is told to end: as the node was told, or its job, whichever is longer
        self.grace_s = settings.grace_s
        self._child: ChildProcess | None = None
        #: set once everything must end now
        self._ends = asyncio.Event()
        #: set once the grant is over
        self._over = asyncio.Event()
        # Killed processes leave their sockets in it.
        self._folder = os.path.join(settings.folder, f"{start.grant}")

    async def live(self) -> None:
        """Start what belongs to the grant; return once nothing of it is left, however it came to that."""
        launch = await self._launch()
        os.makedirs(self._folder, mode=0o700, exist_ok=True)
        if launch is not None:
            await self._live(launch)
        await self._reap()
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _live(self, launch: PooledLaunch) -> None:
        """Have the job here, if it can be; return once its agent has ended."""
        self.grace_s = max(self._settings.grace_s, launch.spec.recovery.grace)
        self._scripts.looked_at(launch.spec.script)
        if why := self._unfit(launch):
            await self._say_unfit(launch, why)
            return
        try:
            order = AgentOrder(settings=self._agent(launch), log=self._settings.log)
            self._child = spawn(order, dict(os.environ))
        except OSError as error:
            await self._say_unfit(launch, f"the job cannot be started on it: {error.strerror or error}")
            return
        await self._wait_for_agent(self._child)

    def over(self) -> None:
        """The grant is over: end everything, but let a finished job's code after its loop run to its end."""
        self._over.set()
        if self._child is None:
            self._ends.set()

    def end(self) -> None:
        """End everything now."""
        self._ends.set()
        if self._child is not None:
            self._child.send_signal(signal.SIGINT)
            self._child.send_signal(signal.SIGCONT)

    def leave(self) -> None:
        """The node is to end: the job is to leave it, in good order where there is time for that."""
        if self._child is not None:
            self._child.send_signal(signal.SIGTERM)
        else:
            self._ends.set()

    async def _launch(self) -> PooledLaunch | None:
        """Ask the pool until it says what to start, or the grant is over: None."""
        start = self._start
        while not self._ends.is_set():
            try:
                answer = await self._ask("launch")
                found = msgspec.json.decode(answer, type=PooledLaunch) if answer else None
                if found is not None and (found.submission, found.spec.name) == (start.submission, start.job):
                    return found
            except (httpx.HTTPError, TimeoutError, *MALFORMED) as error:
                _log.info("what belongs to grant %d is not known yet: %s", self.grant, error)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ends.wait(), _ASK_AGAIN_S)
        return None

    async def _ask(self, what: str = "") -> bytes:
        """Ask the pool once about the job; return b"" if it does not say. At most a message's bytes are read.

        Raises:
            httpx.HTTPError, TimeoutError, msgspec.DecodeError: there is no answer, or it is too large.
        """
        data = b""
        path = f"/jobs/{self._start.job}/{what}".rstrip("/")
        async with asyncio.timeout(_ANSWER_S), self._http.stream("GET", path) as answer:
            if not answer.is_success:
                return b""
            async for chunk in answer.aiter_raw():
                data += chunk
                if len(data) > MAX_MESSAGE_BYTES:
                    raise msgspec.DecodeError(f"an answer of more than {MAX_MESSAGE_BYTES} bytes")
        return data

    async def _job_finished(self) -> bool:
        """Return whether the pool says that the job of this grant has finished."""
        try:
            answer = await self._ask()
            job = msgspec.json.decode(answer, type=_JobState) if answer else _JobState()
        except (httpx.HTTPError, TimeoutError, *MALFORMED) as error:
            _log.info("whether job %s has finished is not known: %s", self._start.job, error)
            return False
        return (job.state, job.submission) == ("finished", self._start.submission)

    def _unfit(self, launch: PooledLaunch) -> str:
        """Return why the job cannot run here, "" where nothing is known against it."""
        spec, most = launch.spec, self._settings.workers
        if not os.path.isfile(spec.script) or not os.access(spec.script, os.R_OK):
            return f"there is no script {spec.script} on it that can be read"
        if most and spec.workers_per_node > most:
            return f"it has room for {most} workers, and the job has {spec.workers_per_node} on each node"
        return ""

    async def _say_unfit(self, launch: PooledLaunch, why: str) -> None:
        """Tell the job's coordinator that this node is none for it: it gives the grant back, and wants no other."""
        mine, heard = self._settings, asyncio.Event()
        identity = NodeIdentity(
            job=launch.spec.name, node=mine.node, workers=1, digest="", agent_pid=os.getpid(), grant=self.grant
        )
        hello = identity.hello(secrets.token_hex(8), 0, (), time.monotonic(), why)
        url = mine.pool.rstrip("/") + launch.address
        tls = ssl.create_default_context(cafile=mine.tls_ca or None) if url.startswith("https:") else None
        while not (self._ends.is_set() or heard.is_set()):
            with contextlib.suppress(OSError):  # TimeoutError too: nobody is there now
                channel = await open_channel(url, launch.token, lambda _: heard.set(), tls=tls)
                channel.send(hello)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(channel.wait_closed(), END_S)
                channel.abort()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ends.wait(), _ASK_AGAIN_S)

    def _agent(self, launch: PooledLaunch) -> AgentSettings:
        """Return the settings of the job's own agent."""
        mine, spec = self._settings, launch.spec
        spec = replace(spec, recovery=replace(spec.recovery, grace=self.grace_s))
        return AgentSettings(
            spec=spec,
            coordinator=mine.pool.rstrip("/") + launch.address,
            token=launch.token,
            node=mine.node,
            folder=self._folder,
            digest=script_digest(spec.script, spec.args),
            advertise=mine.advertise,
            cwd=os.path.dirname(spec.script),
            zygote=self._zygote.path,
            environment=mine.environment,
            log_folder=spec.output.log_dir or (os.path.join(mine.log_folder, spec.name) if mine.log_folder else ""),
            shows=mine.shows,
            tls_ca=mine.tls_ca,
            parent=os.getpid(),
            rack=mine.rack,
            zone=mine.zone,
            failure_rate=mine.failure_rate,
            standby=self._start.standby,
            grant=self.grant,
        )

    async def _wait_for_agent(self, child: ChildProcess) -> None:
        """Wait for the end of the job's agent.

        Once the grant is over, the agent of a finished job ends after the script's code. Any other agent is told to end
        (SIGINT), and is killed after `END_S` seconds.
        """
        ended = asyncio.ensure_future(wait_or_end_frozen(child))
        over, ends = asyncio.ensure_future(self._over.wait()), asyncio.ensure_future(self._ends.wait())
        await asyncio.wait((ended, over, ends), return_when=asyncio.FIRST_COMPLETED)
        if not (ended.done() or ends.done()) and await self._job_finished():
            await asyncio.wait((ended, ends), return_when=asyncio.FIRST_COMPLETED)
        over.cancel()
        ends.cancel()
        if not ended.done():
            child.send_signal(signal.SIGINT)
            child.send_signal(signal.SIGCONT)
            await asyncio.wait((ended,), timeout=END_S)
        if not ended.done():
            kill_all(self._zygote.kept)
            await ended

    async def _reap(self) -> None:
        """Kill what is left, and return once nothing is, and nothing can come any more."""
        await self._zygote.end()
        await end_all_below(lambda: self._zygote.kept)

    @property
    def awaited(self) -> tuple[int, ...]:
        """The pids of children that are waited for here."""
        return (self._child.pid,) if self._child is not None else ()
