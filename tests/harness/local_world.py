"""Forked processes of this machine that form groups without agents or a coordinator, for benchmarks and tests.

Rendezvous keys go from process to process over Unix datagram sockets: one datagram a key, no lock that a killed
process could hold.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import socket
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import msgspec
import torch

from holdfast.control.processes import die_with_parent
from holdfast.planning.levels import FAN_OUT, FLAT_UP_TO
from holdfast.protocol.messages.orders import Posted
from holdfast.runtime.groups.abandoned_groups import GroupReaper
from holdfast.runtime.groups.communicator import Communicator, HaltCheck
from holdfast.runtime.groups.rendezvous import MAX_VALUE_BYTES, Board
from holdfast.runtime.groups.transport_choice import build_communicator

_END = b""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Mailbox:
    writing: socket.socket
    reading: socket.socket


class Seat:
    """One process of a local world: its rank, its boards and its reaper."""

    def __init__(self, rank: int, mailboxes: Sequence[_Mailbox], barrier: threading.Barrier) -> None:
        self.rank = rank
        self.size = len(mailboxes)
        self.reaper = GroupReaper()
        self._mailboxes = mailboxes
        self._barrier = barrier
        self._boards: dict[int, Board] = {}
        self._lock = threading.Lock()
        self._reader = threading.Thread(target=self._read, name="local-world", daemon=True)
        self._reader.start()

    def board(self, generation: int, *, halt: threading.Event | HaltCheck | None = None) -> Board:
        """Return the board of a generation; the first to ask makes it."""
        with self._lock:
            if generation not in self._boards:
                self._boards[generation] = Board(generation, partial(self._post, generation), halt=halt)
            return self._boards[generation]

    def connect(
        self,
        generation: int,
        *,
        rank: int | None = None,
        size: int | None = None,
        halt: threading.Event | HaltCheck | None = None,
        nodes: Sequence[str] | None = None,
        any_to_any: bool = True,
        flat_up_to: int = FLAT_UP_TO,
        fan_out: int = FAN_OUT,
        timeout_s: float = 30.0,
        build_timeout_s: float = 30.0,
    ) -> Communicator:
        """Build the group of a generation on the CPU; by default all seats are members, each on its own node."""
        if nodes is None:
            nodes = [str(number) for number in range(self.size if size is None else size)]
        communicator = build_communicator(
            torch.device("cpu"),
            self.board(generation),
            self.rank if rank is None else rank,
            nodes,
            generation=generation,
            reaper=self.reaper,
            any_to_any=any_to_any,
            flat_up_to=flat_up_to,
            fan_out=fan_out,
            timeout_s=timeout_s,
            build_timeout_s=build_timeout_s,
            halt=halt,
        )
        with self._lock:
            self._boards.pop(generation, None)
        return communicator

    def meet(self, timeout_s: float = 120.0) -> None:
        """Wait until every process of the world has arrived."""
        self._barrier.wait(timeout_s)

    def close(self) -> None:
        """End the threads of this seat."""
        self._mailboxes[self.rank].writing.send(_END)
        self._reader.join()
        self.reaper.close(0.0)

    def _post(self, generation: int, keys: dict[str, bytes]) -> None:
        message = msgspec.msgpack.encode(Posted(generation=generation, keys=keys))
        for rank, mailbox in enumerate(self._mailboxes):
            if rank != self.rank:
                mailbox.writing.send(message)

    def _read(self) -> None:
        while message := self._mailboxes[self.rank].reading.recv(2 * MAX_VALUE_BYTES):
            posted = msgspec.msgpack.decode(message, type=Posted)
            self.board(posted.generation).put(posted.keys)


class WorldError(Exception):
    """A process of a local world raised or died; the message contains the traceback or the exit code."""


class LocalWorld:
    """The processes of a local world; a context manager of the parent that kills remaining processes."""

    def __init__(self, size: int, body: Callable[..., Any], *args: Any) -> None:
        """Fork `size` processes that each call `body(seat, *args)`."""
        context = multiprocessing.get_context("fork")
        mailboxes = [_Mailbox(writing=a, reading=b) for a, b in _pairs(size)]
        barrier = context.Barrier(size)
        self.processes: list[BaseProcess] = []
        self._results: list[Connection] = []
        for rank in range(size):
            reading, writing = context.Pipe(duplex=False)
            given = (os.getpid(), rank, mailboxes, barrier, writing, body, args)
            process = context.Process(target=_main, args=given, daemon=True)
            process.start()
            writing.close()
            self.processes.append(process)
            self._results.append(reading)
        for mailbox in mailboxes:
            mailbox.writing.close()
            mailbox.reading.close()

    def results(self, *, ranks: Sequence[int] | None = None, timeout_s: float = 120.0) -> list[Any]:
        """Return the result of each body, or of these ranks only; None for a killed process.

        Raises:
            WorldError: a body raised, or did not return in time.
        """
        return [self._result(rank, timeout_s) for rank in ranks or range(len(self.processes))]

    def __enter__(self) -> LocalWorld:
        return self

    def __exit__(self, *exc: object) -> None:
        for process, result in zip(self.processes, self._results, strict=True):
            process.kill()
            process.join()
            process.close()
            result.close()

    def _result(self, rank: int, timeout_s: float) -> Any:
        if not wait([self._results[rank]], timeout_s):
            raise WorldError(f"rank {rank} did not return in {timeout_s:g} s")
        try:
            story, value = self._results[rank].recv()
        except EOFError:
            self.processes[rank].join()
            code = self.processes[rank].exitcode
            if code == -9:
                return None
            raise WorldError(f"rank {rank} ended with exit code {code}") from None
        if story:
            raise WorldError(f"rank {rank} raised:\n{story}")
        self.processes[rank].join(timeout_s)
        if self.processes[rank].exitcode != 0:
            raise WorldError(f"rank {rank} returned and then ended with exit code {self.processes[rank].exitcode}")
        return value


def run_world(size: int, body: Callable[..., Any], *args: Any, timeout_s: float = 120.0) -> list[Any]:
    """Call `body(seat, *args)` in `size` processes, and return their results."""
    with LocalWorld(size, body, *args) as world:
        return world.results(timeout_s=timeout_s)


def _pairs(size: int) -> list[tuple[socket.socket, socket.socket]]:
    return [socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM) for _ in range(size)]


def _main(
    parent: int,
    rank: int,
    mailboxes: Sequence[_Mailbox],
    barrier: threading.Barrier,
    result: Connection,
    body: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    die_with_parent(parent)
    # Uncollected objects of the parent may refer to threads that do not exist here: torch's groups crash if they are
    # destroyed without their threads.
    gc.freeze()
    torch.set_num_threads(1)
    seat = Seat(rank, mailboxes, barrier)
    try:
        value = body(seat, *args)
    except Exception:
        result.send((traceback.format_exc(), None))
        raise
    seat.close()
    result.send(("", value))
