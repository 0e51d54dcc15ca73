"""What a worker has for each generation: a rendezvous board, a halt, a group, transfers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from holdfast.protocol.plan import GenerationPlan
from holdfast.runtime.groups.communicator import Communicator
from holdfast.runtime.groups.rendezvous import Board

if TYPE_CHECKING:
    from holdfast.runtime.state.receive import Receipt
    from holdfast.runtime.state.transfer import Push

#: Generations that may be known at once: the one in use, one pending, and keys that came before their plan.
MAX_GENERATIONS = 16


@dataclass(kw_only=True, slots=True)
class Resources:
    """What belongs to one generation. Guarded by the session's lock, but for `halt` and `board`."""

    generation: int
    board: Board
    halt: threading.Event = field(default_factory=threading.Event)
    plan: GenerationPlan | None = None
    communicator: Communicator | None = None
    dropped: bool = False
    push: Push | None = None
    receipt: Receipt | None = None
    moved_bytes: int = 0  # of experts that came here
    moving_s: float = 0.0

    def interrupt(self) -> None:
        """Break off all that waits in this generation: collectives, rendezvous, transfers. Never blocks."""
        self.halt.set()
        self.board.close()
        if self.push is not None:
            self.push.abort()
        if self.receipt is not None:
            self.receipt.abort()

    def leave(self) -> None:
        """Give the group up, for good; called by the thread that used it, or where none ever did."""
        self.dropped = True
        halted = self.halt.is_set()
        if self.communicator is not None:
            self.communicator.retire(sever=halted)
        # After a swap, peers may still be in the last operation: the group is not severed then.
        self.interrupt()


class Generations:
    """The generations that one worker knows, each with its resources. Not thread-safe."""

    def __init__(self, post: Callable[[int, str, bytes], None]) -> None:
        """Know no generation yet.

        Args:
            post: sends a rendezvous key of a generation to its other members.
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
            board = Board(generation, lambda key, value: self._post(generation, key, value), halt=halt)
            resources = self._generations[generation] = Resources(generation=generation, board=board, halt=halt)
            self._bound()
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
            resources.leave()

    def leave_before(self, generation: int) -> None:
        """Close all older generations; called by the training thread."""
        self._closed_up_to = max(self._closed_up_to, generation - 1)
        for resources in self.all():
            if resources.generation < generation:
                del self._generations[resources.generation]
                resources.leave()

    def close(self) -> None:
        """Close all generations, and open no more."""
        self.leave_before(1 << 62)

    def _bound(self) -> None:
        planless = [resources for resources in self.all() if resources.plan is None]
        if len(self._generations) > MAX_GENERATIONS and planless:
            self.drop(planless[0].generation)
