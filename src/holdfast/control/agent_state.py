"""What an agent keeps of its workers, so that a restarted coordinator misses nothing. Pure: no I/O, no clock."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import msgspec

from holdfast.protocol.agent import Committed, Welcome, WorkerDown
from holdfast.protocol.orders import Arm, Begin, Order, Prepare, Stop, Void
from holdfast.protocol.worker import (
    Applied,
    Attach,
    Begun,
    CheckpointKept,
    CheckpointWritten,
    Entered,
    Fault,
    Finished,
    Loads,
    Prepared,
    Report,
    WorkerMessage,
)

#: of what kind only the latest is kept, in the order in which it is replayed
_LATEST = (Attach, Begun, Entered, Prepared, Report, Fault, Finished, CheckpointWritten, CheckpointKept, Loads)
#: what a newer epoch makes worthless
_EPOCH_BOUND = (Prepared, Report, Fault)

MAX_DEATHS = 3
DEATHS_WITHIN_S = 300.0
#: of a message of a megabyte, this much is left to Hello's other fields
_HELLO_BYTES = (1 << 20) - (1 << 14)


@dataclass(slots=True)
class _Worker:
    latest: dict[type, WorkerMessage] = field(default_factory=dict)
    applied: deque[Applied] = field(default_factory=deque)
    down: WorkerDown | None = None


class AgentState:
    """The highest term seen, the newest step in the journal, and the messages that may have to be replayed."""

    def __init__(self, term: int = 0) -> None:
        self.term = term
        self.committed = 0
        self._workers: dict[str, _Worker] = {}

    # ---- what happens ----

    def keep(self, message: WorkerMessage) -> None:
        """Remember a worker's message, before it is passed on."""
        if isinstance(message, Attach):
            self._replace(message.worker)
        worker = self._workers.setdefault(message.worker, _Worker())
        if isinstance(message, Applied):
            if message.step > self.committed:
                worker.applied.append(message)
            return
        if not isinstance(message, _LATEST):
            return
        if isinstance(message, Entered):
            for kind in _EPOCH_BOUND:
                kept = worker.latest.get(kind)
                if kept is not None and _epoch(kept) < message.epoch:
                    del worker.latest[kind]
        worker.latest[type(message)] = message

    def down(self, message: WorkerDown) -> None:
        """A worker's process ended. Only that is replayed: what it said before would look like a worker come back."""
        self._workers[message.worker] = _Worker(down=message)

    def finished(self, worker: str) -> None:
        """A worker's process ended because the job is done."""
        self._workers.pop(worker, None)

    def welcome(self, message: Welcome) -> bool:
        """A coordinator took the connection; False: it is an older one, to be refused."""
        if message.term < self.term:
            return False
        self.term = message.term
        self._forget_up_to(message.committed)
        return True

    def commit(self, message: Committed) -> None:
        """Steps up to this one are in the journal."""
        if message.term >= self.term:
            self._forget_up_to(message.step)

    def accepts(self, order: Order) -> bool:
        """Tell whether an order comes from the newest coordinator known."""
        match order:
            case Begin(plan=plan) | Prepare(plan=plan):
                return plan.term >= self.term
            case Stop(term=term) | Arm(term=term) | Void(term=term):
                return term >= self.term
            case _:
                return True  # carries no term: the connection's Welcome vouches for it

    # ---- what is to be said ----

    def replay(self) -> tuple[tuple[WorkerMessage, ...], tuple[WorkerMessage, ...]]:
        """Return what goes into Hello, and what must follow it because it would not fit.

        Workers' latest messages come first; then what they applied, oldest step first.
        """
        messages: list[WorkerMessage] = []
        for worker in self._workers.values():
            messages += [worker.latest[kind] for kind in _LATEST if kind in worker.latest]
        messages += sorted((m for worker in self._workers.values() for m in worker.applied), key=lambda m: m.step)
        room = _HELLO_BYTES
        for count, message in enumerate(messages):
            room -= len(msgspec.msgpack.encode(message)) + 8
            if room < 0:
                return tuple(messages[:count]), tuple(messages[count:])
        return tuple(messages), ()

    def downs(self) -> tuple[WorkerDown, ...]:
        """Return the ends of workers that no other has replaced yet."""
        return tuple(w.down for w in self._workers.values() if w.down is not None)

    # ---- inside ----

    def _forget_up_to(self, step: int) -> None:
        self.committed = max(self.committed, step)
        for worker in self._workers.values():
            while worker.applied and worker.applied[0].step <= self.committed:
                worker.applied.popleft()

    def _replace(self, newcomer: str) -> None:
        """Forget whoever filled the newcomer's place before."""
        slot = _slot(newcomer)
        for name in [name for name in self._workers if name != newcomer and _slot(name) == slot]:
            del self._workers[name]


class DeathCount:
    """Counts the deaths of one worker slot, to tell a bad machine from bad luck."""

    def __init__(self) -> None:
        self._times: deque[float] = deque()
        self._committed = 0

    def died(self, now: float, committed: int) -> bool:
        """Count a death; True: too many without a committed step in between, the node must go."""
        if committed > self._committed:
            self._committed = committed
            self._times.clear()
        self._times.append(now)
        while self._times[0] < now - DEATHS_WITHIN_S:
            self._times.popleft()
        return len(self._times) > MAX_DEATHS


def _epoch(message: WorkerMessage) -> int:
    return message.epoch if isinstance(message, _EPOCH_BOUND) else 0


def _slot(worker: str) -> str:
    return worker.rsplit("/", 1)[0]
