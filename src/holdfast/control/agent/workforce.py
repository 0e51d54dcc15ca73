"""The workers of a node: starts their processes, listens to them, notices how they end, and ends them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Callable, Collection, Coroutine, Sequence
from itertools import count
from typing import Any, Protocol

from msgspec import structs

from holdfast.control.agent.memory import MemoryReading, resident_bytes
from holdfast.control.agent.settings import AgentSettings
from holdfast.control.agent.snapshots.keeper import snapshot_folder
from holdfast.control.agent.stacks import StackReader
from holdfast.control.agent.worker_slots import UNKNOWN_EXIT, ProcessSlot, WorkerConnection, find_first_to_end
from holdfast.control.agent.zygote_client import ZygoteLostError, ZygoteSupply
from holdfast.control.link.framing import Crashed, FromWorkerProcess, PartHanded, ToWorkerProcess, encode_frame
from holdfast.control.link.progress_page import ProgressPage
from holdfast.control.link.replica_group.page import ProposalPage
from holdfast.control.link.worker_settings import WorkerSettings
from holdfast.control.output_relay import OutputRelay
from holdfast.control.processes import ProcessHandle, is_stopped
from holdfast.coordination.timing.reading import ProgressAccount, Reading
from holdfast.errors import EXIT_DONE
from holdfast.protocol.layouts.group_messages import JoinUnit, UnitFormed, UnitRefused, UnitWord
from holdfast.protocol.messages.agent import WorkerDown
from holdfast.protocol.messages.orders import Begin, Prepare
from holdfast.protocol.messages.worker import Attach, Entered, Raised, WorkerMessage
from holdfast.protocol.names import MAX_WHOLE_BYTES, index_of

_log = logging.getLogger("holdfast.agent")

_FORK_AGAIN_S = 0.5
_LAST_WORDS_S = 0.05
#: most seconds to wait for the last output of ended processes
_LAST_LINES_S = 2.0
_TERM_GRACE_S = 1.0
_KILL_GRACE_S = 5.0


class WorkforceOwner(Protocol):
    """Receiver of the workers' messages and ends. Called within the event that caused them."""

    def on_worker_message(self, message: WorkerMessage | UnitWord) -> None:
        """Handle a message of a worker that fills a slot."""
        ...

    def on_part(self, handed: PartHanded) -> None:
        """Handle that a worker has handed over its part of a checkpoint."""
        ...

    def on_worker_exit(self, down: WorkerDown, *, clean: bool) -> None:
        """Handle the end of a slot's process.

        Args:
            down: how it ended.
            clean: whether its exit code is 0 or unknown.
        """
        ...

    def on_output_lost(self, file: str, why: str) -> None:
        """Handle that a worker's log cannot be written. Called in any thread."""
        ...


class Workforce:
    """The places of one node, and the processes that fill them."""

    def __init__(
        self,
        settings: AgentSettings,
        owner: WorkforceOwner,
        start_task: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        self.settings = settings
        self.places = [ProcessSlot(index=index) for index in range(settings.spec.workers_per_node)]
        self.socket_path = f"{settings.folder}/{settings.node}.sock"
        self._page = _make_page(settings)
        #: of the units that there are, by name
        self._proposals: dict[str, ProposalPage] = {}
        self._ends = count(1)
        #: done once those stacks are read that are being read
        self._stacks_read: asyncio.Future[dict[str, str]] | None = None
        self._owner = owner
        self._start_task = start_task
        self._server: asyncio.Server | None = None
        self._connections: set[WorkerConnection] = set()
        self._closing = False
        self._forking = 0
        #: exits that were told before the answer to Fork was looked at
        self._early_exits: dict[int, int] = {}
        #: processes that were killed and replaced, until their exits are told
        self._given_up: set[int] = set()
        #: Reads their output; None if it is neither shown nor logged.
        self._relay: OutputRelay | None = None
        self._zygotes = ZygoteSupply(
            shared=settings.zygote,
            folder=settings.folder,
            environment=settings.environment,
            preload=settings.preload,
            on_exit=self._on_exit,
            on_lost=self._on_zygote_lost,
        )

    # ---- calls of the agent ----

    async def open(self) -> None:
        """Listen for workers, and start to read their output if it is printed or logged. No worker is started."""
        loop, settings = asyncio.get_running_loop(), self.settings
        if settings.log_folder:
            os.makedirs(settings.log_folder, exist_ok=True)
        if settings.shows or settings.log_folder:
            # A worker that writes to its log itself would fail with a full disk.
            self._relay = OutputRelay(
                settings.node,
                settings.folder,
                log_folder=settings.log_folder,
                which=settings.spec.output.print if settings.shows else "none",
                places=settings.spec.workers_per_node,
                on_lost=self._owner.on_output_lost,
            )
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.socket_path)
        self._server = await loop.create_unix_server(self._make_connection, self.socket_path)

    def replace(self, worker: str) -> None:
        """Start a process for this worker in its slot. The old process is killed, without a report of its end."""
        place = self.places[index_of(worker)]
        if place.handle is not None:
            self._given_up.add(place.handle.pid)
            place.handle.send_signal(signal.SIGKILL)
            self._end_output(place.worker, failed=False)
        place.refill(worker)
        self._close_unused_proposals()
        self._start_task(self._start(place, worker))

    def pass_on(self, workers: Sequence[str], order: ToWorkerProcess) -> None:
        """Send an order, or a message of their replica group, to these workers. A worker that is gone is ignored.

        For a new replica group (`UnitFormed`), shared memory is created; without memory a refusal is sent instead. The
        output relay learns the rank 0 of a plan.
        """
        if isinstance(order, UnitFormed):
            order = self._create_proposals(order)
        if self._relay is not None and isinstance(order, Begin | Prepare):
            self._relay.on_plan(order.plan.generation, order.plan.workers[0])
        frame = encode_frame(order, MAX_WHOLE_BYTES)
        for place in map(self._slot_of, workers):
            if place is not None and place.connection is not None:
                place.connection.send(frame)

    def send_signal(self, number: int) -> None:
        """Send a signal to all worker processes of the node."""
        for place in self.places:
            if place.handle is not None:
                place.handle.send_signal(number)

    def find_stopped(self) -> set[str]:
        """Return the workers with stopped processes (SIGSTOP)."""
        return {place.worker for place in self.places if place.handle is not None and is_stopped(place.handle.pid)}

    def readings(self, now: float, closely: Collection[str]) -> dict[str, Reading]:
        """Return the present activity of each worker that can be read; {} without a progress page.

        Args:
            now: on the machine's monotonic clock.
            closely: workers of which all threads are read.
        """
        if self._page is None:
            return {}
        found: dict[str, Reading] = {}
        for place in self.places:
            reading = self._page.read(place.index, place.pid) if place.pid else None
            if reading is not None and place.cores is not None:
                found[place.worker] = place.cores.add_to(reading, now, closely=place.worker in closely)
        return found

    def accounts(self) -> dict[str, ProgressAccount]:
        """Return the totals and newest waits of each worker that can be read; {} without a progress page."""
        if self._page is None:
            return {}
        known = ((place.worker, self._page.read_account(place.index, place.pid)) for place in self.places if place.pid)
        return {worker: account for worker, account in known if account is not None}

    def read_memory(self) -> MemoryReading:
        """Return the workers' resident memory, and the state that they have sent and received, in bytes.

        Each is the sum over the workers that can be read.
        """
        pids = [(place.index, place.pid) for place in self.places if place.pid]
        moved = [self._page.read_moved_bytes(index, pid) for index, pid in pids] if self._page is not None else []
        return MemoryReading(
            memory=sum(resident_bytes(pid) for _, pid in pids),
            sent=sum(sent for sent, _ in moved),
            received=sum(received for _, received in moved),
        )

    def read_stacks(self) -> asyncio.Future[dict[str, str]]:
        """Ask all workers for the stacks of their threads. Return a future with the answers, by worker.

        Workers that do not answer in time are left out.
        """
        reader = StackReader({place.worker: (place.handle, place.stacks) for place in self.places if place.handle})
        self._stacks_read = asyncio.ensure_future(reader.read())
        return self._stacks_read

    def kill_hung(self, worker: str, why: str) -> None:
        """SIGKILL a hung worker, once a reading of stacks in progress has ended. Ignored if it is gone.

        Args:
            why: the reason, for the report of its end.
        """
        if self._stacks_read is not None and not self._stacks_read.done():
            self._stacks_read.add_done_callback(lambda _: self.kill_hung(worker, why))
            return
        place = self._slot_of(worker)
        if place is not None and place.handle is not None:
            place.hung = why
            place.handle.send_signal(signal.SIGKILL)

    async def end(self) -> None:
        """End the worker processes: with SIGTERM, and after a second with SIGKILL. Wait for that, at most some seconds.

        Their ends are not reported.
        """
        self._closing = True
        alive = [place.handle for place in self.places if place.handle is not None]
        self.send_signal(signal.SIGTERM)
        self.send_signal(signal.SIGCONT)
        await _wait_for_all(alive, _TERM_GRACE_S)
        self.send_signal(signal.SIGKILL)
        await _wait_for_all(alive, _KILL_GRACE_S)

    async def close(self) -> None:
        """Kill the remaining processes, and release sockets, shared memory and the zygote.

        Wait up to 2 s for the last output.
        """
        self._closing = True
        self.send_signal(signal.SIGKILL)
        for page in self._proposals.values():
            page.close()
        self._proposals.clear()
        if self._server is not None:
            self._server.close()
        for connection in list(self._connections):
            connection.close()
        for place in self.places:
            place.forget_process()
        await self._zygotes.close()
        if self._relay is not None:
            await asyncio.to_thread(self._relay.close, _LAST_LINES_S)
            self._relay = None
        if self._page is not None:
            self._page.close()
            self._page = None
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.socket_path)

    # ---- the workers' socket ----

    def _make_connection(self) -> WorkerConnection:
        """Return the protocol for a new connection of a worker, and remember it."""
        connection = WorkerConnection(self._on_message, self._on_connection_lost)
        self._connections.add(connection)
        return connection

    def _slot_of(self, worker: str) -> ProcessSlot | None:
        return next((place for place in self.places if place.worker == worker), None)

    def _on_message(self, connection: WorkerConnection, message: FromWorkerProcess) -> None:
        """Handle a worker's message, and pass it to the owner.

        `Crashed` is kept for the report of the process's end. `Attach` and `JoinUnit` bind the connection to the slot.
        `Raised` in a replica group waits, because the end of another worker may be its cause. The connection of an
        unknown worker is closed.
        """
        if isinstance(message, PartHanded):
            self._owner.on_part(message)  # Even if its worker is given up by now, the applied steps count.
            return
        place = self._slot_of(message.worker)
        if place is None:
            connection.close()  # a process that was given up, or a stranger
            return
        if isinstance(message, Crashed):
            place.crashed, place.end_number = message, next(self._ends)
            connection.close()  # the process waits for this before it ends
            return
        if isinstance(message, Attach | JoinUnit):
            place.connection = connection
            place.attached = place.attached or isinstance(message, Attach)
        if isinstance(message, Entered) and self._relay is not None:
            self._relay.on_generation(message.generation)
        if isinstance(message, Raised) and place.unit:
            asyncio.get_running_loop().call_later(_LAST_WORDS_S, self._pass_raised, place, message)
        else:
            self._owner.on_worker_message(message)

    def _on_connection_lost(self, connection: WorkerConnection) -> None:
        """Forget an ended connection. If its process has ended, report that now."""
        self._connections.discard(connection)
        for place in self.places:
            if place.connection is connection:
                place.connection = None
                self._report_exit(place, place.worker)

    # ---- units ----

    def _create_proposals(self, formed: UnitFormed) -> UnitFormed | UnitRefused:
        """Create the shared memory for the proposals of a new replica group, and record the group of each slot.

        Return the message with the memory's path, or a refusal if there is no memory.
        """
        try:
            page = self._proposals[formed.unit] = ProposalPage(len(formed.workers))
        except OSError as error:
            return UnitRefused(why=f"there is no memory for the proposals of a unit: {error}")
        for place in self.places:
            if place.worker in formed.workers:
                place.unit = formed.unit
        return structs.replace(formed, page=page.path, snapshots=snapshot_folder(self.settings, always=True))

    def _close_unused_proposals(self) -> None:
        """Release resources of replica groups that no longer exist."""
        for unit in self._proposals.keys() - {place.unit for place in self.places}:
            self._proposals.pop(unit).close()

    def _pass_raised(self, place: ProcessSlot, raised: Raised) -> None:
        """Pass on a script's exception, unless another worker of its replica group ended first.

        That end is then reported first, and this worker is replaced with it. While it is open which was first, try
        again later. Ignored if the worker was replaced.
        """
        if place.worker != raised.worker or self._closing:
            return
        if (first := find_first_to_end(self.places, place)) is place:
            self._owner.on_worker_message(raised)
            return
        if first is not None:
            self._report_cause(first)
        asyncio.get_running_loop().call_later(_LAST_WORDS_S, self._pass_raised, place, raised)

    def _report_cause(self, place: ProcessSlot) -> None:
        """Report a slot's process as the cause of other ends in its replica group.

        If it has sent `Crashed` and still runs, it is killed, and its end is reported at once. If it runs without
        `Crashed`, nothing is done.
        """
        if place.exit_code is None and place.handle is not None and place.crashed is not None:
            self._given_up.add(place.handle.pid)
            place.handle.send_signal(signal.SIGKILL)
            place.exit_code = place.crashed.exit_code
        self._report_exit(place, place.worker)

    # ---- processes ----

    async def _start(self, place: ProcessSlot, worker: str) -> None:
        """Fork a process for a slot. Failures are logged, and it is tried again until it succeeds or the agent ends."""
        settings = self.settings
        self._forking += 1
        try:
            pid = 0
            while not pid and not self._closing:
                try:
                    zygote = await self._zygotes.get()
                    output, errors = self._open_output(worker)
                    pid = await zygote.fork(
                        script=settings.spec.script,
                        as_module=settings.spec.module,
                        args=settings.spec.args,
                        env=self._worker_settings(worker).to_environment(),
                        cwd=settings.cwd,
                        output=output,
                        errors=errors,
                    )
                except (OSError, ZygoteLostError) as error:
                    _log.warning("no worker could be forked: %s; trying again", error)
                    await asyncio.sleep(_FORK_AGAIN_S)
        finally:
            self._forking -= 1
        if pid:
            self._on_started(place, worker, pid)

    def _open_output(self, worker: str) -> tuple[str, str]:
        """Return the file for stdout and stderr of a new process, or "" for our own."""
        return self._relay.open(worker) if self._relay is not None else ("", "")

    def _end_output(self, worker: str, *, failed: bool) -> None:
        if self._relay is not None and worker:
            self._relay.on_ended(worker, failed=failed)

    def _on_started(self, place: ProcessSlot, worker: str, pid: int) -> None:
        """Put a new process into its slot, and handle its end if that is known already.

        If the slot belongs to another worker meanwhile, or the agent ends, the process is killed.
        """
        handle = ProcessHandle(pid)
        early = self._early_exits.pop(pid, None)
        if place.worker != worker or self._closing:
            handle.send_signal(signal.SIGKILL)  # Another process was started meanwhile, or none is wanted.
            handle.close()
            if early is None:
                self._given_up.add(pid)
            return
        place.fill(handle, self._stacks_path(worker))
        if early is not None:
            self._on_exit(pid, early)

    def _worker_settings(self, worker: str) -> WorkerSettings:
        settings = self.settings
        return WorkerSettings(
            spec=settings.spec,
            socket=self.socket_path,
            worker=worker,
            host=settings.advertise,
            local_rank=index_of(worker),
            script_digest=settings.digest,
            progress=self._page.path if self._page is not None else "",
            stacks=self._stacks_path(worker),
            zygote=self._zygotes.path,
            parts=settings.parts,
            snapshots=snapshot_folder(settings),
        )

    def _stacks_path(self, worker: str) -> str:
        """Return where a worker writes its stacks; each its own, so that none is taken for another's."""
        return f"{self.settings.folder}/{worker.replace('/', '.')}.stacks" if self._page is not None else ""

    def _on_exit(self, pid: int, code: int) -> None:
        """Handle an exit from the zygote. That of a replaced or unknown process is ignored.

        While a process is being forked, an unknown exit may be its own, so it is kept until the start is known.
        """
        if pid in self._given_up:
            self._given_up.discard(pid)
            return
        place = next((place for place in self.places if place.pid == pid), None)
        if place is not None:
            self._on_process_end(place, code)
        elif self._forking:
            self._early_exits[pid] = code

    def _on_process_end(self, place: ProcessSlot, code: int) -> None:
        """Record the end of a process, and report it once its last messages are read, up to its socket's end.

        If it is still connected, or ended with 0 before it attached, the report waits `_LAST_WORDS_S` at most.
        """
        place.exit_code, place.end_number = code, place.end_number or next(self._ends)
        if place.connection is None and (code or place.attached):
            self._report_exit(place, place.worker)
            return
        # A child process may keep the socket open, and the messages of a quick process may not have arrived yet.
        asyncio.get_running_loop().call_later(_LAST_WORDS_S, self._report_exit, place, place.worker)

    def _report_exit(self, place: ProcessSlot, worker: str) -> None:
        """Report the end of a worker to the owner, and empty its slot.

        Ignored if it runs, was reported, or the slot belongs to another worker by now. If another worker of its replica
        group ended first, that end is reported before this one. The report waits while that is not known. While the
        agent closes, nothing is reported.
        """
        if place.worker == worker and place.exit_code is not None:
            if (first := find_first_to_end(self.places, place)) is not place:
                if first is not None:
                    self._report_cause(first)
                wait_s = _LAST_WORDS_S if first is None else 0.0
                asyncio.get_running_loop().call_later(wait_s, self._report_exit, place, worker)
                return
            code, down = place.exit_code, place.describe_end(place.exit_code, self.settings.spec.script)
            self._end_output(worker, failed=code not in (EXIT_DONE, UNKNOWN_EXIT))
            place.refill("")
            if not self._closing:
                self._owner.on_worker_exit(down, clean=code in (EXIT_DONE, UNKNOWN_EXIT))

    def _on_zygote_lost(self) -> None:
        """Wait for the ends of the running workers directly, because the zygote no longer reports them.

        The workers continue, but their exit codes will be unknown. Ignored while the agent closes.
        """
        if self._closing:
            return
        _log.warning("the zygote is gone; another will be started when it is needed")
        self._given_up.clear()
        self._early_exits.clear()
        for place in self.places:
            if place.handle is not None:
                self._start_task(self._await_orphan(place, place.handle))

    async def _await_orphan(self, place: ProcessSlot, handle: ProcessHandle) -> None:
        """Watch a worker without its parent: it continues, but its exit code will be unknown."""
        await handle.wait_ended()
        if place.handle is handle:
            self._on_process_end(place, UNKNOWN_EXIT)


def _make_page(settings: AgentSettings) -> ProgressPage | None:
    """Return a new progress page, or None if the job is not watched, or, with a warning, if there is no memory."""
    if not settings.spec.experiments.watch:
        return None
    try:
        return ProgressPage(settings.spec.workers_per_node)
    except OSError as error:
        _log.warning("there is no memory for a page of progress, so hung workers are not detected: %s", error)
        return None


async def _wait_for_all(handles: list[ProcessHandle], timeout_s: float) -> None:
    """Wait until all processes have ended, or until the timeout."""
    waits = [asyncio.ensure_future(handle.wait_ended()) for handle in handles]
    if not waits:
        return
    _, late = await asyncio.wait(waits, timeout=timeout_s)
    for wait in late:
        wait.cancel()
    await asyncio.gather(*late, return_exceptions=True)
