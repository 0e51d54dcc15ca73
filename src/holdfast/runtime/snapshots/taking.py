"""Takes snapshots as one member: copies its part of the state into its agent's memory during the next step.

Only the next `apply` waits, and only for the copy, because it changes the copied tensors. A thread computes checksums
and completes the file.
"""

from __future__ import annotations

import contextlib
import logging
import re
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Lock

import msgspec
import torch

from holdfast.control.link.snapshots.files import PartWriter
from holdfast.protocol.messages.worker import SnapshotLeftOut, SnapshotTaken
from holdfast.protocol.plan import GenerationPlan
from holdfast.protocol.state import SnapshotPart
from holdfast.runtime.dtensor.replica_position import WHOLE_REPLICA, ReplicaPosition
from holdfast.runtime.moe.expert_shards.job_experts import JobExperts
from holdfast.runtime.moe.expert_shards.shards import LayerSpec
from holdfast.runtime.snapshots.cutting import PartManifest, copy_range, part_range
from holdfast.runtime.state.state import StateView, TrainingState

logger = logging.getLogger(__name__)

_NUMBER = re.compile(r"\d+")


@dataclass(kw_only=True, slots=True)
class _Copy:
    """One part that is being copied."""

    view: StateView
    experts: tuple[tuple[int, int], ...]
    rows: list[torch.Tensor]
    specs: tuple[LayerSpec, ...]
    snapshot: SnapshotPart
    started: float
    stall_s: float = 0.0
    nbytes: int = 0
    #: set once the state's tensors are no longer read
    copied: Event = field(default_factory=Event)


class SnapshotTaker:
    """Takes this worker's parts, one at a time."""

    def __init__(
        self,
        *,
        folder: Path,
        job: str,
        worker: str,
        every: int,
        send: Callable[[SnapshotTaken | SnapshotLeftOut], None],
        position: ReplicaPosition = WHOLE_REPLICA,
    ) -> None:
        """Start without a snapshot.

        Args:
            folder: the agent's.
            every: steps between snapshots, or 0 for none.
            send: sends a message to the coordinator; thread-safe.
            position: the part of a replica on this worker.
        """
        self._position = position
        self._folder = folder
        self._job = job
        self._worker = worker
        self._every = every
        self._send = send
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="holdfast-snapshot")
        self._latest: _Copy | None = None
        self._writing: Future[None] | None = None
        #: the file for the next part; used only by the thread
        self._next_file: PartWriter | None = None
        #: why the last part was left out, without numbers; "" if it was written
        self._last_reason = ""
        self._lock = Lock()

    def is_due(self, step: int) -> bool:
        """Return whether a snapshot of this step is due: the same on all workers."""
        return self._every > 0 and step % self._every == 0

    def copy_if_due(self, state: TrainingState, experts: JobExperts | None, plan: GenerationPlan, step: int) -> None:
        """Start to copy this member's part of the state of `step`, applied under `plan`, in the taker's thread, if a
        snapshot is due. The state must not change before `wait_copied` has returned.

        Does nothing if this worker is not a member. If the part before is still being written, this one is left out,
        and that is reported.
        """
        rank = plan.rank(self._worker)
        if rank is None or not self.is_due(step):
            return
        if self._writing is not None and not self._writing.done():
            self._report_left_out(plan.generation, step, "the one before it is still being written")
            return
        started = time.monotonic()
        snapshot = plan.snapshot_part(rank, step)
        pairs, rows = experts.part_to_save() if experts is not None else ((), [])
        specs = experts.describe_layers() if experts is not None else ()
        view = state.capture()
        copy = _Copy(view=view, experts=pairs, rows=rows, specs=specs, snapshot=snapshot, started=started)
        copy.stall_s = time.monotonic() - started
        self._latest = copy
        self._writing = self._thread.submit(self._write, copy)

    def wait_copied(self) -> float:
        """Wait until no copy reads the state, before it changes. Return the seconds of waiting, which also count in the
        snapshot's report; 0.0 if nothing is being copied.
        """
        copy = self._latest
        if copy is None:
            return 0.0
        started = time.monotonic()
        copy.copied.wait()
        waited_s = time.monotonic() - started
        copy.stall_s += waited_s
        self._latest = None
        return waited_s

    def wait(self) -> None:
        """Wait until the last part is written, or left out."""
        if self._writing is not None:
            self._writing.result()

    def close(self) -> None:
        """Wait for the part in progress, stop the thread, and free the memory for the next part."""
        self._thread.shutdown(wait=True)
        if self._next_file is not None:
            self._next_file.abandon()
            self._next_file = None

    # ---- in the thread ----

    def _write(self, copy: _Copy) -> None:
        """Copy a part into its file, report it to the coordinator as taken, and allocate the next file. An error is
        reported as a part that is left out.
        """
        try:
            nbytes = self._copy_part(copy)
        except (OSError, RuntimeError) as error:  # torch raises RuntimeError.
            self._report_left_out(copy.snapshot.generation, copy.snapshot.step, str(error))
            return
        finally:
            copy.copied.set()
        with self._lock:
            self._last_reason = ""
        seconds = time.monotonic() - copy.started
        self._send(
            SnapshotTaken(
                worker=self._worker, snapshot=copy.snapshot, bytes=nbytes, seconds=seconds, stall_s=copy.stall_s
            )
        )
        self._prepare_next_file(copy.nbytes)

    def _copy_part(self, copy: _Copy) -> int:
        """Copy a part of the dense state and the rows of experts into a file, and complete it with its manifest; return
        the file's size in bytes. `copied` is set as soon as the state is no longer read. After an error the file is
        removed.

        Raises:
            OSError, RuntimeError: there is not enough memory, or copying failed.
        """
        view, snapshot = copy.view, copy.snapshot
        start, end = part_range(view.nbytes, *self._position.role_position(snapshot.part, snapshot.parts))
        expert_bytes = sum(row.numel() * row.element_size() for row in copy.rows)
        copy.nbytes = end - start + expert_bytes
        file = self._open_file(copy.nbytes)
        try:
            if len(file.body):
                body = torch.frombuffer(file.body, dtype=torch.uint8)
                copy_range(view.tensors, start, body[: end - start])
                copy_range(copy.rows, 0, body[end - start :])
            copy.copied.set()
            state = msgspec.msgpack.encode(view.manifest)
            manifest = PartManifest(state=state, start=start, specs=copy.specs, experts=copy.experts)
            return file.finish(self._job, snapshot, msgspec.msgpack.encode(manifest))
        except BaseException:
            file.abandon()
            raise

    def _open_file(self, nbytes: int) -> PartWriter:
        """Return a file with room for this many bytes: the one allocated in advance if it has the right size, else a
        new one; an allocated one of another size is removed.

        Raises:
            OSError: there is not enough memory.
        """
        ready, self._next_file = self._next_file, None
        if ready is not None and len(ready.body) == nbytes:
            return ready
        if ready is not None:
            ready.abandon()
        return PartWriter(self._folder, nbytes)

    def _prepare_next_file(self, nbytes: int) -> None:
        """Allocate memory for the next part in advance, because allocating its pages takes longer than copying."""
        with contextlib.suppress(OSError):  # `_open_file` tries again.
            self._next_file = PartWriter(self._folder, nbytes)

    def _report_left_out(self, generation: int, step: int, why: str) -> None:
        """Log, and report to the coordinator, why a snapshot is left out, but not the same reason twice in a row;
        numbers in it do not count. Later snapshots are tried anyway, because there may be more memory, or time.
        """
        with self._lock:
            reason = _NUMBER.sub("", why)  # Numbers, such as of free bytes, differ each time.
            if reason == self._last_reason:
                return
            self._last_reason = reason
        logger.warning("no snapshot of step %d is taken here: %s", step, why)
        self._send(SnapshotLeftOut(worker=self._worker, generation=generation, step=step, why=why[:1024]))
