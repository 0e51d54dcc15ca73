"""A worker's resources for each generation (rendezvous, halt, groups, transfers), and the context of its threads."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Protocol, TypeVar

from holdfast.control.link.progress_page import NoProgress, ProgressSlot
from holdfast.coordination.worker.machine import WorkerMachine
from holdfast.coordination.worker.tasks import SendToCoordinator, WorkerInstruction
from holdfast.protocol.layouts.proposals import Proposal
from holdfast.protocol.messages.progress import Activity
from holdfast.protocol.messages.worker import WorkerMessage
from holdfast.protocol.plan import GenerationPlan
from holdfast.runtime.groups.communicator import Communicator, HaltedError, PeerLostError
from holdfast.runtime.groups.rendezvous import Board
from holdfast.runtime.groups.transports.link_rate import LinkRate
from holdfast.runtime.groups.unreachable_members import CONNECT_S, find_unreachable

if TYPE_CHECKING:
    from holdfast.runtime.state.parcels import Parcels
    from holdfast.runtime.state.receive import StateReceiver
    from holdfast.runtime.state.transfer import StateSender

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: At most this many generations are known at once: the one in use, a pending one, and keys that came before their plan.
MAX_GENERATIONS = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Groups:
    """The groups of one generation that a worker is in."""

    #: all members: for the commit operation, the step result, tokens and experts
    world: Communicator
    #: the members with this worker's role, which reduce gradients together. With one role it is the same object as
    #: `world`.
    domain: Communicator

    def retire(self, *, sever: bool = True) -> None:
        """Retire all of them, see `Communicator.retire`; one group with both uses is retired once.

        Args:
            sever: whether to break the connections to the peers.
        """
        for group in dict.fromkeys((self.world, self.domain)):
            group.retire(sever=sever)


@dataclass(kw_only=True, slots=True)
class Resources:
    """The resources of one generation. The session's lock guards all but `halt` and `board`."""

    generation: int
    board: Board
    halt: threading.Event = field(default_factory=threading.Event)
    plan: GenerationPlan | None = None
    groups: Groups | None = None
    dropped: bool = False
    push: StateSender | None = None
    receipt: StateReceiver | None = None
    #: experts that travel in the background of the generation's first step
    parcels: Parcels | None = None
    #: bytes of experts that moved to this worker, and the seconds it took
    moved_bytes: int = 0
    moving_s: float = 0.0

    @property
    def has_sent(self) -> bool:
        """Whether the other members have all state that this worker sends them."""
        return (self.push is None or self.push.sent) and (self.parcels is None or self.parcels.sent)

    def interrupt(self) -> None:
        """Interrupt all waits in this generation: collectives, rendezvous, transfers. Never blocks."""
        self.halt.set()
        self.board.close()
        if self.push is not None:
            self.push.abort()
        if self.receipt is not None:
            self.receipt.abort()
        if self.parcels is not None:
            self.parcels.abort()

    def retire(self) -> None:
        """Retire the groups, interrupt all waits, and release received tensors. The generation is over for this worker.

        Connections to peers are broken only if the generation was halted before. Called by the thread that used the
        groups, or if no thread did.
        """
        self.dropped = True
        halted = self.halt.is_set()
        if self.groups is not None:
            self.groups.retire(sever=halted)
        # After a swap, peers may still be in the last operation: the groups are not severed then.
        self.interrupt()
        if self.receipt is not None:
            # The next transfer keeps a reference to wait until it is quiet, perhaps for hours.
            self.receipt.release_tensors()


class Generations:
    """The generations that one worker knows, each with its resources. Not thread-safe."""

    def __init__(self, post: Callable[[int, dict[str, bytes]], None]) -> None:
        """Start without generations; each is created on demand.

        Args:
            post: sends rendezvous keys of a generation to its other members.
        """
        self._post = post
        self._generations: dict[int, Resources] = {}
        self._closed_up_to = 0

    def of(self, generation: int) -> Resources | None:
        """Return the resources of a generation, created on demand; None if the generation is over.

        If there are too many, the oldest one without a plan is dropped.
        """
        if generation <= self._closed_up_to:
            return None
        resources = self._generations.get(generation)
        if resources is None:
            halt = threading.Event()
            board = Board(generation, partial(self._post, generation), halt=halt)
            resources = self._generations[generation] = Resources(generation=generation, board=board, halt=halt)
            self._drop_oldest_planless()
        return resources

    def all(self) -> list[Resources]:
        """Return the resources of all generations, oldest first."""
        return [self._generations[generation] for generation in sorted(self._generations)]

    def interrupt(self, generation: int) -> None:
        """Interrupt all waits in the generations up to this one. They stay known, and nothing is released."""
        for resources in self.all():
            if resources.generation <= generation:
                resources.interrupt()

    def drop(self, generation: int) -> None:
        """Interrupt and retire a generation that no thread uses. Ignored if it is not known."""
        resources = self._generations.pop(generation, None)
        if resources is not None:
            resources.interrupt()
            resources.retire()

    def retire_before(self, generation: int) -> None:
        """Retire all older generations, and refuse them from now on. Called by the training thread."""
        self._closed_up_to = max(self._closed_up_to, generation - 1)
        for resources in self.all():
            if resources.generation < generation:
                del self._generations[resources.generation]
                resources.retire()

    def close(self) -> None:
        """Close all generations, and refuse new ones."""
        self.retire_before(1 << 62)

    def _drop_oldest_planless(self) -> None:
        """Drop the oldest generation without a plan, if more than `MAX_GENERATIONS` are known."""
        planless = [resources for resources in self.all() if resources.plan is None]
        if len(self._generations) > MAX_GENERATIONS and planless:
            self.drop(planless[0].generation)


class ProposalPage(Protocol):
    """The shared memory in which the ranks of a replica group agree on their work."""

    def agree(self, proposal: Proposal, still_wanted: Callable[[], bool]) -> bool:
        """Wait until all ranks proposed this. Return False if it became obsolete first; then no rank computes it."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedContext:
    """What the parts of a session share. `changed` guards the machine and the resources of each generation."""

    changed: threading.Condition
    machine: WorkerMachine
    resources: Generations
    #: executes the machine's instructions; the caller holds the lock
    execute: Callable[[list[WorkerInstruction]], None]
    #: where the training thread, and no other, reports its activity
    progress: ProgressSlot = field(default_factory=NoProgress)
    link_rate: LinkRate = field(default_factory=LinkRate)
    proposals: ProposalPage | None = (
        None  # where the ranks of a replica group agree on their work; None if it has one rank
    )

    def is_over(self, generation: int) -> bool:
        """Return whether a Stop froze this worker, or it is in another generation. The caller holds the lock."""
        return self.machine.frozen or self.machine.generation != generation

    def report_failure(self, generation: int, error: Exception | str, transfer_peers: Sequence[str] = ()) -> None:
        """Report a failure in a generation to the coordinator, unless the generation is over.

        After a time-out (`PeerLostError.timed_out`), find out first which members are unreachable, and report them too.

        Args:
            error: why; its text is also logged.
            transfer_peers: members at the other end of a state transfer that failed.
        """
        logger.info("generation %d: %s", generation, error)
        timed_out = isinstance(error, PeerLostError) and error.timed_out
        self._send_complaint(
            generation, str(error), timed_out=timed_out, probe=timed_out, transfer_peers=transfer_peers
        )

    def abandon_groups(self, groups: Groups, generation: int, error: Exception) -> None:
        """Retire `groups` after `error` interrupted a collective in them. Report the error to the coordinator as a
        failure of the generation, except for a HaltedError: then a Stop has come.
        """
        self.progress.start_activity(Activity.AWAITING)
        groups.retire()
        if not isinstance(error, HaltedError):
            self.report_failure(generation, error)

    def report_unreachable_members(self, generation: int) -> None:
        """Try to connect to all members of a generation in which all wait, and report the unreachable ones."""
        self._send_complaint(generation, "all members wait for each other", timed_out=False, probe=True)

    def _send_complaint(
        self, generation: int, detail: str, *, timed_out: bool, probe: bool, transfer_peers: Sequence[str] = ()
    ) -> None:
        """Report a failure to the coordinator, unless it is of a generation that is over.

        Args:
            detail: why, as text.
            timed_out: whether a wait timed out; the coordinator is told.
            probe: whether to find out first which members are unreachable, and report them. The report then waits up to
                `CONNECT_S` for a Stop, because a member that is cut off notices it later than the others.
            transfer_peers: members at the other end of a state transfer that failed.
        """
        with self.changed:
            probing = probe and self.machine.on_wait_timeout(generation)
            plan = self.machine.generations.plan_of(generation) if probing else None
        cut_off: tuple[str, ...] = ()
        if plan is not None:
            until = time.monotonic() + CONNECT_S
            cut_off = find_unreachable(plan, self.machine.worker)
            with self.changed:
                # A member that is cut off notices it later than the others, and its report must be received too.
                self.changed.wait_for(lambda: self.machine.frozen, timeout=until - time.monotonic())
        with self.changed:
            self.execute(
                self.machine.complain(
                    generation, detail, timed_out=timed_out, unreachable=cut_off, transfer_peers=transfer_peers
                )
            )

    def send(self, message: WorkerMessage) -> None:
        """Send a message to the coordinator."""
        with self.changed:
            self.execute([SendToCoordinator(message)])

    def agree(self, proposal: Proposal, wanted: Callable[[], bool]) -> bool:
        """Wait until all ranks of the replica group have proposed the same work, and return True. Return False if
        `wanted` returned False first: then no rank starts it.

        True, at once, if the replica group has one rank.

        Args:
            proposal: the work.
            wanted: whether this rank still wants to start it; called repeatedly, under the lock.
        """
        if self.proposals is None:
            return True

        def still_wanted() -> bool:
            with self.changed:
                return wanted()

        self.progress.start_activity(Activity.AWAITING)
        return self.proposals.agree(proposal, still_wanted)

    def notify(self) -> None:
        """Wake all threads, to check their conditions again."""
        with self.changed:
            self.changed.notify_all()

    def wait_for(self, generation: int, ready: Callable[[], T | None]) -> T | None:
        """Wait until `ready` returns something true, and return it; None if the generation is over.

        `ready` is called under the lock, after each notification. If it always returns None, this waits for the Stop.
        """
        with self.changed:
            self.changed.wait_for(lambda: self.is_over(generation) or ready())
            return None if self.is_over(generation) else ready()

    def cross(self, generation: int, boundary: Callable[[WorkerMachine], bool]) -> bool:
        """Call a method of the machine that crosses a boundary, under the lock, and return its result.

        False, without a call, if the generation is over. The method itself returns False if the machine is frozen.
        """
        with self.changed:
            return not self.is_over(generation) and boundary(self.machine)
