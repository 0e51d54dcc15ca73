"""Where a worker's parts of checkpoints go: to its agent, or, where there is none, to where they stay."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from holdfast.control.link.checkpoints.lanes import CheckpointLanes
from holdfast.control.link.checkpoints.spool import PartSpool
from holdfast.control.link.checkpoints.store import CheckpointStore
from holdfast.control.link.framing import FromWorkerProcess
from holdfast.control.link.worker_settings import WorkerSettings
from holdfast.protocol.messages.orders import AcceptCheckpoint, PruneCheckpoints
from holdfast.runtime.checkpoints.saver import PartSink
from holdfast.storage import Storage

OrderHandler = Callable[[AcceptCheckpoint | PruneCheckpoints], None]


def make_sink(
    storage: Storage,
    settings: WorkerSettings | None,
    worker: str,
    send: Callable[[FromWorkerProcess], None],
    at_disk: Callable[[], None],
) -> tuple[PartSink, OrderHandler]:
    """Return where the parts of a worker go, and who does there what becomes of them.

    Args:
        settings: the agent's, None alone. tell: sends a message to agent or coordinator; thread-safe.
        at_disk: called while something is written; an OSError of it is the disk's.
    """
    if settings is not None and settings.parts:
        return PartSpool(Path(settings.parts), worker, send, at_disk), lambda order: None
    first, second = (CheckpointStore(storage, send, worker=worker, at_disk=at_disk) for _ in range(2))
    lanes = CheckpointLanes(first, second)
    return lanes, lanes.obey
