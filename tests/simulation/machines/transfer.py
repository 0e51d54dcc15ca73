"""Simulated state on its way between members: all of it to one that lacks it, or experts beside a step.

It takes time, can be torn, and what comes is of the moment at which it left.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from holdfast.protocol.names import node_of
from tests.simulation.machines.host import WorkerHost
from tests.simulation.machines.training import SimReceipt
from tests.simulation.world import Peer


class Sending(ABC):
    """The transfers of one kind that a worker sends, one to each target."""

    def __init__(self, worker: WorkerHost, takes: Callable[[Peer, int], bool]) -> None:
        """Send nothing yet. `takes`: tell whether a target takes what a generation has for it, now."""
        self._worker = worker
        self._takes = takes
        self._generation = 0
        self._open: set[str] = set()
        self._attempt = 0
        self._late_at = 0.0

    @property
    def active(self) -> bool:
        """True while somebody is still owed something of the state that is here: it must not change."""
        return bool(self._open)

    def begin(self, generation: int, targets: tuple[str, ...]) -> None:
        """Start to send to all targets, unless that has begun."""
        if generation == self._generation:
            return
        self._generation = generation
        self._late_at = self._worker.world.timeline.now + self._worker.world.timing.operation_timeout_s
        self._open = set(targets)
        for target in targets:
            self._try(target, self._attempt)

    def abort(self) -> None:
        """Leave all transfers as they are: torn."""
        self._attempt += 1
        self._open.clear()

    @abstractmethod
    def leaving(self) -> Any:
        """Return what leaves here now."""

    @abstractmethod
    def landed(self, peer: Peer, generation: int, what: Any) -> str:
        """It has come whole; return what of it is refused, "" for nothing."""

    def _try(self, target: str, attempt: int) -> None:
        worker, world = self._worker, self._worker.world
        if attempt != self._attempt:
            return
        peer = world.worker(target)
        if peer is None:
            if world.rng.random() < 0.5:
                self._complain(target, f"{target} cannot be reached")
            return
        blocked = world.data_plane.blocked(worker.node, node_of(target))
        if blocked is not None and blocked.refused:
            self._complain(target, f"state for {target} could not be sent: connection refused")
            return
        if peer.stopped or blocked or not world.reaches(worker.id, target) or not self._takes(peer, self._generation):
            self._again(target, attempt)
            return
        peer.advance()  # it may have entered the pending generation just now
        if not peer.boundary("receiving") and not worker.boundary("sending"):
            world.after("transfer", worker, self._arrived, target, attempt, self.leaving())

    def _again(self, target: str, attempt: int) -> None:
        """Nothing gets through: try again, but not for ever."""
        worker, world = self._worker, self._worker.world
        if world.timeline.now < self._late_at:
            world.after("retry", worker, self._try, target, attempt)
        else:
            why, parted = f"{target} does not take the state in time", not world.reaches(worker.id, target)
            self._complain(target, why, timed_out=True, unreachable=[target] if parted else [])

    def _complain(self, target: str, why: str, *, timed_out: bool = False, unreachable: Sequence[str] = ()) -> None:
        fault = self._worker.machine.complain(
            self._generation, why, timed_out=timed_out, unreachable=unreachable, transfer_peers=[target]
        )
        self._worker.obey(fault)

    def _arrived(self, target: str, attempt: int, what: Any) -> None:
        worker, world = self._worker, self._worker.world
        peer = world.worker(target)
        if attempt != self._attempt:
            return
        blocked = world.data_plane.blocked(worker.node, node_of(target))
        if peer is None or peer.stopped or blocked or not world.reaches(worker.id, target):
            self._try(target, attempt)
            return
        if world.rng.random() < 0.05:  # the checksum does not fit: once more
            self._try(target, attempt)
            return
        self._open.discard(target)
        if why := self.landed(peer, self._generation, what):
            self._complain(target, f"{target} refuses {why}")
            return
        peer.advance()
        worker.advance()


class Pusher(Sending):
    """The whole states that a worker sends; who takes one gives up its own, unless it keeps that."""

    def __init__(self, worker: WorkerHost, beside: Carrier | None) -> None:
        """Send nothing yet. `beside`: what sends experts, None for a dense model."""
        super().__init__(worker, self._taken)
        self._beside = beside

    @property
    def active(self) -> bool:
        return super().active or (self._beside is not None and self._beside.active)

    def abort(self) -> None:
        super().abort()
        if self._beside is not None:
            self._beside.abort()

    def leaving(self) -> tuple[int, int]:
        step = self._worker.machine.applied
        assert step is not None
        return self._worker.state, step

    def landed(self, peer: Peer, generation: int, what: tuple[int, int]) -> str:
        if not peer.machine.accept_push(generation):
            return ""  # (whoever leaves a generation has shut its connections: what was under way comes to nothing)
        state, step = what
        before, senders = peer.receipt, frozenset((self._worker.id,))
        if before is not None and before.generation == generation:
            if (before.step, before.state) != (step, state):  # (others have sent parts of another state)
                return f"the state of step {step}"
            senders |= before.senders
        peer.receipt = SimReceipt(generation, step, self._worker.machine.history, state, senders)
        return ""

    def _taken(self, peer: Peer, generation: int) -> bool:
        if peer.copier.active or peer.machine.warming.is_running or not peer.machine.accept_push(generation):
            return False
        if not peer.machine.keeps:
            peer.whole, peer.state = False, self._worker.world.garbage()
        return True


class Carrier(Sending):
    """The experts that a worker sends beside a step; they lie beside the receiver's own until that has applied it."""

    def __init__(self, worker: WorkerHost) -> None:
        super().__init__(worker, self._taken)

    def leaving(self) -> tuple[int, ...]:
        assert self._worker.experts is not None
        return self._worker.experts.steps

    def landed(self, peer: Peer, generation: int, what: tuple[int, ...]) -> str:
        if peer.experts is not None and self._taken(peer, generation):
            peer.experts.land(self._worker.id, what)
        return ""

    def _taken(self, peer: Peer, generation: int) -> bool:
        machine = peer.machine
        if machine.frozen or machine.generation != generation or peer.experts is None:
            return False
        return peer.experts.awaits(generation, self._worker.id)
