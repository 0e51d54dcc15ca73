"""Two checkpoint stores, so that a requested save does not wait for a part that is still being written."""

from __future__ import annotations

import contextlib

from holdfast.control.link.checkpoints.store import CheckpointStore, PartToWrite
from holdfast.protocol.checkpoints.names import parse_name
from holdfast.protocol.messages.orders import AcceptCheckpoint, PruneCheckpoints


class CheckpointLanes:
    """Writes with the first store, and with the second one while the first is still writing another checkpoint."""

    def __init__(self, first: CheckpointStore, second: CheckpointStore) -> None:
        """Both stores write to the same place."""
        self._lanes = first, second

    @property
    def is_free(self) -> bool:
        """True if no part is being written or waits."""
        return all(lane.is_free for lane in self._lanes)

    def write(self, part: PartToWrite) -> None:
        """Enqueue a part. A store's thread writes it and reports the result."""
        self._lane_for(part.name.folder).write(part)

    def execute(self, order: AcceptCheckpoint | PruneCheckpoints) -> None:
        """Execute an order in the background.

        An `AcceptCheckpoint` with files seals that checkpoint; without files, checkpoints older than that are no longer
        written. `PruneCheckpoints` removes the named ones, if its `remove` is set.
        """
        if isinstance(order, PruneCheckpoints):
            # The lane that may still be writing a checkpoint removes it afterwards.
            for name in order.names if order.remove else ():
                self._lane_for(name).execute(PruneCheckpoints(term=order.term, names=(name,)))
        elif order.files:
            self._lane_for(order.name).execute(order)
        else:
            with contextlib.suppress(ValueError):  # not a checkpoint's name, so there is nothing to give up
                newest = parse_name(order.name)
                for lane in self._lanes:
                    lane.give_up_before(newest)

    def close(self) -> None:
        """Wait for the parts that are being written, unless a write hangs."""
        for lane in self._lanes:
            lane.close()

    def _lane_for(self, checkpoint: str) -> CheckpointStore:
        """Return the store that is writing a checkpoint, else one that is free, else the second."""
        first, second = self._lanes
        for lane in self._lanes:
            if checkpoint in lane.writing:
                return lane
        return first if first.is_free else second
