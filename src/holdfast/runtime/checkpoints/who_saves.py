"""Who saves this process's part of the state, where the job has a place for checkpoints."""

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
    """Return it; None without a place.

    Args:
        every: steps between checkpoints, or that the job says when (`auto`). tell: whoever decides when.
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
        place=workload.place,
    )
