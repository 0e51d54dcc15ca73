"""What a worker has for each generation: a rendezvous board, a halt, groups, transfers; and what its threads share."""

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
from holdfast.runtime.groups.reach import CONNECT_S, find_unreachable
from holdfast.runtime.groups.rendezvous import Board
from holdfast.runtime.groups.transports.link_rate import LinkRate

if TYPE_CHECKING:
    from holdfast.runtime.state.parcels import Parcels
    from holdfast.runtime.state.receive import StateReceiver
    from holdfast.runtime.state.transfer import StateSender

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: Generations that may be known at once: the one in use, one pending, and keys that came before their plan.
MAX_GENERATIONS = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Groups:
    """The groups that a worker is in, of one generation.

    world: all members. The commit operation runs here, and v is added up; tokens and experts travel here.
    domain: the members of this worker's role. Gradients are reduced here. With one role it is the world, the same
        object.
    """

    world: Communicator
    domain: Communicator

    def retire(self, *, sever: bool = True) -> None:
        """Give all of them up, as `Communicator.retire`."""
        for group in dict.fromkeys((self.world, self.domain)):
            group.retire(sever=sever)


@dataclass(kw_only=True, slots=True)
class Resources:
    """What belongs to one generation. Guarded by the session's lock, but for `halt` and `board`."""

    generation: int
    board: Board
    halt: threading.Event = field(default_factory=threading.Event)
    plan: GenerationPlan | None = None
    groups: Groups | None = None
    dropped: bool = False
    push: StateSender | None = None
    receipt: StateReceiver | None = None
    parcels: Parcels | None = None  # what travels beside the generation's first step
    moved_bytes: int = 0  # of experts that came here
    moving_s: float = 0.0

    @property
    def has_sent(self) -> bool:
        """True once others have all that they are sent of the state here."""
        return (self.push is None or self.push.sent) and (self.parcels is None or self.parcels.sent)

    def interrupt(self) -> None:
        """Break off all that waits in this generation: collectives, rendezvous, transfers. Never blocks."""
        self.halt.set()
        self.board.close()
        if self.push is not None:
            self.push.abort()
        if self.receipt is not None:
            self.receipt.abort()
        if self.parcels is not None:
            self.parcels.abort()

    def retire(self) -> None:
        """Give the groups up, for good; called by the thread that used them, or where none ever did."""
        self.dropped = True
        halted = self.halt.is_set()
        if self.groups is not None:
            self.groups.retire(sever=halted)
        # After a swap, peers may still be in the last operation: the groups are not severed then.
        self.interrupt()
        if self.receipt is not None:
            self.receipt.release_tensors()  # (whoever is to wait until it is quiet keeps it, maybe for hours)


class Generations:
    """The generations that one worker knows, each with its resources. Not thread-safe."""

    def __init__(self, post: Callable[[int, dict[str, bytes]], None]) -> None:
        """Begin without any generation; each is made when it is first asked for.

        Args:
            post: sends rendezvous keys of a generation to its other members.
        """
        self._post = post
        self._generations: dict[int, Resources] = {}
        self._closed_up_to = 0

    def of(self, generation: int) -> Resources | None:
        """Return the resources of a generation, made on demand; None where the generation is over."""
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
        """Break off all that waits in the generations up to this one."""
        for resources in self.all():
            if resources.generation <= generation:
                resources.interrupt()

    def drop(self, generation: int) -> None:
        """Close a generation that no thread is in."""
        resources = self._generations.pop(generation, None)
        if resources is not None:
            resources.interrupt()
            resources.retire()

    def retire_before(self, generation: int) -> None:
        """Close all older generations; called by the training thread."""
        self._closed_up_to = max(self._closed_up_to, generation - 1)
        for resources in self.all():
            if resources.generation < generation:
                del self._generations[resources.generation]
                resources.retire()

    def close(self) -> None:
        """Close all generations, and open no more."""
        self.retire_before(1 << 62)

    def _drop_oldest_planless(self) -> None:
        planless = [resources for resources in self.all() if resources.plan is None]
        if len(self._generations) > MAX_GENERATIONS and planless:
            self.drop(planless[0].generation)


class ProposalPage(Protocol):
    """Where the places of a unit agree on what they compute together."""

    def agree(self, proposal: Proposal, still_wanted: Callable[[], bool]) -> bool:
        """Wait until all places have proposed this; False: it was not wanted any more first, and none of them goes."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedContext:
    """What a session's parts share: the machine and each generation's resources, guarded by `changed`; where the
    training thread, and no other, says what it is about."""

    changed: threading.Condition
    machine: WorkerMachine
    resources: Generations
    execute: Callable[[list[WorkerInstruction]], None]
    progress: ProgressSlot = field(default_factory=NoProgress)
    link: LinkRate = field(default_factory=LinkRate)
    proposals: ProposalPage | None = (
        None  # where the places of a unit agree on what they compute; None: there is one place
    )

    def is_over(self, generation: int) -> bool:
        """Return whether a generation is over for this worker; the lock is held."""
        return self.machine.frozen or self.machine.generation != generation

    def report_failure(self, generation: int, error: Exception | str, transfer_peers: Sequence[str] = ()) -> None:
        """Report that something of a generation failed; after a time-out, also which members cannot be reached.

        Args:
            transfer_peers: members at the other end of a state transfer that failed.
        """
        logger.info("generation %d: %s", generation, error)
        timed_out = isinstance(error, PeerLostError) and error.timed_out
        self._send_complaint(generation, str(error), timed_out=timed_out, look=timed_out, transfer_peers=transfer_peers)

    def abandon_groups(self, groups: Groups, generation: int, error: Exception) -> None:
        """A collective was left in the middle give the groups up, and tell what broke it, unless that was a Stop."""
        self.progress.at(Activity.AWAITING)
        groups.retire()
        if not isinstance(error, HaltedError):
            self.report_failure(generation, error)

    def report_unreachable_members(self, generation: int) -> None:
        """All members of a generation wait for each other, says the coordinator: tell who cannot be reached."""
        self._send_complaint(generation, "all members wait for each other", timed_out=False, look=True)

    def _send_complaint(
        self, generation: int, detail: str, *, timed_out: bool, look: bool, transfer_peers: Sequence[str] = ()
    ) -> None:
        with self.changed:
            looking = look and self.machine.on_wait_timeout(generation)
            plan = self.machine.generations.plan_of(generation) if looking else None
        cut_off: tuple[str, ...] = ()
        if plan is not None:
            until = time.monotonic() + CONNECT_S
            cut_off = find_unreachable(plan, self.machine.worker)
            with self.changed:
                # Who is cut off finds out later than who is not, and what it has to say must be heard as well.
                self.changed.wait_for(lambda: self.machine.frozen, timeout=until - time.monotonic())
        with self.changed:
            self.execute(
                self.machine.complain(
                    generation, detail, timed_out=timed_out, unreachable=cut_off, transfer_peers=transfer_peers
                )
            )

    def send(self, message: WorkerMessage) -> None:
        """Send something to the coordinator."""
        with self.changed:
            self.execute([SendToCoordinator(message)])

    def agree(self, proposal: Proposal, wanted: Callable[[], bool]) -> bool:
        """Wait until all places of the unit are about to compute something; False: none of them will.

        Args:
            wanted: asked meanwhile, under the lock, whether this place still is.
        """
        if self.proposals is None:
            return True

        def still_wanted() -> bool:
            with self.changed:
                return wanted()

        self.progress.at(Activity.AWAITING)
        return self.proposals.agree(proposal, still_wanted)

    def notify(self) -> None:
        """Let all threads look again."""
        with self.changed:
            self.changed.notify_all()

    def wait_for(self, generation: int, ready: Callable[[], T | None]) -> T | None:
        """Wait until something is there, or the generation is over (None)."""
        with self.changed:
            self.changed.wait_for(lambda: self.is_over(generation) or ready())
            return None if self.is_over(generation) else ready()

    def cross(self, generation: int, boundary: Callable[[WorkerMachine], bool]) -> bool:
        """Cross a boundary of the machine; False where the generation is over or the machine frozen."""
        with self.changed:
            return not self.is_over(generation) and boundary(self.machine)
