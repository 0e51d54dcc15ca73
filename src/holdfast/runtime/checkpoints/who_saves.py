"""Makes the checkpoint saver of a worker, if the job has a checkpoint directory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from holdfast.control.link.worker_settings import WorkerSettings
from holdfast.runtime.checkpoints.saver import CheckpointSaver, SampleSettings
from holdfast.runtime.checkpoints.sinks import make_sink
from holdfast.runtime.faults.orders import Faults
from holdfast.runtime.gradients.workload import Workload
from holdfast.storage import Storage


def make_saver(
    storage: Storage | None,
    settings: WorkerSettings | None,
    worker: str,
    every: int | str,
    send: Callable[[Any], None],
    faults: Faults,
    workload: Workload,
) -> CheckpointSaver | None:
    """Return the checkpoint saver, or None without a checkpoint directory.

    Args:
        every: steps between checkpoints, or `auto` if the coordinator decides when.
        send: sends a message to the coordinator.
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
