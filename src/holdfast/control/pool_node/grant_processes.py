"""The processes of a node's grant: the agent of the job, and all its descendants."""

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

#: seconds that a job's agent may take to end after the end of its grant, before all its processes are killed
END_S = 3.0
_ASK_AGAIN_S = 0.5
_ANSWER_S = 10.0

_log = logging.getLogger("holdfast.agent")


class _JobState(msgspec.Struct):
    """The fields used here of the pool's answer about a job."""

    state: str = ""
    submission: int = 0


class GrantProcesses:
    """The processes of one grant, from its start until none is left.

    Args:
        settings: of the node.
        start: the instruction to start the grant.
        http: client of the pool, to get the launch data of the grant.
        zygote: the zygote for this grant.
        scripts: watches the script of the job.
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
        #: seconds that the node may stay after a signal to end: its own grace or that of its job, the longer
        self.grace_s = settings.grace_s
        self._child: ChildProcess | None = None
        #: set when all processes must end now
        self._ends = asyncio.Event()
        #: set once the grant is over
        self._over = asyncio.Event()
        # Killed processes leave their sockets in this folder.
        self._folder = os.path.join(settings.folder, f"{start.grant}")

    async def run(self) -> None:
        """Get the launch data from the pool, and run the job's agent until it or the grant ends.

        Then kill all remaining processes, and remove their folder.
        """
        launch = await self._get_launch()
        os.makedirs(self._folder, mode=0o700, exist_ok=True)
        if launch is not None:
            await self._run_agent(launch)
        await self._kill_all()
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _run_agent(self, launch: PooledLaunch) -> None:
        """Run the job's agent, and return once it has ended.

        If the node is unfit, or the agent cannot be started, report that to the job's coordinator instead. `grace_s`
        becomes that of the job if it is longer.
        """
        self.grace_s = max(self._settings.grace_s, launch.spec.recovery.grace)
        self._scripts.add(launch.spec.script)
        if why := self._why_unfit(launch):
            await self._send_unfit(launch, why)
            return
        try:
            order = AgentOrder(settings=self._agent_settings(launch), log=self._settings.log)
            self._child = spawn(order, dict(os.environ))
        except OSError as error:
            await self._send_unfit(launch, f"the job cannot be started on it: {error.strerror or error}")
            return
        await self._wait_for_agent(self._child)

    def on_grant_over(self) -> None:
        """Handle the end of the grant: `run` ends all processes, or stops waiting to start them.

        If the job has finished, the script's code after its loop still runs to its end.
        """
        self._over.set()
        if self._child is None:
            self._ends.set()

    def end(self) -> None:
        """Interrupt the job's agent (SIGINT), which ends all processes. After `END_S` seconds `run` kills them.

        If no agent was started, `run` stops waiting to start it.
        """
        self._ends.set()
        if self._child is not None:
            self._child.send_signal(signal.SIGINT)
            self._child.send_signal(signal.SIGCONT)

    def drain(self) -> None:
        """Handle a signal to end the node: send SIGTERM to the job's agent, so that the job drains the node.

        If no agent was started, `run` ends.
        """
        if self._child is not None:
            self._child.send_signal(signal.SIGTERM)
        else:
            self._ends.set()

    async def _get_launch(self) -> PooledLaunch | None:
        """Request the launch data from the pool until it has that of this submission. Return None if `_ends` is set."""
        start = self._start
        while not self._ends.is_set():
            try:
                answer = await self._get("launch")
                found = msgspec.json.decode(answer, type=PooledLaunch) if answer else None
                if found is not None and (found.submission, found.spec.name) == (start.submission, start.job):
                    return found
            except (httpx.HTTPError, TimeoutError, *MALFORMED) as error:
                _log.info("the launch data of grant %d is not known yet: %s", self.grant, error)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ends.wait(), _ASK_AGAIN_S)
        return None

    async def _get(self, what: str = "") -> bytes:
        """Send one request about the job to the pool, and return the body of its answer. Return b"" if the pool refuses
        it.

        At most the bytes of one message are read.

        Args:
            what: end of the path below the job's; "" for its status.

        Raises:
            httpx.HTTPError, TimeoutError, msgspec.DecodeError: the pool does not answer, or its answer is too large.
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
        """Return whether the pool says that this submission of the job has finished. False if it does not answer."""
        try:
            answer = await self._get()
            job = msgspec.json.decode(answer, type=_JobState) if answer else _JobState()
        except (httpx.HTTPError, TimeoutError, *MALFORMED) as error:
            _log.info("it is not known whether job %s has finished: %s", self._start.job, error)
            return False
        return (job.state, job.submission) == ("finished", self._start.submission)

    def _why_unfit(self, launch: PooledLaunch) -> str:
        """Return why the job cannot run here (its script cannot be read, or it has too many workers), or ""."""
        spec, most = launch.spec, self._settings.workers
        if not os.path.isfile(spec.script) or not os.access(spec.script, os.R_OK):
            return f"there is no script {spec.script} on it that can be read"
        if most and spec.workers_per_node > most:
            return f"it has room for {most} workers, and the job has {spec.workers_per_node} on each node"
        return ""

    async def _send_unfit(self, launch: PooledLaunch, why: str) -> None:
        """Report to the job's coordinator that this node is unfit; repeat it until it answers, or `_ends` is set.

        The job then returns the grant, and does not ask for this node again.
        """
        settings, answered = self._settings, asyncio.Event()
        identity = NodeIdentity(
            job=launch.spec.name, node=settings.node, workers=1, digest="", agent_pid=os.getpid(), grant=self.grant
        )
        hello = identity.make_hello(secrets.token_hex(8), 0, (), time.monotonic(), why)
        url = settings.pool.rstrip("/") + launch.address
        tls = ssl.create_default_context(cafile=settings.tls_ca or None) if url.startswith("https:") else None
        while not (self._ends.is_set() or answered.is_set()):
            with contextlib.suppress(OSError):  # includes TimeoutError: the coordinator does not answer now
                channel = await open_channel(url, launch.token, lambda _: answered.set(), tls=tls)
                channel.send(hello)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(channel.wait_closed(), END_S)
                channel.abort()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ends.wait(), _ASK_AGAIN_S)

    def _agent_settings(self, launch: PooledLaunch) -> AgentSettings:
        """Return the settings of the job's agent, which connects to the job through the pool's URL.

        Its grace is `grace_s`, and its zygote the prepared one.
        """
        settings, spec = self._settings, launch.spec
        spec = replace(spec, recovery=replace(spec.recovery, grace=self.grace_s))
        return AgentSettings(
            spec=spec,
            coordinator=settings.pool.rstrip("/") + launch.address,
            token=launch.token,
            node=settings.node,
            folder=self._folder,
            digest=script_digest(spec.script, spec.args),
            advertise=settings.advertise,
            cwd=os.path.dirname(spec.script),
            zygote=self._zygote.path,
            environment=settings.environment,
            log_folder=spec.output.log_dir
            or (os.path.join(settings.log_folder, spec.name) if settings.log_folder else ""),
            shows=settings.shows,
            tls_ca=settings.tls_ca,
            parent=os.getpid(),
            rack=settings.rack,
            zone=settings.zone,
            failure_rate=settings.failure_rate,
            standby=self._start.standby,
            grant=self.grant,
        )

    async def _wait_for_agent(self, child: ChildProcess) -> None:
        """Wait for the end of the job's agent.

        If the grant ends because the job has finished, the agent may run until its script has ended. Otherwise, or once
        `end` is called, it gets SIGINT, and is killed after `END_S` seconds with all processes except the process
        template.
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
            kill_all(self._zygote.template_pids)
            await ended

    async def _kill_all(self) -> None:
        """Kill the remaining processes, and return once none is left and none can start."""
        await self._zygote.end()
        await end_all_below(lambda: self._zygote.template_pids)

    @property
    def awaited_pids(self) -> tuple[int, ...]:
        """The pids of children that this object waits for."""
        return (self._child.pid,) if self._child is not None else ()
