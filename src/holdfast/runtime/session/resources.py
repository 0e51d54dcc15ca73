"""One room per epoch: its rendezvous board, its halt, its group, its transfers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from holdfast.protocol.plan import EpochPlan
from holdfast.runtime.groups.communicator import Communicator
from holdfast.runtime.groups.rendezvous import Board

if TYPE_CHECKING:
    from holdfast.runtime.state.receive import Receipt
    from holdfast.runtime.state.transfer import Push

#: Epochs that may be known at once: the one in use, one pending, and keys that came before their plan.
MAX_ROOMS = 16


@dataclass(kw_only=True, slots=True)
class Room:
    """What belongs to one epoch. Guarded by the session's lock, but for `halt` and `board`."""

    epoch: int
    board: Board
    halt: threading.Event = field(default_factory=threading.Event)
    plan: EpochPlan | None = None
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
    """The rooms of one worker, by epoch. Not thread-safe."""

    def __init__(self, post: Callable[[int, str, bytes], None]) -> None:
        """Have none.

        Args:
            post: sends a rendezvous key of an epoch to its other members.
        """
        self._post = post
        self._rooms: dict[int, Room] = {}
        self._closed_up_to = 0

    def room(self, epoch: int) -> Room | None:
        """Return the room of an epoch, made on demand; None where the epoch is over."""
        if epoch <= self._closed_up_to:
            return None
        room = self._rooms.get(epoch)
        if room is None:
            halt = threading.Event()
            board = Board(epoch, lambda key, value: self._post(epoch, key, value), halt=halt)
            room = self._rooms[epoch] = Room(epoch=epoch, board=board, halt=halt)
            self._bound()
        return room

    def all(self) -> list[Room]:
        """Return all rooms, oldest first."""
        return [self._rooms[epoch] for epoch in sorted(self._rooms)]

    def interrupt(self, epoch: int) -> None:
        """Break off all that waits in the epochs up to this one."""
        for room in self.all():
            if room.epoch <= epoch:
                room.interrupt()

    def drop(self, epoch: int) -> None:
        """Close a room that is not used by any thread."""
        room = self._rooms.pop(epoch, None)
        if room is not None:
            room.interrupt()
            room.leave()

    def leave_before(self, epoch: int) -> None:
        """Close all older rooms; called by the training thread."""
        self._closed_up_to = max(self._closed_up_to, epoch - 1)
        for room in self.all():
            if room.epoch < epoch:
                del self._rooms[room.epoch]
                room.leave()

    def close(self) -> None:
        """Close all rooms, and open no more."""
        self.leave_before(1 << 62)

    def _bound(self) -> None:
        planless = [room for room in self.all() if room.plan is None]
        if len(self._rooms) > MAX_ROOMS and planless:
            self.drop(planless[0].epoch)
