"""The worker processes of a node, as its agent sees them: a slot for each, and the socket to its process."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from holdfast.control.agent.memory import OomCounter
from holdfast.control.agent.stacks import CoreMeter
from holdfast.control.link.framing import Crashed, FrameDecoder, FrameError, FromWorkerProcess
from holdfast.control.processes import ProcessHandle, describe_exit
from holdfast.errors import EXIT_BAD_INPUT, EXIT_FAILED
from holdfast.protocol.failures import FailureKind
from holdfast.protocol.messages.agent import WorkerDown

#: exit code of a process if its parent, the zygote, was lost before it could report one
UNKNOWN_EXIT = 1 << 16


class WorkerConnection(asyncio.Protocol):
    """A worker process's end of the agent's Unix socket. What does not decode closes it."""

    def __init__(
        self,
        on_message: Callable[[WorkerConnection, FromWorkerProcess], None],
        on_lost: Callable[[WorkerConnection], None],
    ) -> None:
        self._on_message = on_message
        self._on_lost = on_lost
        self._decoder: FrameDecoder[FromWorkerProcess] = FrameDecoder(FromWorkerProcess)
        self._transport: asyncio.Transport | None = None

    def send(self, frame: bytes) -> None:
        """Send an order, encoded by `encode_frame`. A worker that is gone is ignored."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(frame)

    def close(self) -> None:
        """End the connection at once."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Call `on_message` for each complete message. Close the connection if the data cannot be decoded."""
        try:
            messages = self._decoder.feed(data)
        except FrameError:
            self.close()
            return
        for message in messages:
            self._on_message(self, message)

    def connection_lost(self, exc: Exception | None) -> None:
        self._on_lost(self)


@dataclass(slots=True)
class ProcessSlot:
    """One worker's place on the node, and the process that fills it now."""

    index: int
    worker: str = ""
    handle: ProcessHandle | None = None
    connection: WorkerConnection | None = None
    attached: bool = False
    crashed: Crashed | None = None
    #: the file to which the process writes its stacks when it is asked to, "" for none
    stacks: str = ""
    #: why it was killed: it hangs
    hung: str = ""
    #: of the process, since it was started
    oom: OomCounter | None = None
    cores: CoreMeter | None = None
    #: the process has ended so; its last words are still awaited
    exit_code: int | None = None
    #: of the ends of processes on this node, which one this was, by the first word of it; 0: it has not ended
    end_number: int = 0
    #: the name of the unit that the process is in, "" for none
    unit: str = ""

    @property
    def pid(self) -> int | None:
        """The pid of the process, or None without one."""
        return self.handle.pid if self.handle else None

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended, even if that was not reported yet."""
        return self.handle is not None and self.handle.has_ended()

    @property
    def was_killed(self) -> bool:
        """Whether another process has killed it, without a message of its own."""
        return self.exit_code == -signal.SIGKILL and self.crashed is None

    def refill(self, worker: str) -> None:
        """Forget the process and everything about it, and reserve the slot for `worker`, or for none ("")."""
        self.forget_process()
        self.worker, self.stacks, self.unit = worker, "", ""
        self.attached, self.hung = False, ""
        self.crashed = self.exit_code = self.oom = self.cores = None
        self.end_number = 0

    def fill(self, process: ProcessHandle, stacks: str) -> None:
        """Store a process that was started for this slot, and the file to which it writes its stacks."""
        self.handle, self.stacks = process, stacks
        self.oom, self.cores = OomCounter(process.pid), CoreMeter(process.pid)

    def forget_process(self) -> None:
        """Close the handle of the process and its connection. The process itself is not ended."""
        if self.handle is not None:
            self.handle.close()
            self.handle = None
        if self.connection is not None:
            self.connection.close()
            self.connection = None

    def describe_end(self, code: int, script: str) -> WorkerDown:
        """Return the report of the process's end.

        The cause is that of its last message (`Crashed`), else the reason for which it was killed as hung, else the
        exit code, with a kill for lack of memory, or an end before the first or the last step.

        Args:
            code: exit code, negative for a signal, or `UNKNOWN_EXIT`.
            script: path of the script, for the message.
        """
        kind, detail, exit_code, final = FailureKind.PROCESS_EXIT, describe_exit(code), code, False
        error = self.crashed.error if self.crashed is not None else None
        if code == -signal.SIGKILL and self.oom is not None and self.oom.has_struck():
            detail = f"{detail}: out of memory (oom_kill)"
        if code == UNKNOWN_EXIT:
            detail, exit_code = "its exit code is not known: the zygote was lost", EXIT_FAILED
        if self.crashed is not None:  # Its own last message names the cause, however it ended then.
            kind, final = self.crashed.kind, self.crashed.final
            detail, exit_code = self.crashed.detail, self.crashed.exit_code
        elif self.hung:
            kind, detail = FailureKind.HANG, self.hung
        elif code == 0 and not self.attached:
            exit_code = EXIT_BAD_INPUT
            detail = f"{script} ended without training: call holdfast.init(), protect() and loop over job.steps()"
        elif code == 0:
            detail, final = "the script ended before its steps were done", True
        return WorkerDown(
            worker=self.worker, kind=kind, detail=detail[:8000], exit_code=exit_code, final=final, error=error
        )


def find_first_to_end(places: Sequence[ProcessSlot], place: ProcessSlot) -> ProcessSlot | None:
    """Return the slot in `place`'s replica group whose worker ended, or reported its end, first; by default `place`.

    A killed process without a message precedes those with one, because on a busy machine their messages arrive first.
    Return None if another process of the group has ended, and its exit code is not known yet.
    """
    mates = [mate for mate in places if place.unit and mate.unit == place.unit]
    if any(mate.has_ended and not mate.end_number for mate in mates if mate is not place):
        return None
    ended = [mate for mate in mates if mate.end_number]
    return min(ended, key=lambda mate: (not mate.was_killed, mate.end_number), default=place)
