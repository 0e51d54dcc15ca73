"""`holdfast run`: a whole job on one machine. Starts coordinator, zygote and agents, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import re
import secrets
import shutil
import signal
import socket
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast.control.agent import TAIL_FAILED
from holdfast.control.agent_settings import AgentSettings
from holdfast.control.follow import Follower
from holdfast.control.known_checkpoints import intact_checkpoints
from holdfast.control.registry import live_jobs
from holdfast.control.settings import ServerSettings
from holdfast.control.spawn import EXIT_CRASHED, AgentOrder, CoordinatorOrder, spawn
from holdfast.control.supervisor import ChildProcess, end_all
from holdfast.control.zygote import PRELOAD
from holdfast.control.zygote_client import start_zygote
from holdfast.coordination.inputs import CoordinatorConfig
from holdfast.coordination.record import KnownCheckpoint
from holdfast.errors import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED, BadInputError

_log = logging.getLogger("holdfast.run")

_JOB_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
_MAX_NODES = 1024
_MAX_SLOTS = 65535
#: a coordinator that dies more often than this in a minute is not started again
_MAX_RESTARTS = 10
_RESTARTS_WITHIN_S = 60.0
_ALL_GONE_S = 10.0
_COORDINATOR_GRACE_S = 1.5
_AGENT_GRACE_S = 2.0
_LAST_EVENTS_S = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchSettings:
    """Settings of `holdfast run`.

    script: as the user gave it. store: "" for SQLite in the job's folder. registry: where commands find the job; None
    for nowhere. job_dir: where the job's files stay; None for a temporary folder. environment: of all processes.
    log_folder: for the workers' output, None to let it through. slots: each node's room for expert replicas, per MoE
    layer. fault_threshold: on how many nodes each expert is wanted. join_window: seconds to wait for more arrivals.
    """

    script: Path
    args: tuple[str, ...] = ()
    nodes: int = 4
    workers_per_node: int = 1
    job: str = ""
    events: Path | None = None
    store: str = ""
    port: int = 0
    checkpoint_dir: Path | None = None
    checkpoint_every: int = 100
    allow_faults: bool = False
    verify_state: bool = False
    slots: int = 6
    fault_threshold: int = 2
    join_window: float = 0.0
    job_dir: Path | None = None
    registry: Path | None = None
    environment: dict[str, str] = field(default_factory=dict)
    preload: tuple[str, ...] = PRELOAD
    log_folder: Path | None = None

    @property
    def job_name(self) -> str:
        """The job's name: as given, else the script's."""
        name = re.sub(r"[^A-Za-z0-9._-]", "-", self.script.stem).lstrip(".-_")[:64]
        return self.job or name or "job"

    def check(self) -> None:
        """Refuse what cannot work, before anything is touched.

        Raises:
            BadInputError: with what is wrong, and what to do.
        """
        if not self.script.is_file():
            raise BadInputError(f"there is no script {self.script}: give the path of a Python file")
        if not os.access(self.script, os.R_OK):
            raise BadInputError(f"the script {self.script} cannot be read: check its permissions")
        for option, value in (("--nodes", self.nodes), ("--workers-per-node", self.workers_per_node)):
            if not 1 <= value <= _MAX_NODES:
                raise BadInputError(f"{option} is {value}: it must lie between 1 and {_MAX_NODES}")
        if self.checkpoint_every < 1:
            raise BadInputError(f"--checkpoint-every is {self.checkpoint_every}: it must be at least 1 step")
        check_expert_options(self.slots, self.fault_threshold, self.join_window)
        if not _JOB_NAME.match(self.job_name):
            raise BadInputError(f"the job's name is {self.job_name!r}: use letters, digits, dots, dashes, at most 64")
        if not 0 <= self.port <= 65535:
            raise BadInputError(f"--port is {self.port}: it must lie between 0 (a free one) and 65535")
        if self.events is not None:
            check_writable_file("--events", self.events)
        for option, folder in (("--checkpoint", self.checkpoint_dir), ("--job-dir", self.job_dir)):
            if folder is not None:
                check_creatable_folder(option, folder)


def check_expert_options(slots: int = 1, fault_threshold: int = 1, join_window: float = 0.0) -> None:
    """Refuse numbers that make no sense.

    Raises:
        BadInputError: with the option and its value.
    """
    if not 1 <= slots <= _MAX_SLOTS:
        raise BadInputError(f"--slots is {slots}: it must lie between 1 and {_MAX_SLOTS}")
    if fault_threshold < 1:
        raise BadInputError(f"--fault-threshold is {fault_threshold}: it must be at least 1 (one node for each expert)")
    if not 0 <= join_window < float("inf"):
        raise BadInputError(f"--join-window is {join_window}: it must be a number of seconds, 0 or more")


def check_writable_file(option: str, path: Path) -> None:
    """Refuse a file that could not be written.

    Raises:
        BadInputError: it is a folder, or may not be written, or its folder is not there.
    """
    if path.is_dir():
        raise BadInputError(f"{option} {path} is a folder: give a file")
    if not path.parent.is_dir():
        raise BadInputError(f"{option} {path}: there is no folder {path.parent}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise BadInputError(f"{option} {path} cannot be written: check its permissions")


def check_creatable_folder(option: str, path: Path) -> None:
    """Refuse a folder that could not be made or written in.

    Raises:
        BadInputError: something that is no folder stands in the way, or the permissions do.
    """
    existing = path.absolute()
    while not existing.exists():
        existing = existing.parent
    if not existing.is_dir():
        raise BadInputError(f"{option} {path}: {existing} is not a folder")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise BadInputError(f"{option} {path} cannot be written: check the permissions of {existing}")


def script_digest(script: Path, args: tuple[str, ...]) -> str:
    """Return what tells two nodes apart that were started with different code or arguments."""
    digest = hashlib.sha256(script.read_bytes())
    for arg in args:
        digest.update(b"\0" + os.fsencode(arg))
    return digest.hexdigest()


@contextlib.contextmanager
def reserved_port(port: int) -> Iterator[int]:
    """Hold a port of the loopback for the job's whole life, coordinators' restarts included.

    The socket is bound but never listens: with SO_REUSEADDR on both sides a coordinator can listen on the port,
    while nobody else is given it.

    Raises:
        BadInputError: somebody listens there.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            holder.bind(("127.0.0.1", port))
        except OSError as error:
            raise BadInputError(f"--port {port} cannot be used: {error.strerror}; give another, or 0") from None
        yield holder.getsockname()[1]


@contextlib.contextmanager
def job_folders(settings: LaunchSettings) -> Iterator[tuple[Path, Path]]:
    """Make the job's folder and a private, short-named one for sockets; the temporary ones go again."""
    sockets = Path(tempfile.mkdtemp(prefix="holdfast-"))
    try:
        if settings.job_dir is not None:
            settings.job_dir.mkdir(parents=True, exist_ok=True)
        yield settings.job_dir or sockets, sockets
    finally:
        shutil.rmtree(sockets, ignore_errors=True)


class Launcher:
    """One job's processes. `run` returns the job's exit code when all of them have ended."""

    def __init__(
        self,
        settings: LaunchSettings,
        port: int,
        folder: Path,
        sockets: Path,
        checkpoints: tuple[KnownCheckpoint, ...],
        on_event: Callable[[dict[str, Any]], None],
    ) -> None:
        self.settings = settings
        self.url = f"http://127.0.0.1:{port}"
        self.token = secrets.token_urlsafe(32)
        self._port = port
        self._folder = folder
        self._sockets = sockets
        self._checkpoints = checkpoints
        self._on_event = on_event
        self._agents: dict[str, ChildProcess] = {}
        self._coordinator: ChildProcess | None = None
        self._zygote: ChildProcess | None = None
        self._restarts: list[float] = []
        self._over: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._tasks: set[asyncio.Task[None]] = set()
        self._tail_failed = False
        self._hurry = asyncio.Event()

    async def run(self) -> int:
        """Start everything, wait for the job's end, end everything."""
        async with Follower(self.url, self.token) as follower:
            try:
                self._start_zygote()
                self._task(self._keep_coordinator())
                for _ in range(self.settings.nodes):
                    self._start_agent()
                following = self._task(self._follow(follower))
                self._task(self._serve_requests(follower))
                code = await self._over
                if code == EXIT_DONE:
                    await self._scripts_end()
                await asyncio.wait((following,), timeout=_LAST_EVENTS_S)
            finally:
                await self._end()
        return EXIT_FAILED if code == EXIT_DONE and self._tail_failed else code

    def interrupt(self, code: int) -> None:
        """End the job (a signal came); the second time without waiting for anything."""
        if self._over.done():
            self._hurry.set()
        else:
            self._over.set_result(code)

    # ---- starting ----

    def _start_zygote(self) -> None:
        self._zygote = start_zygote(
            self._zygote_path,
            environment=self.settings.environment,
            remove=str(self._sockets),
            preload=self.settings.preload,
        )

    @property
    def _zygote_path(self) -> str:
        return str(self._sockets / "zygote.sock")

    def _start_coordinator(self) -> ChildProcess:
        settings = self.settings
        server = ServerSettings(
            config=CoordinatorConfig(
                job=settings.job_name,
                start_nodes=settings.nodes,
                allow_faults=settings.allow_faults,
                # An outcome that the one before wrote stands; on a store from an earlier run it does not.
                takeover=bool(self._restarts),
            ),
            port=self._port,
            token=self.token,
            store=settings.store or f"sqlite:{self._folder / 'store.sqlite'}",
            events=settings.events.absolute() if settings.events else None,
            registry=settings.registry,
            checkpoints=self._checkpoints,
            followed=True,
        )
        return spawn(CoordinatorOrder(settings=server, parent=os.getpid()), settings.environment)

    def _start_agent(self) -> None:
        settings = self.settings
        node = f"node-{len(self._agents)}"
        agent = AgentSettings(
            coordinator=self.url,
            token=self.token,
            job=settings.job_name,
            node=node,
            script=str(settings.script.absolute()),
            folder=str(self._sockets),
            digest=script_digest(settings.script, settings.args),
            workers=settings.workers_per_node,
            args=settings.args,
            cwd=os.getcwd(),
            zygote=self._zygote_path,
            environment=settings.environment,
            preload=settings.preload,
            log_folder=str(settings.log_folder.absolute()) if settings.log_folder else "",
            checkpoint_dir=str(settings.checkpoint_dir.absolute()) if settings.checkpoint_dir else "",
            checkpoint_every=settings.checkpoint_every,
            verify_state=settings.verify_state,
            slots=settings.slots,
            parent=os.getpid(),
            quiet=True,
        )
        child = spawn(AgentOrder(settings=agent), settings.environment)
        self._agents[node] = child
        self._task(self._await_agent(child))

    # ---- watching ----

    async def _keep_coordinator(self) -> None:
        """Start the coordinator, and again whenever it dies without having ended the job."""
        loop = asyncio.get_running_loop()
        while not self._over.done():
            self._coordinator = self._start_coordinator()
            code = await self._coordinator.wait()
            if self._over.done():
                return
            if code >= 0 and code != EXIT_CRASHED:
                self._over.set_result(code)
                return
            now = loop.time()
            self._restarts = [at for at in self._restarts if at > now - _RESTARTS_WITHIN_S] + [now]
            if len(self._restarts) > _MAX_RESTARTS or self.settings.store == "memory:":
                _log.error("the coordinator died, and is not started again")
                self._over.set_result(EXIT_FAILED)
                return
            _log.warning("the coordinator died; another takes over")

    async def _await_agent(self, child: ChildProcess) -> None:
        code = await child.wait()
        if code == TAIL_FAILED:
            self._tail_failed = True
        if self._over.done() or any(agent.code is None for agent in self._agents.values()):
            return
        # Nobody is left. The coordinator may know why; a user may ask for a new node.
        await asyncio.sleep(_ALL_GONE_S)
        if not self._over.done() and all(agent.code is not None for agent in self._agents.values()):
            _log.error("all nodes are gone")
            self._over.set_result(EXIT_FAILED)

    async def _follow(self, follower: Follower) -> None:
        async for event in follower.events():
            self._on_event(event)

    async def _serve_requests(self, follower: Follower) -> None:
        async for count in follower.node_requests():
            for _ in range(count):
                if not self._over.done():
                    self._start_agent()

    # ---- ending ----

    async def _scripts_end(self) -> None:
        """The job is done; what the scripts still do after their last step is theirs."""
        waits = [asyncio.ensure_future(agent.wait()) for agent in self._agents.values() if agent.code is None]
        hurry = asyncio.ensure_future(self._hurry.wait())
        everybody = asyncio.gather(*waits)
        await asyncio.wait((everybody, hurry), return_when=asyncio.FIRST_COMPLETED)
        hurry.cancel()
        everybody.cancel()
        await asyncio.gather(everybody, hurry, return_exceptions=True)

    async def _end(self) -> None:
        """End every process, within five seconds; agents hear it from the coordinator, else by a signal."""
        hurry = self._hurry.is_set()
        coordinator, zygote = self._coordinator, self._zygote
        agents = list(self._agents.values())
        await end_all([coordinator] if coordinator else [], grace_s=0.1 if hurry else _COORDINATOR_GRACE_S)
        await end_all(agents, grace_s=0.1 if hurry else _AGENT_GRACE_S)
        if zygote is not None:
            if zygote.stdin is not None:
                zygote.stdin.close()  # its lifeline: it kills what is left and ends
            await end_all([zygote], grace_s=0.5)
            zygote.reap()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for child in [*agents, *([coordinator] if coordinator else [])]:
            child.reap()
        if self.settings.registry is not None:
            live_jobs(self.settings.registry)  # forgets a coordinator that had to be killed

    def _task(self, coroutine: Any) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)
        return task

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not self._over.done():
            self._over.set_exception(error)


async def launch(
    settings: LaunchSettings, on_event: Callable[[dict[str, Any]], None], say: Callable[[str], None]
) -> int:
    """Run a job on this machine; return its exit code. SIGINT and SIGTERM end it.

    Args:
        on_event: called with each event of the job, as it happens.
        say: prints one line for the user.

    Raises:
        BadInputError: the settings cannot work; nothing was started.
    """
    settings.check()
    checkpoints = intact_checkpoints(settings.checkpoint_dir, say)
    with reserved_port(settings.port) as port, job_folders(settings) as (folder, sockets):
        launcher = Launcher(settings, port, folder, sockets, checkpoints, on_event)
        loop = asyncio.get_running_loop()
        codes = {signal.SIGINT: EXIT_INTERRUPTED, signal.SIGTERM: 128 + signal.SIGTERM}
        for number, code in codes.items():
            loop.add_signal_handler(number, launcher.interrupt, code)
        try:
            return await launcher.run()
        finally:
            for number in codes:
                loop.remove_signal_handler(number)
