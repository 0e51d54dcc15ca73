"""Simulated collectives with only the guarantees that the protocol may assume.

An operation can complete at a rank only after all ranks of the group have issued it. After a failure (a member died,
or halted and abandoned the operation) it completes at any subset of the ranks that could complete. The other ranks hang
or get an error. A paused member delays some ranks until it continues; a partition between nodes delays all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from random import Random
from typing import Any, Protocol

from holdfast.planner.fleet.timeline import Timeline
from holdfast.protocol.plan import GenerationPlan
from tests.simulation.faults.troubles import DataPlane


class Rank(Protocol):
    """A member, as its group sees it."""

    id: str

    def deliver(self, action: Callable[..., object], *args: Any) -> None: ...

    def operation_done(self, operation: Underway, value: Any) -> None: ...

    def operation_failed(self, operation: Underway) -> None: ...


class Underway(Protocol):
    """A collective as a rank sees it."""

    @property
    def value(self) -> Any:
        """The result, or None if it is not available yet."""
        ...

    def leave(self, worker: str) -> None:
        """Stop waiting for the operation."""
        ...


class SimOperation:
    """One collective: the payload of each rank, the waiting ranks, and the ranks that hang (`hung`)."""

    __slots__ = ("hung", "key", "payloads", "scheduled", "value", "waiting")

    def __init__(self, key: tuple[str, int]) -> None:
        self.key = key
        self.payloads: dict[str, Any] = {}
        self.waiting: dict[str, Rank] = {}
        self.hung: dict[str, Rank] = {}
        self.scheduled: set[str] = set()
        #: The result, or None before all ranks have issued the operation.
        self.value: Any = None

    def leave(self, worker: str) -> None:
        """Stop waiting for the operation."""
        self.waiting.pop(worker, None)
        self.hung.pop(worker, None)


class Group:
    """The communicator of one generation."""

    def __init__(
        self,
        plan: GenerationPlan,
        timeline: Timeline,
        rng: Random,
        duration: tuple[float, float],
        data_plane: DataPlane,
    ) -> None:
        self.plan = plan
        self.size = len(plan.members)
        self.failed = False
        self._timeline = timeline
        self._rng = rng
        self._duration = duration
        self._data_plane = data_plane
        #: The nodes of the members.
        self.nodes = frozenset(member.node for member in plan.members)
        #: Whether the nodes were partitioned at the last check, and the data plane's version then.
        self._parted = (False, 0)
        self._operations: dict[tuple[str, int], SimOperation] = {}
        self._stalled: dict[str, list[tuple[SimOperation, Rank]]] = {}

    def issue(
        self, rank: Rank, kind: str, step: int, payload: Any, combine: Callable[[Iterable[Any]], Any]
    ) -> Underway:
        """Join an operation; `operation_done` or `operation_failed` may follow."""
        key = (kind, step)
        operation = self._operations.get(key)
        if operation is None:
            operation = self._operations[key] = SimOperation(key)
        operation.payloads[rank.id] = payload
        operation.waiting[rank.id] = rank
        if len(operation.payloads) == self.size:
            del self._operations[key]
            members = (member.worker for member in self.plan.members)
            operation.value = combine(operation.payloads[worker] for worker in members)
            self._operations[key] = operation
            for waiting in list(operation.waiting.values()):
                self._fate(operation, waiting) if self.failed else self._complete_later(operation, waiting)
            self._forget_before(step)
        elif self.failed:
            self._fate(operation, rank)
        return operation

    def abandon(self, rank: Rank, operation: Underway) -> None:
        """Leave an operation because the rank halts; its connections break."""
        operation.leave(rank.id)
        self.fail(rank.id)

    def fail(self, worker: str) -> None:
        """Fail the group because a member has died or left."""
        self.failed = True
        for operation in self._operations.values():
            for rank in list(operation.waiting.values()):
                if rank.id != worker:
                    self._fate(operation, rank)

    def glitch(self, worker: str) -> bool:
        """Fail the operation that a rank waits for, without a death; return False if it waits for none."""
        for operation in self._operations.values():
            rank = operation.waiting.get(worker)
            if rank is not None:
                self.failed = True
                self._error_later(operation, rank)
                return True
        return False

    def stall(self, worker: str) -> None:
        """Delay some waiting ranks until this paused member continues."""
        held = self._stalled.setdefault(worker, [])
        for operation in self._operations.values():
            if operation.value is None:
                continue
            for rank in list(operation.waiting.values()):
                if rank.id != worker and self._rng.random() < 0.5:
                    operation.hung[rank.id] = operation.waiting.pop(rank.id)
                    held.append((operation, rank))

    def unstall(self, worker: str) -> None:
        """Complete the operations that waited for this paused member."""
        for operation, rank in self._stalled.pop(worker, ()):
            if operation.hung.pop(rank.id, None) is not None:
                operation.waiting[rank.id] = rank
                operation.scheduled.discard(rank.id)
                self._complete_later(operation, rank)

    def _forget_before(self, step: int) -> None:
        """Forget operations before `step`; no rank can still use them, because all have issued one of `step`."""
        old = [key for key, op in self._operations.items() if key[1] < step and not (op.waiting or op.hung)]
        for key in old:
            del self._operations[key]

    def _fate(self, operation: SimOperation, rank: Rank) -> None:
        """Choose the outcome of a waiting rank after a failure: completion, a hang or an error."""
        draw = self._rng.random()
        if operation.value is not None and draw < 0.4:
            self._complete_later(operation, rank)
        elif draw < 0.7:
            operation.hung[rank.id] = operation.waiting.pop(rank.id)
        else:
            self._error_later(operation, rank)

    def _complete_later(self, operation: SimOperation, rank: Rank) -> None:
        if rank.id in operation.scheduled:
            return
        operation.scheduled.add(rank.id)
        self._timeline.after(self._rng.uniform(*self._duration), rank.deliver, self._complete, operation, rank)

    def _complete(self, operation: SimOperation, rank: Rank) -> None:
        if rank.id not in operation.waiting:
            return
        if self._apart:
            operation.scheduled.discard(rank.id)
            self._data_plane.when_healed(lambda: self._complete_later(operation, rank))
            return
        del operation.waiting[rank.id]
        rank.operation_done(operation, operation.value)

    @property
    def _apart(self) -> bool:
        """Whether some members cannot reach each other."""
        parted, version = self._parted
        if version != self._data_plane.version:
            parted = self._data_plane.parted(self.nodes)
            self._parted = parted, self._data_plane.version
        return parted

    def _error_later(self, operation: SimOperation, rank: Rank) -> None:
        operation.hung[rank.id] = operation.waiting.pop(rank.id)
        self._timeline.after(self._rng.uniform(*self._duration), rank.deliver, self._error, operation, rank)

    def _error(self, operation: SimOperation, rank: Rank) -> None:
        if operation.hung.pop(rank.id, None) is not None:
            rank.operation_failed(operation)
