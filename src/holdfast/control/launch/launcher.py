"""A whole job on one machine: starts coordinator, zygote and agents, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import secrets
import signal
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

from holdfast.control.agent.settings import AgentSettings
from holdfast.control.agent.snapshots.keeper import find_abandoned_snapshots, remove_snapshots
from holdfast.control.checkpoint_lock import lock_owner, locked_directory
from holdfast.control.coordinator.known_checkpoints import load_usable_checkpoints
from holdfast.control.coordinator.settings import ServerSettings
from holdfast.control.failure_classes import read_rules
from holdfast.control.file_limit import describe_limit, raise_file_limit, room_for_nodes
from holdfast.control.launch.children import AgentOrder, CoordinatorOrder, spawn
from holdfast.control.launch.follow import Follower
from holdfast.control.launch.job_view import JobProgress
from holdfast.control.launch.ports_and_folders import job_folders, reserved_port
from holdfast.control.launch.settings import LaunchSettings, script_digest
from holdfast.control.launch.standby_refill import StandbyRefill
from holdfast.control.link.forking import start_zygote
from holdfast.control.owned_folders import remove_abandoned_folders
from holdfast.control.processes import (
    ChildProcess,
    ProcessHandle,
    describe_exit,
    end_all,
    ending_signals,
    wait_or_end_frozen,
)
from holdfast.control.registry import live_jobs
from holdfast.coordination.agent.machine import TAIL_FAILED
from holdfast.coordination.config import CoordinatorConfig
from holdfast.errors import (
    EXIT_AFTER_SIGNAL,
    EXIT_BAD_INPUT,
    EXIT_DONE,
    EXIT_ENDED,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_OUR_FAULT,
    BadInputError,
)
from holdfast.protocol.events import NodeLeft, ReadEvent
from holdfast.protocol.record import KnownCheckpoint

_log = logging.getLogger("holdfast.run")

#: a coordinator that dies more often than this in a minute is not started again
_MAX_RESTARTS = 10
_RESTARTS_WITHIN_S = 60.0
#: seconds between two coordinators that cannot use their input
_RETRY_S = 5.0
_ALL_GONE_S = 10.0
_COORDINATOR_GRACE_S = 1.5
_AGENT_GRACE_S = 2.0
_LAST_EVENTS_S = 1.0
_SHUTDOWN_PAUSE_S = 0.1
#: Seconds between two requests to end an interrupted job, and seconds until the launcher gives up. A coordinator that
#: waits for a checkpoint gives up earlier.
_ASK_AGAIN_S = 0.5
_SAVE_S = 45.0
_UNSAVED_S = 1.0


class Director(Protocol):
    """Decides when nodes start and end, for a job that does not start with all of them."""

    @property
    def names(self) -> frozenset[str]:
        """All node names that it will ever use."""
        ...

    @property
    def waits_without_nodes(self) -> bool:
        """Whether a job without any live node waits for more, and does not fail."""
        ...

    def on_event(self, event: ReadEvent) -> None:
        """Handle an event of the job."""
        ...

    async def run(self, launcher: Launcher) -> None:
        """Start and kill nodes while the job runs. Cancelled at its end."""
        ...


class Launcher:
    """The processes of one job."""

    def __init__(
        self,
        settings: LaunchSettings,
        port: int,
        folder: Path,
        sockets: Path,
        checkpoints: tuple[KnownCheckpoint, ...],
        on_event: Callable[[ReadEvent], None],
        say: Callable[[str], None],
        director: Director | None = None,
        *,
        alone: bool = False,
    ) -> None:
        """Prepare a job; `run` starts it.

        Args:
            settings: of the job.
            port: reserved for the coordinator.
            folder: for the job's files.
            sockets: private folder for sockets, with a short name.
            checkpoints: intact checkpoints of an earlier run.
            on_event: called with each event of the job.
            say: prints one line for the user.
            director: decides about further nodes, or None.
            alone: whether no process of an earlier run of this job lives.
        """
        self.settings = settings
        self._alone = alone
        self._spec = settings.spec.settled(os.getcwd())
        self._rules = read_rules(self._spec.recovery.failure_classes)
        self.url = f"http://127.0.0.1:{port}"
        self.token = secrets.token_urlsafe(32)
        self._port = port
        self._folder = folder
        self._sockets = sockets
        self._checkpoints = checkpoints
        self._on_event = on_event
        self._say = say
        self._progress = JobProgress(checkpoints)
        self._standbys = set(settings.standby_names)
        self._standby_refill = StandbyRefill(settings.standby_names, len(settings.start_names))
        self._director = director
        self._follower = Follower(self.url, self.token)
        self._agents: dict[str, ChildProcess] = {}
        self._coordinator: ChildProcess | None = None
        self._zygote: ChildProcess | None = None
        self._restarts: list[float] = []
        self._over: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._tasks: set[asyncio.Task[None]] = set()
        self._gave_up = False
        self._tail_failed = False
        self._concluded = False
        self._interrupted = False
        self._hurry = asyncio.Event()

    async def run(self) -> int:
        """Start the zygote, the coordinator and the nodes, wait for the job's end, and end all processes.

        Return the job's exit code: `EXIT_FAILED` if a script has failed after the job was done. After an interruption,
        print what is saved. Raises the first error of a background task, after the processes have ended.
        """
        async with self._follower:
            try:
                self._start_zygote()
                self._start_task(self._keep_coordinator())
                for name in (*self.settings.start_names, *self.settings.standby_names):
                    await self.start_node(name)
                following = self._start_task(self._follow())
                self._start_task(self._serve_requests())
                if self._director is not None:
                    self._start_task(self._director.run(self))
                code = await self._over
                await asyncio.wait((following,), timeout=_LAST_EVENTS_S)
                if code == EXIT_DONE and not self._concluded:
                    await self._wait_for_scripts()
            finally:
                await self._end()
        if self._spec.checkpoint.dir and code in (EXIT_ENDED, EXIT_INTERRUPTED):
            line = await asyncio.to_thread(self._progress.describe, self._spec.checkpoint.dir)
            self._say(f"holdfast: {line}")
        return EXIT_FAILED if code == EXIT_DONE and self._tail_failed else code

    def interrupt(self, number: signal.Signals) -> None:
        """Handle a signal.

        The first one ends the job, after a last checkpoint if it keeps any; the second one ends it at once; further
        ones shorten the wait for its processes.
        """
        if self._over.done():
            self._hurry.set()
        elif self._interrupted:
            self._over.set_result(EXIT_AFTER_SIGNAL[number.name])
        else:
            self._interrupted = True
            self._start_task(self._request_end(number))

    # ---- called by a director ----

    async def start_node(self, name: str) -> None:
        """Start the agent of a node, which starts its workers.

        Wait for an earlier agent of that name first, and remove its snapshots. Nothing is started once the job is over.
        """
        earlier = self._agents.get(name)
        if earlier is not None:
            await earlier.wait()
            remove_snapshots(self._agent_settings(name))
        if not self._over.done():
            child = spawn(
                AgentOrder(settings=self._agent_settings(name), log=self.settings.log), self.settings.environment
            )
            self._agents[name] = child
            self._start_task(self._await_agent(name, child))

    def kill_node(self, name: str, also: Iterable[ProcessHandle] = ()) -> None:
        """SIGKILL a node's agent, and then the processes in `also`. The zygote kills the others.

        Nothing is done once the job is over. Raises KeyError for a node that was never started.
        """
        if not self._over.done():
            for process in (self._agents[name], *also):
                process.send_signal(signal.SIGKILL)

    async def conclude(self, why: str) -> None:
        """End the job with exit code 0 although it is not done; it can be continued later.

        Repeat the request until the coordinator accepts it.
        """
        self._concluded = True
        while not self._over.done() and not await self._follower.shutdown(EXIT_DONE, why):
            await asyncio.sleep(_SHUTDOWN_PAUSE_S)  # the coordinator is being started again

    async def _request_end(self, number: signal.Signals) -> None:
        """Request the end of the job after a signal, with a last checkpoint if the job keeps any.

        Repeat it, because the coordinator may die. If the job does not end in time, set the exit code of the signal.
        """
        save = bool(self._spec.checkpoint.dir)
        if save:
            self._say("holdfast: the job is saved, then it ends; another signal ends it at once")
        loop, code = asyncio.get_running_loop(), EXIT_AFTER_SIGNAL[number.name]
        until = loop.time() + (_SAVE_S if save else _UNSAVED_S)
        while not self._over.done() and loop.time() < until:
            await self._follower.shutdown(code, f"ended by {number.name}", save=save)
            await asyncio.wait((self._over,), timeout=_ASK_AGAIN_S)
        if not self._over.done():
            self._over.set_result(code)

    # ---- starting ----

    def _start_zygote(self) -> None:
        """Start the job's own zygote, unless the settings name one that runs already."""
        if self.settings.zygote:
            return  # that zygote outlives this job
        self._zygote = start_zygote(
            self._zygote_path,
            environment=self.settings.environment,
            remove=str(self._sockets),
            abandoned=find_abandoned_snapshots(self._spec.checkpoint.snapshot_dir),
            preload=self.settings.preload,
        )

    @property
    def _zygote_path(self) -> str:
        return self.settings.zygote or str(self._sockets / "zygote.sock")

    def _start_coordinator(self) -> ChildProcess:
        """Start a coordinator process. After a restart, it takes over the job of the one before."""
        settings = self.settings
        server = ServerSettings(
            # The outcome that a previous coordinator has written counts, but not an outcome from an earlier run.
            config=CoordinatorConfig(spec=self._spec, rules=self._rules, takeover=bool(self._restarts)),
            port=self._port,
            token=self.token,
            store=settings.store or f"sqlite:{self._folder / 'store.sqlite'}",
            registry=settings.registry,
            checkpoints=self._checkpoints,
            launched=True,
            alone=self._alone and not self._restarts,
        )
        return spawn(CoordinatorOrder(settings=server, parent=os.getpid(), log=settings.log), settings.environment)

    def _agent_settings(self, node: str) -> AgentSettings:
        """Return the settings of the agent of a node."""
        settings = self.settings
        return AgentSettings(
            spec=self._spec,
            coordinator=self.url,
            token=self.token,
            node=node,
            folder=str(self._sockets),
            digest=script_digest(self._spec.script, self._spec.args),
            cwd=os.getcwd(),
            zygote=self._zygote_path,
            environment=settings.environment,
            preload=settings.preload,
            log_folder=self._spec.output.log_dir
            or (str(settings.log_folder.absolute()) if settings.log_folder else ""),
            shows=settings.log_folder is None,
            parent=os.getpid(),
            quiet=True,
            standby=node in self._standbys,
            of_run=True,
        )

    # ---- watching ----

    async def _keep_coordinator(self) -> None:
        """Run a coordinator, and start another one whenever it dies without having ended the job.

        The job fails if coordinators die too often, or if the store is lost with them. If a restarted one cannot use
        its input, the next one starts after `_RETRY_S`. Any other exit code becomes that of the job.
        """
        loop = asyncio.get_running_loop()
        while not self._over.done():
            self._coordinator = self._start_coordinator()
            code = await wait_or_end_frozen(self._coordinator)
            if self._over.done():
                return
            if code == EXIT_BAD_INPUT and self._restarts:
                # Its store or its files cannot be used now, as it has printed. The user may repair them.
                self._say(f"holdfast: training goes on without a coordinator; the next one starts in {_RETRY_S:g} s")
                await asyncio.sleep(_RETRY_S)
                continue
            if code >= 0 and code != EXIT_OUR_FAULT:
                self._over.set_result(code)
                return
            now = loop.time()
            self._restarts = [at for at in self._restarts if at > now - _RESTARTS_WITHIN_S] + [now]
            if len(self._restarts) > _MAX_RESTARTS or self.settings.store == "memory:":
                _log.error("the coordinator died, and is not started again")
                self._over.set_result(EXIT_FAILED)
                return
            _log.warning("the coordinator died; another takes over")

    async def _await_agent(self, name: str, child: ChildProcess) -> None:
        """Wait for the end of an agent, remove its node's snapshots, and start a standby if one is missing.

        Report an end before the node has joined, and note a script that failed after the job was done. If no node is
        left, the job may fail.
        """
        code = await wait_or_end_frozen(child)
        if code == TAIL_FAILED:
            self._tail_failed = True
        if self._agents[name] is child:
            remove_snapshots(self._agent_settings(name))
        ends = self._interrupted or self._over.done() or self._progress.over
        if code and not ends and not self._progress.has_joined(child.pid):
            self._say(f"holdfast: {name} has ended before it joined the job: {describe_exit(code)}")
        if self._agents[name] is child:
            self._standby_refill.on_agent_ended(name, code)
            await self._refill()
        await self._fail_without_nodes()

    async def _fail_without_nodes(self) -> None:
        """Fail the job if it has had no node for `_ALL_GONE_S`, unless its director waits for more."""
        if not self._has_no_nodes() or (self._director is not None and self._director.waits_without_nodes):
            return
        # The coordinator may know why; a user may ask for a new node.
        await asyncio.sleep(_ALL_GONE_S)
        if self._has_no_nodes():
            _log.error("all nodes are gone")
            self._over.set_result(EXIT_FAILED)

    def _has_no_nodes(self) -> bool:
        """Return whether the job has no node left, neither of this launcher nor of others.

        Return False once it is over.
        """
        own = any(agent.code is None for agent in self._agents.values())
        return not (self._over.done() or own or self._progress.nodes - self._agents.keys())

    async def _follow(self) -> None:
        """Pass each event to the director, the job's progress, the standby refill and `on_event`, and start missing
        standbys.

        After each node that left, check whether the job has no nodes any longer and must fail.
        """
        async for event in self._follower.events():
            if self._director is not None:
                self._director.on_event(event)
            self._progress.on_event(event)
            if isinstance(event, NodeLeft):
                self._start_task(self._fail_without_nodes())
            self._standby_refill.on_event(event)
            self._on_event(event)
            await self._refill()

    async def _refill(self) -> None:
        """Start standbys for the ones that have replaced nodes or died, as far as the limit on open files allows.

        Say once if no more are started. Do nothing with a director, or at the end.
        """
        if self._director is not None or self._interrupted or self._over.done():
            return  # A director decides which nodes there are.
        alive = sum(agent.code is None for agent in self._agents.values())
        room = room_for_nodes(self._spec.workers_per_node) - alive
        for _ in range(min(self._standby_refill.count_missing(alive), room)):
            name = self._free_name("standby")
            self._standbys.add(name)
            self._standby_refill.on_standby_started(name)
            await self.start_node(name)
        if self._standby_refill.has_given_up and not self._gave_up:
            self._say("holdfast: no more standbys are started: those that were have ended before they were warm")
        self._gave_up = self._standby_refill.has_given_up

    async def _serve_requests(self) -> None:
        """Start the nodes that users request, forever. If the limit on open files allows no more, say so."""
        async for count, name in self._follower.node_requests():
            for asked in range(count):
                room = room_for_nodes(self._spec.workers_per_node)
                if sum(agent.code is None for agent in self._agents.values()) >= room:
                    self._say(f"holdfast: {count - asked} more nodes are not started: {describe_limit(room)}")
                    break
                await self.start_node(name or self._free_name())

    def _free_name(self, kind: str = "node") -> str:
        """Return the first name KIND-0, KIND-1 and so on that neither an agent nor the director uses."""
        taken = self._agents.keys() | (self._director.names if self._director is not None else frozenset[str]())
        return next(name for number in itertools.count() if (name := f"{kind}-{number}") not in taken)

    # ---- ending ----

    async def _wait_for_scripts(self) -> None:
        """Wait until the agents of all joined nodes have ended, or a signal comes.

        Scripts may still run code after their last step.

        Do not wait for nodes that have not joined, because they would not learn of the end.
        """
        joined = [agent for agent in self._agents.values() if agent.pid in self._progress.agents]
        waits = [asyncio.ensure_future(agent.wait()) for agent in joined if agent.code is None]
        hurry = asyncio.ensure_future(self._hurry.wait())
        all_ended = asyncio.gather(*waits)
        await asyncio.wait((all_ended, hurry), return_when=asyncio.FIRST_COMPLETED)
        hurry.cancel()
        all_ended.cancel()
        await asyncio.gather(all_ended, hurry, return_exceptions=True)

    async def _end(self) -> None:
        """End the coordinator, then the agents, then the zygote, and cancel all tasks.

        Remove the snapshots of all nodes. It takes at most about five seconds, less after a further signal.
        """
        hurry = self._hurry.is_set()
        coordinator, zygote = self._coordinator, self._zygote
        agents = list(self._agents.values())
        await end_all([coordinator] if coordinator else [], grace_s=0.1 if hurry else _COORDINATOR_GRACE_S)
        await end_all(agents, grace_s=0.1 if hurry else _AGENT_GRACE_S)
        for name in self._agents:
            remove_snapshots(self._agent_settings(name))
        if zygote is not None:
            if zygote.stdin is not None:
                zygote.stdin.close()  # then it kills the remaining processes and ends
            await end_all([zygote], grace_s=0.5)
            zygote.reap()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for child in [*agents, *([coordinator] if coordinator else [])]:
            child.reap()
        if self.settings.registry is not None:
            live_jobs(self.settings.registry)  # forgets a coordinator that had to be killed

    def _start_task(self, coroutine: Any) -> asyncio.Task[None]:
        """Run a coroutine in the background. Its failure ends the job with that error."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)
        return task

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        """Forget a task. If it has failed, make its error the result of the job, unless the job is over."""
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not self._over.done():
            self._over.set_exception(error)


async def launch(
    settings: LaunchSettings,
    on_event: Callable[[ReadEvent], None],
    say: Callable[[str], None],
    director: Director | None = None,
) -> int:
    """Run a job on this machine until its end, and return its exit code.

    SIGINT, SIGTERM and SIGHUP end it, saved if it has checkpoints.

    Args:
        on_event: called with each event of the job, as it happens.
        say: prints one line for the user.
        director: has further nodes started, and killed, while the job runs.

    Raises:
        BadInputError: the settings cannot work; nothing was started.
    """
    settings.check()
    raise_file_limit()
    room, nodes = (
        room_for_nodes(settings.spec.workers_per_node),
        len(settings.start_names) + len(settings.standby_names),
    )
    if nodes > room:
        raise BadInputError(f"the job begins with {nodes} nodes on this machine: {describe_limit(room)}")
    spec = settings.spec
    owner = lock_owner(spec.settled(os.getcwd()).name, secrets.token_hex(8), spec.output.events)
    with (
        reserved_port(settings.port) as port,
        job_folders(settings) as (folder, sockets),
        contextlib.ExitStack() as stack,
    ):
        lock = locked_directory(spec.checkpoint.dir, owner, say)
        stale_owner = await asyncio.to_thread(stack.enter_context, lock)
        alone = stale_owner is not None and (stale_owner.job, stale_owner.events) == (owner.job, owner.events)
        checkpoints = load_usable_checkpoints(spec.checkpoint.dir, say)
        remove_abandoned_folders(find_abandoned_snapshots(spec.checkpoint.snapshot_dir))
        launcher = Launcher(settings, port, folder, sockets, checkpoints, on_event, say, director, alone=alone)
        loop = asyncio.get_running_loop()
        numbers = ending_signals()
        for number in numbers:
            loop.add_signal_handler(number, launcher.interrupt, number)
        try:
            return await launcher.run()
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)
