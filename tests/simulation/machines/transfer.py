"""Simulated state transfers between members: a complete state, or experts during a step.

A transfer takes time and can be torn. The data received is the data at the moment when it was sent.
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
    """A worker's outgoing transfers of one kind, one to each target."""

    def __init__(self, worker: WorkerHost, takes: Callable[[Peer, int], bool]) -> None:
        """Create an idle sender. `takes` returns whether a target accepts a generation's transfer now."""
        self._worker = worker
        self._takes = takes
        self._generation = 0
        self._open: set[str] = set()
        self._attempt = 0
        self._late_at = 0.0

    @property
    def active(self) -> bool:
        """Whether a target still waits for this worker's state, so that the state must not change."""
        return bool(self._open)

    def begin(self, generation: int, targets: tuple[str, ...]) -> None:
        """Start to send to all targets, unless this generation's transfers have already started."""
        if generation == self._generation:
            return
        self._generation = generation
        self._late_at = self._worker.world.timeline.now + self._worker.world.timing.operation_timeout_s
        self._open = set(targets)
        for target in targets:
            self._try(target, self._attempt)

    def abort(self) -> None:
        """Abort all transfers; they stay torn."""
        self._attempt += 1
        self._open.clear()

    @abstractmethod
    def leaving(self) -> Any:
        """Return the data to send now."""

    @abstractmethod
    def landed(self, peer: Peer, generation: int, what: Any) -> str:
        """Deliver a complete transfer to a peer; return the refused part, or "" if it was accepted."""

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
        peer.advance()  # The peer may just have entered the pending generation.
        if not peer.boundary("receiving") and not worker.boundary("sending"):
            world.after("transfer", worker, self._arrived, target, attempt, self.leaving())

    def _again(self, target: str, attempt: int) -> None:
        """Try again to send, until the time limit."""
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
        # The checksum does not match, so send it a second time.
        if world.rng.random() < 0.05:
            self._try(target, attempt)
            return
        self._open.discard(target)
        if why := self.landed(peer, self._generation, what):
            self._complain(target, f"{target} refuses {why}")
            return
        peer.advance()
        worker.advance()


class Pusher(Sending):
    """Sends complete states; the receiver discards its own state, unless it keeps that."""

    def __init__(self, worker: WorkerHost, carrier: Carrier | None) -> None:
        """Create an idle sender. `carrier` sends experts, or is None for a dense model."""
        super().__init__(worker, self._taken)
        self._carrier = carrier

    @property
    def active(self) -> bool:
        return super().active or (self._carrier is not None and self._carrier.active)

    def abort(self) -> None:
        super().abort()
        if self._carrier is not None:
            self._carrier.abort()

    def leaving(self) -> tuple[int, int]:
        step = self._worker.machine.applied
        assert step is not None
        return self._worker.state, step

    def landed(self, peer: Peer, generation: int, what: tuple[int, int]) -> str:
        if not peer.machine.accept_push(generation):
            # A worker that leaves a generation closes its connections, so the transfer has no effect.
            return ""
        state, step = what
        before, senders = peer.receipt, frozenset((self._worker.id,))
        if before is not None and before.generation == generation:
            # Other senders have sent parts of a different state.
            if (before.step, before.state) != (step, state):
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
    """Sends experts during a step; the receiver keeps them apart from its own until it has applied the step."""

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
