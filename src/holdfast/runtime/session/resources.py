"""One room per generation: its rendezvous board, its halt, its group, its transfers."""

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
MAX_ROOMS = 16


@dataclass(kw_only=True, slots=True)
class Room:
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
        """Break off all that waits in this room: collectives, rendezvous, transfers. Never blocks."""
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


class Rooms:
    """The rooms of one worker, by generation. Not thread-safe."""

    def __init__(self, post: Callable[[int, str, bytes], None]) -> None:
        """Have none.

        Args:
            post: sends a rendezvous key of a generation to its other members.
        """
        self._post = post
        self._rooms: dict[int, Room] = {}
        self._closed_up_to = 0

    def room(self, generation: int) -> Room | None:
        """Return the room of a generation, made on demand; None where the generation is over."""
        if generation <= self._closed_up_to:
            return None
        room = self._rooms.get(generation)
        if room is None:
            halt = threading.Event()
            board = Board(generation, lambda key, value: self._post(generation, key, value), halt=halt)
            room = self._rooms[generation] = Room(generation=generation, board=board, halt=halt)
            self._bound()
        return room

    def all(self) -> list[Room]:
        """Return all rooms, oldest first."""
        return [self._rooms[generation] for generation in sorted(self._rooms)]

    def interrupt(self, generation: int) -> None:
        """Break off all that waits in the generations up to this one."""
        for room in self.all():
            if room.generation <= generation:
                room.interrupt()

    def drop(self, generation: int) -> None:
        """Close a room that is not used by any thread."""
        room = self._rooms.pop(generation, None)
        if room is not None:
            room.interrupt()
            room.leave()

    def leave_before(self, generation: int) -> None:
        """Close all older rooms; called by the training thread."""
        self._closed_up_to = max(self._closed_up_to, generation - 1)
        for room in self.all():
            if room.generation < generation:
                del self._rooms[room.generation]
                room.leave()

    def close(self) -> None:
        """Close all rooms, and open no more."""
        self.leave_before(1 << 62)

    def _bound(self) -> None:
        planless = [room for room in self.all() if room.plan is None]
        if len(self._rooms) > MAX_ROOMS and planless:
            self.drop(planless[0].generation)
