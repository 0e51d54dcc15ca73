"""Reads where the threads of a node's workers stand in their programs."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Mapping

from holdfast.control.link.stacks import STACKS_SIGNAL
from holdfast.control.processes import ProcessHandle, is_stopped
from holdfast.coordination.lateness.reading import ProgressAccount
from holdfast.protocol.messages.progress import Collective, Stacks, WorkerStack

#: an answer takes a millisecond where the process gets a core
_PATIENCE_S = 0.1
_LOOK_S = 0.002
_CHARACTERS = 8000
#: what differs from one process to the next, and says nothing
_ADDRESS = re.compile(r"0x[0-9a-f]+ ")


class StackReader:
    """Asks some processes for their stacks, each by its worker's id, at once."""

    def __init__(self, processes: Mapping[str, tuple[ProcessHandle, str]]) -> None:
        """Ask them; `processes`: with the file that each writes to. One that is stopped cannot answer."""
        self._asked = {
            worker: path
            for worker, (handle, path) in processes.items()
            if path and os.path.exists(path) and not is_stopped(handle.pid)
        }
        self._begin = {worker: os.path.getsize(path) for worker, path in self._asked.items()}
        for worker in self._asked:
            processes[worker][0].send_signal(STACKS_SIGNAL)

    async def read(self) -> dict[str, str]:
        """Return what they answer; who has not answered in time is left out."""
        waiting = dict(self._asked)
        loop, sizes, found = asyncio.get_running_loop(), dict(self._begin), dict[str, str]()
        until = loop.time() + _PATIENCE_S
        while waiting and loop.time() < until:
            await asyncio.sleep(_LOOK_S)
            for worker, path in list(waiting.items()):
                size = os.path.getsize(path)
                if size == sizes[worker] > self._begin[worker]:  # (it has stopped growing)
                    found[worker] = self._text(worker, path)
                    del waiting[worker]
                sizes[worker] = size
        return found

    def _text(self, worker: str, path: str) -> str:
        with open(path, encoding="utf-8", errors="replace") as file:
            file.seek(self._begin[worker])
            return _ADDRESS.sub("", file.read(4 * _CHARACTERS))[:_CHARACTERS]


def stacks_of(number: int, texts: Mapping[str, str], accounts: Mapping[str, ProgressAccount], now: float) -> Stacks:
    """Return what is told of all workers: their stacks, and their newest collectives; `now`: on the pages' clock."""
    told: list[WorkerStack] = []
    for worker in list(dict.fromkeys((*accounts, *texts)))[:64]:
        waits = accounts[worker].waits if worker in accounts else ()
        collectives = tuple(
            Collective(
                what=wait.what,
                size=wait.size,
                bytes=wait.bytes,
                began_s=max(0.0, now - wait.since),
                took_s=None if wait.until is None else max(0.0, wait.until - wait.since),
            )
            for wait in waits
        )
        told.append(WorkerStack(worker=worker, stack=texts.get(worker, ""), collectives=collectives))
    return Stacks(number=number, workers=tuple(told))
