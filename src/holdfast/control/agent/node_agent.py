"""The node agent: one per node. Passes messages between workers and coordinator, and stands for the node's life.

What it decides is in `holdfast.coordination.agent.machine`; this is the shell around it: the connection and the clock.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import shutil
import signal
import socket
import ssl
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from holdfast.clock import Clock, ShiftedClock, SystemClock, until_mark
from holdfast.control.addresses import is_on_this_host
from holdfast.control.agent.channel import ChannelMaker, ChannelRefusedError, CoordinatorChannel, open_channel
from holdfast.control.agent.gpus import watch_gpus
from holdfast.control.agent.memory import LOOK_S, MemoryReading, MemoryRing
from holdfast.control.agent.node_probes import connection_error, serve_probes
from holdfast.control.agent.preflight import Preflight
from holdfast.control.agent.settings import AgentSettings
from holdfast.control.agent.snapshots.keeper import SnapshotKeeper
from holdfast.control.agent.stacks import make_worker_stacks
from holdfast.control.agent.workforce import Workforce, WorkforceOwner
from holdfast.control.link.checkpoints.lanes import CheckpointLanes
from holdfast.control.link.checkpoints.spool import claim_part
from holdfast.control.link.checkpoints.store import CheckpointStore
from holdfast.control.link.framing import PartHanded, ToWorkerProcess
from holdfast.control.link.silenced_network import block_incoming_tcp
from holdfast.control.processes import die_with_parent, ending_signals
from holdfast.coordination.agent.identity import EndingNotice, NodeIdentity
from holdfast.coordination.agent.instructions import (
    AdmitReaders,
    AgentInstruction,
    AnswerRequest,
    DropParts,
    EndAgent,
    FetchParts,
    KillHung,
    OpenSnapshotMemory,
    Reconnect,
    Replay,
    SendToCoordinator,
    SendToWorkers,
    StartWorker,
    UpdateCheckpoints,
)
from holdfast.coordination.agent.known_plans import PlanBuilder
from holdfast.coordination.agent.machine import AgentMachine
from holdfast.coordination.timing.reading import ProgressAccount, Reading
from holdfast.environment import TOKEN
from holdfast.errors import EXIT_BAD_INPUT, EXIT_DONE, EXIT_ENDED, EXIT_FAILED, BadInputError
from holdfast.protocol.layouts.group_messages import UnitWord
from holdfast.protocol.messages.agent import (
    AddressProbed,
    CoordinatorMessage,
    GpusRead,
    NodeFault,
    OutputFailed,
    ProbeAddress,
    Welcome,
    WorkerDown,
)
from holdfast.protocol.messages.gpus import GpuFacts
from holdfast.protocol.messages.orders import Inject
from holdfast.protocol.messages.progress import MemoryTaken, Probe, ProbeAnswer, Stacks, TakeMemory, TakeStacks
from holdfast.protocol.messages.worker import CheckpointNews, WorkerMessage
from holdfast.protocol.names import worker_id
from holdfast.protocol.state import SnapshotPart
from holdfast.storage import storage_at

_log = logging.getLogger("holdfast.agent")

_FIRST_BACKOFF_S = 0.02
_LAST_BACKOFF_S = 0.5
_UNAUTHORISED = (401, 403)
#: A clock that differs by this many seconds from the passed time was set, not only corrected.
_CLOCK_SET_S = 1.0

StartTask = Callable[[Coroutine[Any, Any, None]], None]


class NodeWorkers(Protocol):
    """The workers of a node, as its agent uses them. `Workforce` documents the methods."""

    async def open(self) -> None: ...

    async def end(self) -> None: ...

    async def close(self) -> None: ...

    def replace(self, worker: str) -> None: ...

    def pass_on(self, workers: Sequence[str], order: ToWorkerProcess) -> None: ...

    def send_signal(self, number: int) -> None: ...

    def find_stopped(self) -> set[str]: ...

    def readings(self, now: float, closely: Collection[str]) -> dict[str, Reading]: ...

    def accounts(self) -> dict[str, ProgressAccount]: ...

    def read_memory(self) -> MemoryReading: ...

    def read_stacks(self) -> Awaitable[dict[str, str]]: ...

    def kill_hung(self, worker: str, why: str) -> None: ...


class Agent:
    """One node. `run` returns the exit code once the node's part in the job has ended and its workers are gone."""

    def __init__(
        self,
        settings: AgentSettings,
        clock: Clock,
        *,
        workers: Callable[[AgentSettings, WorkforceOwner, StartTask], NodeWorkers] = Workforce,
        channel: ChannelMaker = CoordinatorChannel,
        plans: PlanBuilder | None = None,
    ) -> None:
        """Begin without workers and without a connection.

        Args:
            workers: makes the node's workers; tests and benchmarks use others than processes.
            channel: makes the channel of each connection.
            plans: makes plans from messages; agents that share a process can share plans.
        """
        self.settings = settings
        self.clock = clock
        #: Members connect to it to check that they reach this node, before it may join.
        self._probe_listener: asyncio.Server | None = None
        node = NodeIdentity(
            job=settings.spec.name,
            node=settings.node,
            workers=settings.spec.workers_per_node,
            digest=settings.digest,
            agent_pid=os.getpid(),
            rack=settings.rack,
            zone=settings.zone,
            failure_rate=settings.failure_rate,
            standby=settings.standby,
            grant=settings.grant,
            host=socket.gethostname()[:256],
            address=settings.advertise[:256],
            beside_coordinator=is_on_this_host(settings.coordinator),
        )
        self.machine = AgentMachine(node, partial(secrets.token_hex, 8), plans)
        self.machine.watch.report_interval_s = settings.spec.experiments.own_times_every
        self._preflight = Preflight(
            workers=node.workers,
            folder=settings.folder,
            host=settings.advertise,
            program=settings.spec.recovery.preflight,
        )
        self._memory = MemoryRing()
        self._snapshots = SnapshotKeeper(settings, self._on_snapshot_part)
        self._store = self._open_store() if settings.parts else None
        self._tasks: set[asyncio.Task[None]] = set()
        self.workforce = workers(settings, self, self._start_task)
        self._make_channel = channel
        self._channel: CoordinatorChannel | None = None
        self._notice = EndingNotice(settings.spec.recovery.grace)
        #: this node's link is down: fault injection
        self._silent = False
        self._end_gpu_watch: Callable[[], None] = lambda: None
        self._wall_ahead_s = clock.time() - clock.monotonic()
        self._loop = asyncio.get_running_loop()
        self._exit: asyncio.Future[EndAgent] = self._loop.create_future()

    async def run(self) -> int:
        """Start the workers, connect to the coordinator, and serve until the node's part in the job has ended.

        Then end the workers, and return the exit code. After an end notice, `EXIT_ENDED` replaces success, because the
        job may continue elsewhere. Raises the first error of a task.
        """
        try:
            await self._open_probe_listener()
            await self.workforce.open()
            self._execute(self.machine.start(self._snapshots.open()))
            self._start_task(self._stay_connected())
            self._start_task(self._watch())
            if self.settings.spec.experiments.watch:
                self._start_task(self._detect_hangs())
                self._start_task(self._sample_memory())
                self._end_gpu_watch = watch_gpus(self._on_gpus).set
            end = await self._exit
            await self.workforce.end()
        finally:
            await self._close()
        # After an order to end, the exit code says that the agent has ended, and not how the job goes.
        return EXIT_ENDED if self._notice.is_given and end.exit_code == EXIT_DONE else end.exit_code

    async def _open_probe_listener(self) -> None:
        """Listen for members that check whether they reach this node, and add the port to the node's identity.

        Nothing is done without `preflight`, or if no port can be opened.
        """
        settings = self.settings
        self._probe_listener = await serve_probes(settings.advertise) if settings.preflight else None
        if self._probe_listener is not None:
            port = self._probe_listener.sockets[0].getsockname()[1]
            self.machine.node = replace(self.machine.node, probe_port=port)

    def end(self, code: int, why: str) -> None:
        """End the node: its workers, then the agent with this exit code."""
        self._execute(self.machine.end(code, why))

    def on_end_notice(self, code: int, why: str) -> None:
        """Notify the coordinator that the node must end, and end it once the job can continue without it.

        It ends after its grace at the latest; at once if there is none, if the coordinator never welcomed the node, or
        if this is called again.

        Args:
            code: exit code of the agent.
            why: the reason, for messages.
        """
        notice = self._notice
        if not notice.grace_s or notice.is_given or not self.machine.ever_welcomed:
            self.end(code, why)
            return
        _log.warning("node %s is to end: it leaves within %g s", self.settings.node, notice.grace_s)
        self._execute(notice.start(self.clock.monotonic()))
        self._start_task(self._end_later(code, f"{why}, after its grace of {notice.grace_s:g} s"))

    async def _end_later(self, code: int, why: str) -> None:
        """After the grace, tell the coordinator that the node leaves, and end it."""
        await asyncio.sleep(self._notice.grace_s)
        self._execute(self._notice.leave())
        self.end(code, why)

    def _execute(self, instructions: Iterable[AgentInstruction]) -> None:
        """Execute the machine's instructions in order.

        They send to coordinator or workers, start or kill a worker, answer a request, change snapshots and checkpoints,
        reconnect, or end the agent.
        """
        for instruction in instructions:
            match instruction:
                case SendToCoordinator() | Replay():
                    self._send(instruction)
                case SendToWorkers(workers, order):
                    self.workforce.pass_on(workers, order)
                case StartWorker(worker):
                    self.workforce.replace(worker)
                case KillHung(worker, why):
                    self.workforce.kill_hung(worker, why)
                case AnswerRequest(ask):
                    self._answer_request(ask)
                case FetchParts() | DropParts() | AdmitReaders() | OpenSnapshotMemory() | UpdateCheckpoints():
                    self._execute_storage(instruction)
                case Reconnect(why, blame):
                    _log.log(logging.WARNING if blame else logging.INFO, "%s", why)
                    self._close_channel()
                case EndAgent():
                    self._set_exit(instruction)

    def _execute_storage(
        self, work: FetchParts | DropParts | AdmitReaders | OpenSnapshotMemory | UpdateCheckpoints
    ) -> None:
        """Execute an instruction: fetch or drop parts of snapshots, set the readers' key, serve parts, or update
        checkpoints.

        After the memory for snapshots is opened, the machine's answer is executed, too. An update, which seals or
        removes checkpoints, is ignored if the job keeps none.
        """
        match work:
            case FetchParts(wanted):
                self._snapshots.fetch(wanted)
            case DropParts(parts, why):
                self._snapshots.forget(parts, why)
            case AdmitReaders(key):
                self._snapshots.admit(key)
            case OpenSnapshotMemory():
                self._execute(self.machine.on_memory_opened(self._snapshots.open(always=True), self.clock.monotonic()))
            case UpdateCheckpoints(order):
                if self._store is not None:
                    self._store.execute(order)

    def _send(self, what: SendToCoordinator | Replay) -> None:
        """Send messages to the coordinator. They are dropped without a connection, or while a fault cuts the link."""
        if self._channel is None or self._silent:
            return
        if isinstance(what, SendToCoordinator):
            self._channel.send(what.message)
        else:
            self._channel.replay(what.messages)

    def _close_channel(self) -> None:
        if self._channel is not None:
            self._channel.close()

    def _set_exit(self, end: EndAgent) -> None:
        if not self._exit.done():
            self._exit.set_result(end)

    # ---- the connection to the coordinator ----

    async def _stay_connected(self) -> None:
        """Connect to the coordinator, and reconnect with growing pauses whenever that fails or the connection ends.

        Before the first connection of each session, check whether the node is fit; the coordinator gets the result.
        Training continues meanwhile. Return once the agent ends, or a fault has cut its network.
        """
        settings, machine = self.settings, self.machine
        backoff, looked_at, unfit = _FIRST_BACKOFF_S, "", ""
        secure = settings.coordinator.startswith("https:")
        tls = ssl.create_default_context(cafile=settings.tls_ca or None) if secure else None
        while not (self._exit.done() or self._silent):
            if machine.session != looked_at:  # At the start, and with new workers after a removal.
                unfit, looked_at = await self._preflight.unfit() if settings.preflight else "", machine.session
            try:
                channel = await open_channel(
                    settings.coordinator, settings.token, self._on_message, tls=tls, make=self._make_channel
                )
            except ChannelRefusedError as error:
                self._on_refused(error)
            except OSError as error:  # TimeoutError too
                _log.debug("no coordinator: %s", error)
            else:
                self._channel = channel
                self._execute(machine.on_connected(self.clock.monotonic(), wall=self.clock.time(), unfit=unfit))
                self._execute(self._notice.repeat(self.clock.monotonic()))
                await channel.wait_closed()
                if machine.is_welcomed:
                    backoff = _FIRST_BACKOFF_S
                    if machine.over is None:
                        _log.info(
                            "lost the connection to the coordinator: the workers train on, and this node reconnects"
                        )
                self._channel = None
                machine.on_disconnected()
            await asyncio.sleep(backoff)
            backoff = min(2 * backoff, _LAST_BACKOFF_S)

    def _on_refused(self, error: ChannelRefusedError) -> None:
        # Only at the start: training that runs is not thrown away because something else answers on the port.
        if error.status in _UNAUTHORISED and not self.machine.ever_welcomed:
            self.end(
                EXIT_BAD_INPUT,
                f"{self.settings.coordinator} refuses the token ({error}): give it in {TOKEN} or --token-file",
            )

    def _on_message(self, message: CoordinatorMessage) -> None:
        """Inject a fault if the message asks for one, else pass it to the machine and execute its instructions."""
        if isinstance(message, Welcome):
            settings = self.settings
            _log.info("node %s is connected to job %s at %s", settings.node, settings.spec.name, settings.coordinator)
        if isinstance(message, NodeFault):
            self._inject_fault(message)
        else:
            self._execute(self.machine.on_message(message, self.clock.monotonic()))

    def _inject_fault(self, fault: NodeFault) -> None:
        """Inject a fault into this node: move its clock, cut its network, or stop or kill its workers and this process.

        With `exit`, the workers are killed and this process exits.
        """
        _log.warning("injected fault: %s", fault.fault)
        match fault.fault:
            case "clock-jump":
                self.clock = ShiftedClock(self.clock, fault.by_s)
            case "link-down":
                self.workforce.pass_on(self.machine.workers, Inject(fault="link-down"))
                self._silent = True
                block_incoming_tcp()
            case _:
                number = signal.SIGSTOP if fault.fault == "freeze" else signal.SIGKILL
                self.workforce.send_signal(number)
                if fault.fault == "exit":
                    os._exit(EXIT_FAILED)
                os.kill(os.getpid(), number)

    # ---- events of the workers ----

    def _open_store(self) -> CheckpointLanes:
        """Return the writer of the workers' parts of checkpoints, so that parts can be written after a worker's end.

        Parts left by an earlier agent are deleted. News of each write go to the machine like a worker's message.
        """
        settings, loop = self.settings, asyncio.get_running_loop()
        shutil.rmtree(settings.parts, ignore_errors=True)  # Left by an agent that was killed.
        os.makedirs(settings.parts, mode=0o700, exist_ok=True)

        def send_news(news: CheckpointNews) -> None:
            with contextlib.suppress(RuntimeError):  # A hanging write may end after the agent.
                loop.call_soon_threadsafe(self.on_worker_message, news)

        storage, rate = storage_at(settings.spec.checkpoint.dir), settings.spec.checkpoint.rate
        worker = worker_id(settings.node, 0, "0")
        first, second = (CheckpointStore(storage, send_news, worker=worker, rate=rate) for _ in range(2))
        return CheckpointLanes(first, second)

    def on_part(self, handed: PartHanded) -> None:
        """Claim a worker's part of a checkpoint, and enqueue it for writing.

        An invalid part is logged and left out. Ignored if the job keeps no checkpoints.
        """
        if self._store is None:
            return
        try:
            self._store.write(claim_part(handed, Path(self.settings.parts)))
        except (OSError, ValueError) as error:
            _log.error("a part of a checkpoint is left out: %s", error)

    def on_worker_message(self, message: WorkerMessage | UnitWord) -> None:
        """Pass a worker's message to the machine, and execute its instructions."""
        self._execute(self.machine.on_worker_message(message, self.clock.monotonic()))

    def on_worker_exit(self, down: WorkerDown, *, clean: bool) -> None:
        """Pass the end of a worker's process to the machine, and execute its instructions."""
        self._execute(self.machine.on_worker_ended(down, self.clock.monotonic(), clean=clean))

    def on_output_lost(self, file: str, why: str) -> None:
        """Log that the worker log `file` cannot be written, and report it to the coordinator. Called in any thread."""
        _log.warning("the log %s cannot be written: %s; lines are lost", file, why)
        failed = OutputFailed(file=file[-8192:], why=why)
        self._execute_threadsafe(lambda: self.machine.send_seen(failed, now=self.clock.monotonic()))

    def _on_gpus(self, gpus: tuple[GpuFacts, ...]) -> None:
        """Report the state of the GPUs; called in another thread."""
        self._execute_threadsafe(lambda: self.machine.on_gpus_read(GpusRead(gpus=gpus), self.clock.monotonic()))

    def _execute_threadsafe(self, call: Callable[[], Iterable[AgentInstruction]]) -> None:
        """Call the machine in the agent's loop, and carry out its instructions; from any thread."""
        with contextlib.suppress(RuntimeError):  # the agent has ended
            self._loop.call_soon_threadsafe(lambda: self._execute(call()))

    def _on_snapshot_part(self, part: SnapshotPart) -> None:
        self._execute(self.machine.on_part_fetched(part, self.clock.monotonic()))

    # ---- time, and the end ----

    async def _watch(self) -> None:
        """Call the machine periodically with the stopped workers, so that it sends heartbeats; check the clock."""
        while not self._exit.done():
            self._execute(self.machine.tick(self.clock.monotonic(), self.workforce.find_stopped()))
            self._check_clock()
            await asyncio.sleep(until_mark(self.clock.time(), self.machine.watch_s))

    def _check_clock(self) -> None:
        """Log if this machine's clock was set. No decision depends on it."""
        ahead_s = self.clock.time() - self.clock.monotonic()
        set_by_s, self._wall_ahead_s = ahead_s - self._wall_ahead_s, ahead_s
        if abs(set_by_s) > _CLOCK_SET_S:
            _log.warning("this machine's clock was set by %+.1f s; nothing is decided by it", set_by_s)

    async def _detect_hangs(self) -> None:
        """Read the workers' progress periodically, and report hung workers to the coordinator.

        At times, the watch also learns the usual times of activities, and may report them.
        """
        watch, now = self.machine.watch, self.clock.monotonic
        while not self._exit.done():
            await asyncio.sleep(watch.check_interval_s)
            readings = self.workforce.readings(now(), watch.closely_watched)
            if watch.is_learning_due(now()):
                self._execute(
                    self.machine.send_seen(*watch.learn(now(), readings, self.workforce.accounts()), now=now())
                )
            self._execute(self.machine.send_seen(*watch.find_late(now(), readings), now=now()))

    async def _sample_memory(self) -> None:
        """Record the workers' memory and state traffic every `LOOK_S` seconds."""
        while not self._exit.done():
            self._memory.add(self.clock.monotonic(), self.workforce.read_memory())
            await asyncio.sleep(LOOK_S)

    def _answer_request(self, ask: Probe | TakeStacks | TakeMemory | ProbeAddress) -> None:
        """Answer a request of the coordinator: with activities, memory samples, stacks, or the result of a connection.

        Stacks and connections take time, so a task sends their answers.
        """
        if isinstance(ask, ProbeAddress):
            self._start_task(self._probe(ask, self._channel))
            return
        force, machine, now = self.workforce, self.machine, self.clock.monotonic()
        if isinstance(ask, Probe):
            watch = machine.watch
            stands = watch.list_activities(now, force.readings(now, watch.closely_watched), force.find_stopped())
            self._execute(machine.send_seen(ProbeAnswer(number=ask.number, stands=stands), now=now))
        elif isinstance(ask, TakeMemory):
            self._memory.add(now, force.read_memory())
            samples = self._memory.samples_since(now, ask.seconds)
            self._execute(machine.send_seen(MemoryTaken(number=ask.number, samples=samples), now=now))
        else:
            accounts = force.accounts()  # Before any worker continues.
            self._start_task(self._send_stacks(ask.number, force.read_stacks(), accounts, now, self._channel))

    async def _probe(self, ask: ProbeAddress, channel: CoordinatorChannel | None) -> None:
        """Connect to an address of another node, and report the result."""
        error = await connection_error(ask.host, ask.port)
        self._send_answer(channel, AddressProbed(number=ask.number, error=error))

    def _send_answer(self, channel: CoordinatorChannel | None, answer: AddressProbed | Stacks) -> None:
        """Send an answer on the connection of its question: on a later one, another question may have its number."""
        if self._channel is channel:
            self._execute(self.machine.send_seen(answer, now=self.clock.monotonic()))

    async def _send_stacks(
        self,
        number: int,
        texts: Awaitable[dict[str, str]],
        accounts: dict[str, ProgressAccount],
        read_at: float,
        channel: CoordinatorChannel | None,
    ) -> None:
        self._send_answer(channel, make_worker_stacks(number, await texts, accounts, read_at))

    async def _close(self) -> None:
        """End tasks, connections and workers, and wait for the writes of checkpoints.

        Snapshots are removed if the agent ends in good order, and stay after an error.
        """
        channel = self._channel
        self._end_gpu_watch()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if channel is not None:
            channel.close()
            await channel.wait_closed()
        if self._probe_listener is not None:
            self._probe_listener.close()
        await self.workforce.close()
        if self._store is not None:
            await asyncio.to_thread(self._store.close)
            shutil.rmtree(self.settings.parts, ignore_errors=True)
        await self._snapshots.close(remove=self._exit.done() and self._exit.exception() is None)

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


async def live(settings: AgentSettings, clock: Clock, say: Callable[[str], None]) -> int:
    """Run an agent until its part in the job has ended, and return its exit code.

    SIGINT ends it at once, SIGTERM and SIGHUP (unless ignored) after its grace. Print why it ended. With `quiet`,
    another process prints that, and only a reason of this agent alone is printed. A pool's signal is not printed.
    """
    agent = Agent(settings, clock)
    loop = asyncio.get_running_loop()
    reasons = {number: f"ended by {number.name}" for number in ending_signals()}
    for number, code in ending_signals().items():
        end = agent.end if number is signal.SIGINT else agent.on_end_notice
        loop.add_signal_handler(number, partial(end, code, reasons[number]))
    code = await agent.run()
    over = agent.machine.over
    if settings.grant and over is not None and over.why in reasons.values():
        return code  # A pool's node ends the agent by a signal even if the job is done, so this is no news.
    if over is not None and over.why and (over.alone or not settings.quiet):
        say(f"holdfast agent {settings.node}: {over.why}")
    return code


def run_agent(settings: AgentSettings, say: Callable[[str], None]) -> int:
    """Run an agent in this process and return its exit code.

    With `settings.parent`, the kernel kills it when that process ends.

    Args:
        say: prints one line for the user.

    Raises:
        BadInputError: the script does not exist.
    """
    if settings.parent:
        die_with_parent(settings.parent)
    if not os.path.isfile(settings.spec.script):
        raise BadInputError(f"there is no script {settings.spec.script}")
    return asyncio.run(live(settings, SystemClock(), say))
