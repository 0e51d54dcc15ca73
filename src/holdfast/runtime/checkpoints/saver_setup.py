"""Makes the checkpoint saver of a worker, if the job has a checkpoint directory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from holdfast.control.link.checkpoints.lanes import CheckpointLanes
from holdfast.control.link.checkpoints.spool import PartSpool
from holdfast.control.link.checkpoints.store import CheckpointStore
from holdfast.control.link.framing import FromWorkerProcess
from holdfast.control.link.worker_settings import WorkerSettings
from holdfast.protocol.messages.orders import AcceptCheckpoint, PruneCheckpoints
from holdfast.runtime.checkpoints.saver import CheckpointSaver, PartSink, SampleSettings
from holdfast.runtime.faults.orders import Faults
from holdfast.runtime.gradients.workload import Workload
from holdfast.storage import Storage

OrderHandler = Callable[[AcceptCheckpoint | PruneCheckpoints], None]


def make_sink(
    storage: Storage,
    settings: WorkerSettings | None,
    worker: str,
    send: Callable[[FromWorkerProcess], None],
    at_disk: Callable[[], None],
) -> tuple[PartSink, OrderHandler]:
    """Return the sink of a worker's parts, and the handler of orders about them.

    If the agent takes parts, the sink passes them to it through its folder, and the handler does nothing; else this
    process writes them to the storage, and the handler executes the orders.

    Args:
        settings: the agent's; None without an agent.
        worker: this worker's name.
        send: sends a message to the agent or the coordinator; thread-safe.
        at_disk: called during writes; its OSErrors count as errors of the disk.
    """
    if settings is not None and settings.parts:
        return PartSpool(Path(settings.parts), worker, send, at_disk), lambda order: None
    first, second = (CheckpointStore(storage, send, worker=worker, at_disk=at_disk) for _ in range(2))
    lanes = CheckpointLanes(first, second)
    return lanes, lanes.execute


def make_saver(
    storage: Storage | None,
    settings: WorkerSettings | None,
    worker: str,
    every: int | str,
    send: Callable[[Any], None],
    faults: Faults,
    workload: Workload,
) -> CheckpointSaver | None:
    """Return a worker's checkpoint saver, which writes to its agent or to the storage (`make_sink`); None if `storage`
    is None, because there is no checkpoint directory.

    Args:
        every: steps between checkpoints, or `auto` if the coordinator decides when.
        send: sends a message to the coordinator.
        faults: makes writes fail if a fault of the disk is injected.
        workload: its order of samples is saved with checkpoints, and compared when they are loaded.

    Raises:
        BadInputError: the directory is not usable, or `every` is below 1.
    """
    if storage is None:
        return None
    sink, obey = make_sink(storage, settings, worker, send, faults.strike_at_disk)
    return CheckpointSaver(
        storage=storage,
        worker=worker,
        every=None if isinstance(every, str) else every,
        sink=sink,
        send=send,
        forward_order=obey,
        samples=SampleSettings.from_order(workload.loader.order),
        position=workload.position,
    )
